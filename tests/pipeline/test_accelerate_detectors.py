"""Detectors: the same boxes in both networks, layers that run on every map, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leanconv
from leanconv import LeanconvError
from leanconv.forms.fit import fit_layer
from leanconv.network import reasons
from leanconv.network.survey import survey
from leanconv.network.torchvision_detectors import kind_of, seen_as_detector, seen_as_tensors, tensors_of
from leanconv.pipeline import solve_layers as solving
from leanconv.pipeline.inspection import inspect_network
from tests.support.detectors import CHANNELS, build


def pictures(seed: int = 0) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = [(64, 80), (72, 64), (64, 64), (90, 64)]
    images = [torch.rand(3, *size, generator=generator) for size in sizes]
    return [images[:2], images[2:]]


KINDS = ("faster", "mask", "keypoint", "retinanet", "fcos", "ssd")


def view(model: nn.Module, given: dict[str, Tensor]) -> list[Tensor]:
    seen = copy.deepcopy(model)
    seen_as_tensors(seen)
    with torch.no_grad():
        return list(seen({name: tensor.clone() for name, tensor in given.items()}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_detector_seen_as_tensors_gives_what_its_own_modules_give(kind: str) -> None:
    model: Any = build(kind)
    given = tensors_of(model, pictures()[0])
    found = view(model, given)
    with torch.no_grad():
        features = model.backbone(given["images"])
        maps = list(features.values())
        assert all(torch.equal(a, b) for a, b in zip(found, maps, strict=False))
        rest = found[len(maps) :]
        if kind == "ssd":
            assert all(torch.equal(a, b) for a, b in zip(rest, model.head(maps).values(), strict=True))
            return
        if kind in ("retinanet", "fcos"):
            # The heads flatten their maps; as many numbers, and the same ones.
            wanted = [model.head(maps)[key] for key in model.head(maps)]
            ends = [rest[i : i + len(maps)] for i in range(0, len(rest), len(maps))]
            for maps_of_end, flat in zip(ends, wanted, strict=True):
                values = torch.cat([x.flatten(1) for x in maps_of_end], 1)
                values = values.relu() if kind == "fcos" and flat is wanted[1] else values
                assert torch.allclose(values.sort(1).values, flat.flatten(1).sort(1).values, atol=1e-6)
            return
        logits, deltas = model.rpn.head(maps)
        assert all(torch.equal(a, b) for a, b in zip(rest, [*logits, *deltas], strict=False))
        shapes = [tuple(given["images"].shape[-2:])] * 2
        boxes = model.roi_heads.box_roi_pool(features, list(given["boxes"]), shapes)
        scores, moves = model.roi_heads.box_predictor(model.roi_heads.box_head(boxes))
        assert torch.allclose(rest[2 * len(maps)], scores, atol=1e-6)
        assert torch.allclose(rest[2 * len(maps) + 1], moves, atol=1e-6)
        if kind == "keypoint":
            boxes = model.roi_heads.keypoint_roi_pool(features, list(given["found"]), shapes)
            points = model.roi_heads.keypoint_predictor(model.roi_heads.keypoint_head(boxes))
            assert torch.allclose(rest[-1], points, atol=1e-6)
        if kind == "mask":
            boxes = model.roi_heads.mask_roi_pool(features, list(given["found"]), shapes)
            masks = model.roi_heads.mask_predictor(model.roi_heads.mask_head(boxes))
            assert torch.allclose(rest[-1], masks, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", ["conv", "all"])
def test_at_full_rank_a_detector_is_what_it_was(kind: str, layers: Any) -> None:
    model = build(kind)
    given = tensors_of(model, pictures()[0])
    seen = copy.deepcopy(model)
    seen_as_tensors(seen)
    sites = survey(seen, given, layers=layers).sites
    ranks = {
        site.name: (site.geometry.spatial_limit, site.geometry.channel_limit)
        if site.geometry.splits_spatially
        else site.geometry.channel_limit
        for site in sites
    }
    assert kind == "ssd" or any(site.calls == 3 for site in sites)  # a head that is shared by the maps
    result = leanconv.accelerate(model, pictures(), ranks=ranks, layers=layers, progress=False, samples=2000)
    assert set(ranks) == {layer.name for layer in result.layers}
    for seed in (1, 2):
        fresh = tensors_of(model, pictures(seed)[seed - 1])
        for found, wanted in zip(view(result.model, fresh), view(model, fresh), strict=True):
            assert float((found - wanted).norm() / wanted.norm().clamp_min(1e-12)) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_detector_is_accelerated_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    batches = [(batch, [{"boxes": torch.zeros(0, 4)}] * len(batch)) for batch in pictures()]  # targets do no harm
    result = leanconv.accelerate(model, batches, 1.5, progress=False, samples=500)
    assert 1.5 <= result.speedup < 1.53
    assert all(name.split(".")[0] in ("backbone", "rpn", "roi_heads", "head") for name in result.skipped)
    assert "forward" not in vars(result.model)
    with torch.no_grad():
        found = result.model(pictures(3)[0])
    assert {"boxes", "scores", "labels"} <= set(found[0])
    loaded = leanconv.load(result.save(tmp_path / "saved"), model=build(kind))
    with torch.no_grad():
        again = loaded(pictures(3)[0])
    assert all(torch.equal(a[key], b[key]) for a, b in zip(found, again, strict=True) for key in a)


def counted(model: nn.Module, images: list[Tensor], part: str = "", layers: Any = "conv") -> float:
    """MACs of an image, the mean of those that run alone."""
    found = [layer for image in images for layer in survey(model, [image], layers=layers).layers]
    return sum(layer.macs for layer in found if layer.name.startswith(part)) / len(images)


def test_what_is_counted_is_what_the_detector_does() -> None:
    """The second stage is fitted on few boxes and runs on many."""
    model: Any = build("faster")
    images = pictures()[0]
    result = leanconv.accelerate(model, [images], 1.2, layers="all", progress=False, samples=200)
    assert result.macs_before == pytest.approx(counted(model, images, layers="all"), abs=20)
    # And not of a canvas both fit on: one of these is wide, the other tall.
    odd = [torch.rand(3, 64, 96), torch.rand(3, 96, 64)]
    result = leanconv.accelerate(model, [[image] for image in odd], 1.2, progress=False, samples=200)
    assert result.macs_before == pytest.approx(counted(model, odd), abs=20)


def test_a_part_alone() -> None:
    model = build("faster")
    result = leanconv.accelerate(model, pictures(), 2.0, part="backbone", progress=False, samples=500)
    assert all(layer.name.startswith("backbone.") for layer in result.layers)
    outside = [name for name, reason in result.skipped.items() if reason == reasons.OUTSIDE]
    assert outside
    assert not any(name.startswith("backbone.") for name in outside)
    images = [image for batch in pictures() for image in batch]
    assert result.macs_before == pytest.approx(counted(model, images, "backbone."), abs=20)
    assert 2.0 <= result.speedup < 2.04
    # The network's first convolution is kept, not the part's.
    rpn = leanconv.accelerate(model, pictures(), 1.5, part="rpn", progress=False, samples=500)
    assert "rpn.head.conv.0.0" in {layer.name for layer in rpn.layers}
    leaf = leanconv.accelerate(model, pictures(), 2.0, part="backbone.down.1", progress=False, samples=500)
    assert [layer.name for layer in leaf.layers] == ["backbone.down.1"]
    for part, message in (
        ("backbon", "'backbon'.*backbone"),
        ("backbone.down.9", r"backbone\.down\.9"),
        (3, "part=3 must be the path of a module"),
        ("transform", "no layer of part='transform' ran"),
    ):
        with pytest.raises(LeanconvError, match=message):
            leanconv.accelerate(model, pictures(), 2.0, part=part, progress=False)


def test_a_detector_goes_on_from_its_workdir(tmp_path: Path) -> None:
    model, work = build("faster"), tmp_path / "work"
    arguments: dict[str, Any] = {"progress": False, "samples": 500}
    fresh = leanconv.accelerate(model, pictures(), 1.5, **arguments)
    for speedup in (1.5, 1.3, 1.5):  # measured, used for another speed-up, and again
        found = leanconv.accelerate(model, pictures(), speedup, workdir=work, **arguments)
    for a, b in zip(fresh.model.state_dict().values(), found.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(LeanconvError, match="other images"):
        leanconv.accelerate(model, pictures(7), 1.5, workdir=work, **arguments)


def test_a_detector_that_finds_nothing_is_accelerated_all_the_same() -> None:
    model: Any = build("mask")
    model.rpn.score_thresh = 2.0  # no proposal is that good
    given = tensors_of(model, pictures()[0])
    assert float(given["boxes"][0, 0, 2]) > 0
    result = leanconv.accelerate(model, pictures(), 1.5, progress=False, samples=300)
    assert 1.5 <= result.speedup < 1.53


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.rand(3, 8, 8), r"images gave a Tensor of shape \(3, 8, 8\); a detector takes batches that are lists"),
        ({"image": torch.rand(3, 8, 8)}, "images gave a dict; a detector takes batches that are lists"),
        ([torch.rand(8, 8)], "images gave a list; a detector takes batches that are lists"),
    ],
)
def test_batches_a_detector_does_not_take(batch: Any, message: str) -> None:
    with pytest.raises(LeanconvError, match=message):
        leanconv.accelerate(build("retinanet"), [batch], 2.0, progress=False)
    for images, said in (
        ([], "images is empty"),
        ([[]], "images is empty"),
        (None, "cannot be iterated"),
        ("photos", "path"),
    ):
        with pytest.raises(LeanconvError, match=said):
            leanconv.accelerate(build("retinanet"), images, 2.0, progress=False)


def test_other_networks_are_no_detectors() -> None:
    assert kind_of(nn.Sequential(nn.Conv2d(3, 3, 3))) is None
    model = build("faster")
    seen_as_tensors(model)
    seen_as_detector(model)
    assert "boxes" in model(pictures()[0])[0]


class OwnHead(nn.Module):
    """A proposal head torchvision does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.logits, self.moves = nn.Conv2d(CHANNELS, 3, 1), nn.Conv2d(CHANNELS, 12, 1)

    def forward(self, maps: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        return [self.logits(x) for x in maps], [self.moves(x) for x in maps]


def test_a_detector_with_a_head_of_its_own_goes_the_way_of_any_network() -> None:
    model: Any = build("faster")
    model.rpn.head = OwnHead()
    assert kind_of(model) is None
    result = leanconv.accelerate(model, pictures(), 1.3, progress=False, samples=300, solver="linear")
    assert 1.3 <= result.speedup < 1.33


def test_a_forward_of_the_users_own_stays() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 12, 3)).eval()
    model.forward = MethodType(lambda self, x: 3 * nn.Sequential.forward(self, x), model)
    images = torch.rand(8, 3, 12, 12)
    result = leanconv.accelerate(model, images, ranks={"2": (36, 12)}, progress=False, samples=500)
    assert torch.allclose(result.model(images), model(images), atol=1e-4)


