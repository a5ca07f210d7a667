"""Ranks by sensitivity in whole runs: what is met, what is refused, what is kept, and when energy takes its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leanconv
from leanconv.calibrate.batches import Batch
from leanconv.calibrate.gradients import Gradients
from leanconv.errors import LeanconvError
from leanconv.ranks.sensitivity import measure
from tests.support.command import NETWORK as NET_PY
from tests.support.command import call
from tests.support.detectors import build
from tests.support.equality import assert_equal
from tests.support.networks import plain_network, residual
from tests.support.pictures import smooth_images, write_picture

QUICK: dict[str, Any] = {"samples": 2000, "progress": False, "solver": "linear"}


class Deaf(nn.Module):
    """Two branches of the same kind; the output does not depend on the second."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.heard = nn.Conv2d(16, 32, 3, padding=1)
        self.unheard = nn.Conv2d(16, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return (self.heard(x).relu() + 0 * self.unheard(x).relu()).mean((2, 3))


def pointwise() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 1),
        nn.ReLU(),
        nn.Conv2d(64, 32, 3, padding=1, groups=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 1),
        nn.ReLU(),
        nn.Flatten(2),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
    ).eval()


@pytest.mark.parametrize("speedup", [2.0, 3.0, 4.0])
@pytest.mark.parametrize("build", [plain_network, residual, pointwise])
def test_target_is_met(build: Any, speedup: float) -> None:
    result = leanconv.accelerate(build(), smooth_images(), speedup, ranks="sensitivity", skip=[], **QUICK)
    assert speedup <= result.speedup < 1.02 * speedup
    assert result.seconds["measuring layers"] > 0


@pytest.mark.parametrize("scheme", ["channel", "spatial"])
def test_other_schemes(scheme: Any) -> None:
    result = leanconv.accelerate(plain_network(), smooth_images(), 2, scheme, ranks="sensitivity", **QUICK)
    assert 2 <= result.speedup < 2.04
    assert {layer.scheme for layer in result.layers} == {scheme}


@pytest.mark.parametrize("scheme", ["channel", "spatial", "3d"])
def test_a_layer_whose_responses_never_vary(scheme: Any) -> None:
    network = plain_network(batch_norm=False)
    dead = network[2]
    assert isinstance(dead, nn.Conv2d)
    nn.init.zeros_(dead.weight)
    nn.init.constant_(dead.bias, -1.0)
    result = leanconv.accelerate(network, smooth_images(), 2, scheme, ranks="sensitivity", **QUICK)
    assert 2 <= result.speedup < 2.04


def test_what_the_output_does_not_depend_on_gets_the_least() -> None:
    torch.manual_seed(0)
    result = leanconv.accelerate(Deaf().eval(), smooth_images(), 1.8, ranks="sensitivity", **QUICK)
    macs = {layer.name: layer.macs_after for layer in result.layers}
    assert macs["unheard"] < 0.1 * macs.get("heard", 16 * 16 * 32 * 16 * 9)


def test_same_seed_same_plan() -> None:
    plans = [
        [(layer.name, layer.scheme, layer.ranks) for layer in result.layers]
        for result in (
            leanconv.accelerate(plain_network(), smooth_images(40).split(7), 3, ranks="sensitivity", **QUICK)
            for _ in range(2)
        )
    ]
    assert plans[0] == plans[1]


def test_outputs_of_many_tensors_and_images_of_many_sizes() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = plain_network()[:8]

        def forward(self, x: Tensor) -> dict[str, Any]:
            features = self.body(x)
            return {"map": features, "names": ["a"], "mean": [features.mean((2, 3)), features.argmax(1)]}

    batches = [smooth_images(4, size) for size in (16, 20, 16)]
    result = leanconv.accelerate(Many().eval(), batches, 2, ranks="sensitivity", **QUICK)
    assert 2 <= result.speedup < 2.04


def test_detectors_answer_with_many_tensors() -> None:
    generator = torch.Generator().manual_seed(0)
    images = [[torch.rand(3, *size, generator=generator) for size in ((64, 80), (70, 64))] for _ in range(3)]
    result = leanconv.accelerate(build("retinanet"), images, 1.5, ranks="sensitivity", **QUICK)
    assert 1.5 <= result.speedup < 1.53


class Ends(nn.Module):
    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body, self.end = plain_network(), end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.body(x))


