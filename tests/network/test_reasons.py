"""Every reason in ``result.skipped``: documented, and seen in a result."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import leanconv
from leanconv.network import reasons
from tests.support.networks import Odd, plain_network
from tests.support.pictures import smooth_images
from tests.support.reasons import ALL

DOCUMENT = (Path(__file__).parents[2] / "docs" / "networks.md").read_text()


def skipped(model: nn.Module, speedup: float = 1.2, **arguments) -> dict[str, str]:
    arguments = {"scheme": "channel", "samples": 500, "progress": False, **arguments}
    return leanconv.accelerate(model, smooth_images(8), speedup, **arguments).skipped


class Thin(nn.Module):
    """One layer worth the trouble between two that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.thin = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 1, 1)
        self.wide, self.also = nn.Conv2d(16, 32, 3), nn.Conv2d(32, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return self.also(F.relu(self.wide(x * torch.sigmoid(self.thin(x)))))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.complex = nn.Conv2d(8, 8, 3, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        return self.complex(self.b(F.relu(self.a(x))).to(torch.complex64)).abs()


def test_every_reason_is_given_by_some_network() -> None:
    torch.manual_seed(0)
    seen: dict[str, str] = {}
    odd = skipped(Odd().eval(), 1.05)
    seen |= {reason: name for name, reason in odd.items()}
    for case in (
        skipped(Thin().eval()),
        skipped(Complex().eval(), 1.25),
        skipped(plain_network(), skip=["3"]),
        skipped(plain_network(), ranks={"3": 4}, skip=[]),
        skipped(plain_network(), 1.01, ranks="energy"),
        skipped(plain_network(), part="3", skip=[]),
        skipped(nn.Sequential(*[nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3)]).eval(), scheme="spatial"),
    ):
        seen |= {reason: name for name, reason in case.items()}
    assert set(seen) == set(ALL)
    assert odd["held"] == reasons.NOT_AT_PATH


def test_the_documented_list_is_the_list() -> None:
    section = DOCUMENT.partition("## Reasons")[2].partition("\n## ")[0]
    documented = [line.split(" | ")[0].removeprefix("| ") for line in section.splitlines() if line.startswith("| ")]
    assert documented[1:] == list(ALL)


def test_people_see_a_line_a_reason() -> None:
    skipped = {f"conv{number}": reasons.DEPTHWISE for number in range(6)} | {"stem": reasons.FIRST}
    lines = reasons.by_reason(skipped)
    assert lines == [
        f"conv0, conv1, conv2, conv3 and 2 more ({reasons.DEPTHWISE})",
        f"stem ({reasons.FIRST})",
    ]