class Pyramid(nn.Module):
    """A layer for two maps, and one that runs on its own output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 12, 3, padding=1)
        self.shared = nn.Conv2d(12, 12, 3, padding=1)
        self.again = nn.Conv2d(12, 12, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = self.first(x).relu()
        maps = [a, nn.functional.max_pool2d(a, 2)]
        b, c = (self.shared(y).relu() for y in maps)
        return b, self.again(self.again(c).relu())


def test_a_layer_for_several_maps_is_one_site_and_one_that_goes_on_from_itself_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = Pyramid().eval()
    images = torch.rand(12, 3, 16, 12)
    found = survey(model, images)
    site = next(site for site in found.sites if site.name == "shared")
    assert site.calls == 2
    one = 12 * 12 * 9
    assert site.cost.dense == one * (16 * 12 + 8 * 6)
    assert found.skipped == {"again": reasons.USED_AGAIN}
    result = leanconv.accelerate(model, images.split(4), ranks={"shared": (36, 12)}, progress=False, samples=3000)
    with torch.no_grad():
        for got, wanted in zip(result.model(images), model(images), strict=True):
            assert torch.allclose(got, wanted, atol=1e-3)
    # Fitted to both maps: there are as many responses as both have positions.
    rows: list[int] = []

    def note(*args: Any, **kwargs: Any) -> Any:
        rows.append(len(kwargs["inputs"].y))
        return fit_layer(*args, **kwargs)

    monkeypatch.setattr(solving, "fit_layer", note)
    leanconv.accelerate(model, images.split(4), ranks={"shared": (12, 6)}, progress=False, samples=12 * 300)
    assert rows == [12 * (16 * 12 + 8 * 6)]


def test_a_detector_is_inspected_as_it_is_accelerated() -> None:
    model = build("faster")
    found = inspect_network(model, [pictures()[0]], shape=(1, 3, 64, 64))
    assert "rpn.head.conv.0.0" in {site.name for site in found.survey.sites}
    assert found.survey.macs == pytest.approx(counted(model, pictures()[0]), abs=20)
    assert 0 < found.zeros["rpn.head.conv.0.0"] < 1
    assert inspect_network(model, None, shape=(1, 3, 64, 64)).survey.sites


class TwoSlopes(nn.Module):
    """One layer for two maps, with another activation behind it on each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 12, 3)
        self.a, self.b = nn.PReLU(12, init=0.1), nn.PReLU(12, init=0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x).relu()
        y = x.flip(-1)
        return self.a(self.shared(x)), self.b(self.shared(y))


def test_a_layer_with_several_activations_behind_it_is_fitted_without_them() -> None:
    torch.manual_seed(0)
    model, images = TwoSlopes().eval(), torch.rand(6, 3, 12, 12)
    (site,) = (site for site in survey(model, images).sites if site.name == "shared")
    assert (site.calls, site.activation.name) == (2, "identity")
    result = leanconv.accelerate(model, images, ranks={"shared": (36, 12)}, progress=False, samples=500)
    for got, wanted in zip(result.model(images), model(images), strict=True):
        assert torch.allclose(got, wanted, atol=1e-4)