class Sealed(Ends):
    """A network whose author did not mean it to be trained."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


def silent() -> nn.Module:
    network = plain_network()
    nn.init.zeros_(network[-1].weight)
    nn.init.zeros_(network[-1].bias)
    return network


# Networks without gradients of the output, and what is said of them.
WITHOUT = {
    "classes": (lambda: Ends(lambda x: x.argmax(1)), "outputs are all 0, not finite or do not depend on its layers"),
    "silent": (silent, "outputs are all 0, not finite or do not depend on its layers"),
    "no_grad": (lambda: Sealed(lambda x: x), "outputs are all 0, not finite or do not depend on its layers"),
    "numpy": (lambda: Ends(lambda x: torch.from_numpy(x.numpy() * 2)), "output cannot be differentiated"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_without_gradients_auto_is_by_energy_and_says_so_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    build, said = WITHOUT[name]
    found = leanconv.accelerate(build().eval(), smooth_images(), 2, **QUICK)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "chosen by energy" in line]
    assert "warning: ranks are chosen by energy, as gradients are not to be had: the network's" in line
    assert said in line
    by_energy = leanconv.accelerate(build().eval(), smooth_images(), 2, ranks="energy", **QUICK)
    assert_equal(found, by_energy)
    assert "by energy" not in capsys.readouterr().err


@pytest.mark.parametrize("name", WITHOUT)
def test_without_gradients_sensitivity_is_refused(name: str) -> None:
    build, said = WITHOUT[name]
    expected = rf"^ranks='sensitivity' needs gradients, and .*{said}.*; use ranks='energy'\.$"
    if name == "classes":  # before anything is measured
        expected = r"returns no floating-point tensors; use ranks='energy'\.$"
    with pytest.raises(LeanconvError, match=expected):
        leanconv.accelerate(build().eval(), smooth_images(), 2, ranks="sensitivity", **QUICK)


def test_no_memory_for_the_gradients_of_one_image_is_no_gradients(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: list[int] = []

    def hungry(_: nn.Module, images: list[Batch], *rest: Any, **named: Any) -> dict[str, Gradients]:
        sizes.append(max(batch.size for batch in images))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(measure, "output_gradients", hungry)
    found = leanconv.accelerate(plain_network(), smooth_images(), 2, **QUICK)
    assert "no memory for those of one image" in capsys.readouterr().err
    assert sizes[0] > 8
    assert sizes[1:] == [sizes[0] >> halved for halved in range(1, len(sizes))]
    assert sizes[-1] == 1
    assert 2 <= found.speedup < 2.04
    with pytest.raises(LeanconvError, match=r"there is no memory for those of one image.*; use ranks='energy'\.$"):
        leanconv.accelerate(plain_network(), smooth_images(), 2, ranks="sensitivity", **QUICK)


def test_an_error_of_the_choice_is_not_taken_for_missing_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LeanconvError, match="ask for at most that"):
        leanconv.accelerate(plain_network(), smooth_images(), 1000, **QUICK)
    assert "by energy" not in capsys.readouterr().err


def test_auto_is_sensitivity_where_filters_are_fitted_freely() -> None:
    model, images = plain_network(), smooth_images()
    found, wanted = (leanconv.accelerate(model, images, 2, ranks=ranks, **QUICK) for ranks in ("auto", "sensitivity"))
    assert_equal(found, wanted)
    assert leanconv.accelerate(model, images, 2, **QUICK).options.ranks == "auto"


@pytest.mark.parametrize("arguments", [{"refine": "none"}, {"asymmetric": False}, {"scheme": "spatial"}])
def test_auto_is_energy_where_they_are_not(arguments: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    model, images = plain_network(), smooth_images()
    found = leanconv.accelerate(model, images, 2, **arguments, **QUICK)
    assert "by energy" not in capsys.readouterr().err
    assert_equal(found, leanconv.accelerate(model, images, 2, ranks="energy", **arguments, **QUICK))


def test_a_target_goes_with_latency_only() -> None:
    with (
        pytest.warns(FutureWarning, match="target= is going"),
        pytest.raises(LeanconvError, match=r"target=.* goes with ranks='latency' only"),
    ):
        leanconv.accelerate(plain_network(), smooth_images(), ranks="sensitivity", target=leanconv.Target())


def test_few_images_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are taken of so many however many there are, drawn from all."""
    seen: list[list[Batch]] = []
    usual = measure.output_gradients

    def noted(original: nn.Module, images: list[Batch], *rest: Any, **named: Any) -> dict[str, Gradients]:
        seen.append(images)
        return usual(original, images, *rest, **named)

    monkeypatch.setattr(measure, "output_gradients", noted)
    monkeypatch.setattr(measure, "IMAGES", 16)
    images = smooth_images(50)
    leanconv.accelerate(plain_network(), images.split(5), 2, ranks="sensitivity", **QUICK)
    (found,) = seen  # once, for ranks, splits and fits
    drawn = torch.cat([piece for batch in found for piece in batch.pieces])
    assert len(drawn) == 16
    numbers = [int((images == one).flatten(1).all(1).nonzero()) for one in drawn]
    assert len({number // 5 for number in numbers}) > 5


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(NET_PY)
    for number in range(8):
        write_picture(tmp_path / "photos" / f"{number}.png", 20 + 30 * number)
    monkeypatch.chdir(tmp_path)
    words = "accelerate net.py:build --images photos --size 32 --speedup 2 --samples 200 --ranks sensitivity --report"
    code, said, meanwhile = call(f"{words} --workers 0 --out fast", monkeypatch, capsys)
    assert code == 0, meanwhile
    assert "2.0" in said
    assert "measuring layers" in meanwhile
    page = (tmp_path / "fast" / "report.html").read_text()
    assert "ranks by sensitivity" in page
    assert "This run chose its ranks in another way" in page
    code, said, meanwhile = call("accelerate net.py:build --images photos --ranks feeling --out b", monkeypatch, capsys)
    assert code == 2
    assert "use 'auto', 'uniform', 'energy', 'sensitivity', 'latency' or a dict" in meanwhile
