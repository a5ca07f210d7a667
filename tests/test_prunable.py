"""Which filters can go at all: those whose maps one convolution alone looks at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leanconv.network.prunable import prunable
from leanconv.network.replaceable import replaceable
from leanconv.network.survey import survey
from leanconv.network.trial import Trial


def chain(*between: nn.Module, width: int = 12) -> nn.Sequential:
    """Three convolutions; ``between`` the first two stands what is given, or a ReLU."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        *(between or (nn.ReLU(),)),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 5),
    ).eval()


class Block(nn.Module):
    """A bottleneck between two convolutions, with a batch norm behind each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.a, self.b, self.c = nn.Conv2d(8, 6, 1), nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 8, 1)
        self.na, self.nb, self.nc = nn.BatchNorm2d(6), nn.BatchNorm2d(6), nn.BatchNorm2d(8)
        self.last = nn.Conv2d(8, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        y = self.nc(self.c(self.nb(self.b(self.na(self.a(x)).relu())).relu()))
        out: Tensor = self.last((x + y).relu()).mean((2, 3))
        return out


class Twice(nn.Module):
    """Two layers look at the first one's maps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.other = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3), nn.Conv2d(6, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return torch.cat([self.second(x).relu(), self.other(x).relu()], 1).mean((2, 3))


class By(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def found(network: nn.Module, images: Tensor) -> tuple[Trial, list[Any], Any]:
    seen = survey(network, images)
    trial = Trial(network, images)
    return trial, replaceable(trial, list(seen.sites)), seen


@pytest.mark.parametrize(
    ("network", "wanted"),
    [
        (chain(), [("0", "2"), ("2", "4")]),
        (chain(nn.BatchNorm2d(12), nn.ReLU()), [("0", "3"), ("3", "5")]),
        (chain(nn.LeakyReLU(0.1), nn.MaxPool2d(2), nn.Dropout(0.5)), [("0", "4"), ("4", "6")]),
        (chain(nn.PReLU(12)), [("2", "4")]),  # it has a number a channel
        (chain(By(lambda x: x.flip(1).relu())), [("2", "4")]),
        (chain(nn.GroupNorm(4, 12), nn.ReLU()), [("3", "5")]),  # channels are normalised together
        (chain(By(lambda x: x.relu() * x[:, :1].sigmoid())), [("2", "4")]),  # a channel is known by its number
        (chain(By(lambda x: x.relu() * x[:, -1:].sigmoid())), [("2", "4")]),
        (chain(By(lambda x: x.relu() / x.amax(1, keepdim=True))), [("2", "4")]),
        (chain(width=1), []),
        (Block().eval(), [("a", "b"), ("b", "c")]),  # stem's maps go on beside the block, and c's are added to them
        (Twice().eval(), []),
    ],
)
def test_filters_can_go_where_one_convolution_alone_looks_at_them(
    network: nn.Module, wanted: list[tuple[str, str]]
) -> None:
    trial, sites, _ = found(network, torch.randn(2, 3, 12, 12))
    assert [(pair.giver.name, pair.taker.name) for pair in prunable(trial, sites)] == wanted
