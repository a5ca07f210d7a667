"""The detection benchmark from end to end, on a few small pictures and a network that takes seconds."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList

from leanconv import LeanconvError, models
from leanconv.bench.measure import Rounds
from leanconv.images.scenes import Scenes, find_scenes
from tests.test_detectors import small_features
from tests.test_team import together

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import detection  # noqa: E402
import detection_losses  # noqa: E402
import detection_table  # noqa: E402
import detection_times  # noqa: E402
import detection_training  # noqa: E402

SMALL = ["--size", "64", "--width", "16", "--epochs", "1", "--batch", "2", "--device", "cpu"]


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def write_shard(path: Path, count: int, seed: int) -> None:
    """Dark pictures, wide and tall, with a red or blue rectangle in each but the last; one is marked difficult."""
    random = np.random.default_rng(seed)
    with tarfile.open(path, "w") as tar:
        for number in range(count):
            width, height = [(64, 48), (40, 64)][number % 2]
            pixels = random.integers(0, 60, (height, width, 3), dtype=np.uint8)
            left, top = int(random.integers(2, 10)), int(random.integers(2, 10))
            box = [left, top, left + 24, top + 28]
            objects = [{"label": ["boat", "car"][number % 2], "box": box, "difficult": number == 1}]
            if number == count - 1:
                objects = []
            else:
                pixels[top : top + 28, left : left + 24, 2 * (number % 2)] = 250
            about = {"width": width, "height": height, "objects": objects}
            encoded = io.BytesIO()
            Image.fromarray(pixels).save(encoded, "PNG")
            add(tar, f"{seed}-{number}.png", encoded.getvalue())
            add(tar, f"{seed}-{number}.json", json.dumps(about).encode())


class Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = small_features()
        self.head = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """VOC in small; the network in place of VGG-16, whose weights are those of its seed."""
    write_shard(tmp_path / "train-0.tar", 6, seed=1)
    write_shard(tmp_path / "val-0.tar", 6, seed=2)
    (tmp_path / "classes.json").write_text('["boat", "car"]')
    monkeypatch.setattr(detection_training, "original", lambda weights: Probe().eval())
    monkeypatch.setattr(detection_table, "original", lambda weights: Probe().eval())
    monkeypatch.setattr(detection, "original", lambda weights: Probe().eval())
    return tmp_path


def given(folder: Path, *more: str) -> list[str]:
    calibration = str(folder / "train-0.tar")
    return [
        "--data",
        str(folder),
        "--weights",
        "none",
        "--calibration",
        calibration,
        "--refine",
        "closed-form",
        *SMALL,
        *more,
    ]


# -- losses ------------------------------------------------------------------------------------------------------------


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three pictures: one object, none, three that overlap."""
    pictures = torch.randint(0, 256, (3, 3, 96, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([[96, 80], [70, 96], [96, 96]])
    boxes, labels = torch.zeros(3, 4, 4), torch.zeros(3, 4, dtype=torch.int64)
    boxes[0, 0], labels[0, 0] = torch.tensor([10.0, 10, 60, 70]), 3
    boxes[2, :3] = torch.tensor([[1.0, 5, 90, 70], [30, 20, 80, 90], [30, 20, 40, 33]])
    labels[2, :3] = torch.tensor([2, 3, 4])
    return pictures, sizes, boxes, labels


def test_losses_of_a_batch_are_those_of_torchvision() -> None:
    """Where everything is sampled, chance has no part in them."""
    everything = {"box_batch_size_per_image": 10**6, "rpn_batch_size_per_image": 10**6}
    network = models.faster_rcnn_vgg16(
        5, features=small_features(), width=16, dropout=0.0, rpn_post_nms_top_n_train=40, **everything
    ).train()
    pictures, sizes, boxes, labels = batch()
    found = detection_losses.BatchLosses(network)(pictures, sizes, boxes, labels)
    sum(found.values()).backward()
    ours = {name: value.grad.clone() for name, value in network.named_parameters() if value.grad is not None}
    network.zero_grad()

    x = detection_losses.normalised(pictures)
    features = OrderedDict([("0", network.backbone(x))])
    real = labels > 0
    targets = [{"boxes": b[r], "labels": c[r]} for b, c, r in zip(boxes, labels, real, strict=True)]
    proposals, losses = network.rpn(ImageList(x, [tuple(size) for size in sizes.tolist()]), features, targets)
    _, more = network.roi_heads(features, proposals, [(96, 96)] * 3, targets)
    sum([*losses.values(), *more.values()]).backward()
    assert found.keys() == losses.keys() | more.keys()
    for name, value in {**losses, **more}.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    theirs = {name: value.grad for name, value in network.named_parameters() if value.grad is not None}
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-5)


def test_pictures_without_objects_have_finite_losses() -> None:
    network = models.faster_rcnn_vgg16(5, features=small_features(), width=16).train()
    pictures, sizes, boxes, labels = batch()
    found = detection_losses.BatchLosses(network)(pictures[1:2], sizes[1:2], boxes[1:2], labels[1:2])
    sum(found.values()).backward()
    assert all(value.isfinite() for value in found.values())
    assert all(value.grad.isfinite().all() for value in network.parameters() if value.grad is not None)


def test_what_is_drawn_is_allowed_and_balanced() -> None:
    torch.manual_seed(0)
    positive = torch.zeros(3, 50, dtype=torch.bool)
    positive[0, :20] = True
    positive[1, :2] = True
    negative = ~positive
    negative[:, -10:] = False
    index, used = detection_losses.drawn(positive, negative, 16, 0.25)
    assert used.all()
    assert positive.gather(1, index).sum(1).tolist() == [4, 2, 0]
    assert negative.gather(1, index).sum(1).tolist() == [12, 14, 16]
    assert all(len(set(row.tolist())) == 16 for row in index)
    index, used = detection_losses.drawn(positive[:, :20], negative[:, :20] & False, 16, 0.25)
    assert used.sum(1).tolist() == [4, 2, 0]


# -- data --------------------------------------------------------------------------------------------------------------


def test_canvases_hold_pictures_and_boxes(folder: Path) -> None:
    data = detection_training.read(find_scenes(folder, split="train"), 64, "cpu")
    assert data.pictures.shape == (6, 3, 64, 64)
    assert data.sizes.tolist() == [[48, 64], [64, 40]] * 3
    assert (data.labels > 0).sum(1).tolist() == [1, 0, 1, 1, 1, 0]  # the second is difficult, the last empty
    assert len(data.targets[1]["labels"]) == 1
    assert data.image(1).shape == (3, 64, 40)
    everything = torch.arange(6)
    for mirrored in (torch.zeros(6, dtype=torch.bool), torch.ones(6, dtype=torch.bool)):
        pictures, _, boxes, labels = data.batch(everything, mirrored)
        for picture, box, label in zip(pictures, boxes, labels, strict=True):
            if label[0]:
                left, top, right, bottom = box[0].int().tolist()
                channel = 0 if int(label[0]) == 1 else 2
                assert (picture[channel, top:bottom, left:right] == 250).all()
                assert (picture[channel] == 250).sum() == 24 * 28
    assert torch.equal(
        data.batch(everything, ~torch.zeros(6, dtype=torch.bool))[0][1, :, :, 40:], data.pictures[1, :, :, 40:]
    )


def test_large_pictures_are_scaled_with_their_boxes(folder: Path) -> None:
    scenes = find_scenes(folder, split="train")
    data = detection_training.read(scenes, 32, "cpu")
    assert data.sizes[:2].tolist() == [[24, 32], [32, 20]]
    torch.testing.assert_close(data.boxes[0, 0], scenes[0].objects.boxes[0] / 2)
    pictures, sizes, boxes, _ = detection_training.scaled(*data.batch(torch.arange(6), torch.zeros(6) > 0), 16)
    assert pictures.shape == (6, 3, 16, 16)
    assert sizes[:2].tolist() == [[12, 16], [16, 10]]
    torch.testing.assert_close(boxes[0, 0], scenes[0].objects.boxes[0] / 4)


def test_training_makes_the_loss_fall(folder: Path) -> None:
    data = detection_training.read(find_scenes(folder, split="train"), 64, "cpu")
    torch.manual_seed(0)
    network = detection_training.build(data.classes, small_features(), size=64, width=32, frozen=0)
    settings = detection_training.Training(epochs=10, batch=3, lr=0.03, frozen=0)
    losses = detection_training.train(network, data, settings, "cpu", say=False)
    assert len(losses) == 10
    assert losses[-1] < 0.6 * losses[0]
    assert not network.training
    with pytest.raises(LeanconvError, match="give a smaller --lr"):
        detection_training.train(network, data, detection_training.Training(epochs=4, batch=3, lr=1e30), "cpu")


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speedup", ["1", "2"])
def test_train_writes_a_detector_that_loads(folder: Path, speedup: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "out" / "detector.safetensors"
    detection.main(["train", *given(folder, "--speedup", speedup, "--scales", "48", "64", "--out", str(out))])
    said = capsys.readouterr().out
    assert "mAP" in said
    assert "train:" in said
    about = json.loads(out.with_suffix(".json").read_text())
    assert bool(about["changes"]) == (speedup == "2")
    detector, known = detection_training.load(out)
    assert known["classes"] == ["boat", "car"]
    data = detection_training.read(find_scenes(folder, split="val"), 64, "cpu")
    detection_training.detect(detector, data, "cpu")
    plain = detection_training.backbone_macs(models.faster_rcnn_vgg16(3, features=small_features()), 64, "cpu")
    assert plain / about["macs"] == pytest.approx(float(speedup), rel=0.05)


def test_the_same_seed_trains_the_same_detector(folder: Path) -> None:
    for name in ("a", "b"):
        detection.main(["train", *given(folder, "--out", str(folder / f"{name}.safetensors"))])
    assert (folder / "a.safetensors").read_bytes() == (folder / "b.safetensors").read_bytes()


SHARE = """
from pathlib import Path
from tests.test_detection_benchmark import detection_training, small_detector, small_scenes

data = detection_training.read(small_scenes(Path({folder!r})), 64, "cpu")
seen, batch = [], type(data).batch
type(data).batch = lambda self, chosen, mirrored: seen.append(chosen.tolist()) or batch(self, chosen, mirrored)
detector = small_detector()
before = [parameter.detach().clone() for parameter in detector.parameters()]
detection_training.train(detector, data, detection_training.Training(epochs=2, batch=4, frozen=0), "cpu", say=False)
moved = sum(not torch.equal(a, b) for a, b in zip(before, detector.parameters(), strict=True))
torch.save([seen, moved, detector.state_dict()], {folder!r} + f"/{{rank}}.pt")
"""


def small_scenes(folder: Path) -> Scenes:
    return find_scenes(folder, split="train")


def small_detector() -> nn.Module:
    torch.manual_seed(0)
    return detection_training.build(("boat", "car"), small_features(), size=64, width=16, frozen=0)


def test_two_processes_share_every_batch_and_train_one_detector(folder: Path) -> None:
    assert [code for code, said in together(SHARE.format(folder=str(folder)))] == [0, 0]
    (ours, moved, mine), (theirs, _, other) = (torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert [len(set(a) | set(b)) for a, b in zip(ours, theirs, strict=True)] == [4, 4]  # of 6 pictures, once an epoch
    assert moved == len(list(small_detector().parameters()))
    assert all(torch.equal(mine[key], other[key]) for key in mine)


def test_batches_larger_than_the_data_are_refused(folder: Path) -> None:
    with pytest.raises(SystemExit, match="give another --batch"):
        detection.main(["train", *given(folder, "--batch", "60", "--out", str(folder / "a.safetensors"))])


def test_the_table_goes_on_where_it_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, out = folder / "work", folder / "out"
    places = ["--work", str(work), "--out", str(out)]
    common = ["table", *given(folder), *places, "--seeds", "0", "1", "--speedups", "2", "--tune-epochs", "1"]
    detection.main([*common, "--merge"])
    assert "| original | not measured | not measured | not measured |" in (out / "detection.md").read_text()

    detection.main([*common, "--seeds", "0", "--rows", "first"])
    assert {path.stem for path in (work / "cells").iterdir()} == {"baseline-seed0", "first-2x-seed0"}
    detection.main([*common, "--seeds", "0"])
    kept = {path.name: path.read_bytes() for path in (work / "cells").iterdir()}
    assert set(kept) == {f"{name}-seed0.json" for name in ("baseline", "first-2x", "after-2x", "tuned-2x")}

    def never(*_: object, **__: object) -> None:
        raise AssertionError("what is known is not measured again")

    monkeypatch.setattr(detection_table, "train", never)
    monkeypatch.setattr(detection_table, "accelerated", never)
    detection.main([*common, "--seeds", "0"])
    assert {path.name: path.read_bytes() for path in (work / "cells").iterdir()} == kept

    detection.main([*common, "--merge"])
    table = json.loads((out / "detection.json").read_text())
    assert [row["kind"] for row in table["rows"]] == ["baseline", "first", "after", "tuned"]
    base = table["rows"][0]["cells"][0]
    for row in table["rows"][1:]:
        cell, missing = row["cells"]
        assert missing is None
        assert cell["map"] - base["map"] == pytest.approx(cell["difference"])
        assert cell["low"] <= cell["high"]
        assert base["macs"] / cell["macs"] == pytest.approx(2, rel=0.05)
    lines = (out / "detection.md").read_text().splitlines()
    assert sum("not measured" in line for line in lines) == 4  # the second seed of every row

    with pytest.raises(SystemExit, match="was measured with other settings"):
        detection.main([*common, "--merge", "--lr", "0.5"])


def test_times_are_of_both_orders_beside_the_original(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection_times, "original", lambda weights: Probe().eval())
    ratios = []

    def timed(calls: dict[str, object], *, seconds: float, finish: object) -> Rounds:
        times = {name: [2.0, 8.0, 4.0] if "original" in name else [1.0, 2.0, 2.0] for name in calls}
        return Rounds(times, warm_up=1, settled=True)

    row = detection_times.row

    def seen(title: str, speedup: float, networks: dict[str, nn.Module], *rest: object) -> object:
        macs = {name: detection_training.backbone_macs(network, 64, "cpu") for name, network in networks.items()}
        ratios.append(macs["original"] / macs["this"])
        with torch.no_grad():  # those that stand in are detectors
            assert len(networks["this"]([torch.rand(3, 40, 64)])) == 1
        return row(title, speedup, networks, *rest)

    monkeypatch.setattr(detection_times, "interleaved", timed)
    monkeypatch.setattr(detection_times, "row", seen)
    places = ["--weights", "none", "--calibration", str(folder / "train-0.tar"), "--out", str(folder)]
    small = ["--pictures", "4", "--samples", "200", "--size", "64", "--width", "16", "--device", "cpu"]
    detection_times.main([*places, *small, "--speedups", "2"])
    assert ratios == pytest.approx([2, 2], rel=0.05)
    table = json.loads((folder / "detection_times-cpu.json").read_text())
    assert [one["title"] for one in table["rows"]] == ["accelerated, then trained", "trained, then accelerated"]
    assert [one["faster"]["value"] for one in table["rows"]] == [2.0, 2.0]  # the median of 2, 8, 4 by that of 1, 2, 2
    assert [one["ms"]["original"] for one in table["rows"]] == [1000.0, 1000.0]  # of 4 pictures a call, 4 seconds
    assert (
        "--pictures 4 --samples 200 --seconds 10 --size 64 --width 16 --speedups 2`"
        in (folder / "detection_times-cpu.md").read_text()
    )


def test_what_cells_share_can_be_made_beforehand(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes then share the cells out, and none of them makes it twice."""
    work, out = folder / "work", folder / "out"
    common = ["table", *given(folder), "--work", str(work), "--out", str(out), "--seeds", "0", "--speedups", "2"]
    detection.main([*common, "--only", "classifier"])
    assert [path.name for path in (work / "models").iterdir()] == ["classifier-2x"]
    with pytest.raises(SystemExit, match="classifier-2x' was accelerated with"):
        detection.main([*common, "--only", "classifier", "--samples", "700"])
    detection.main([*common, "--only", "baseline"])
    assert [path.name for path in (work / "cells").iterdir()] == ["baseline-seed0.json"]
    assert not out.exists()

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it is there")

    monkeypatch.setattr(detection_table, "accelerated", never)
    trained = []
    train = detection_table.train
    monkeypatch.setattr(detection_table, "train", lambda *given: trained.append(train(*given)))
    detection.main([*common, "--rows", "first"])
    assert len(trained) == 1
    assert (work / "cells" / "first-2x-seed0.json").exists()


def test_cells_of_a_table_are_known_where_its_detectors_are_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On another machine the table goes on with other seeds: a baseline trained again would be another one."""
    first, second = folder / "first" / "detection.json", folder / "second" / "detection.json"
    common = ["table", *given(folder), "--speedups", "2", "--rows", "first"]
    detection.main([*common, "--work", str(folder / "here"), "--out", str(first.parent), "--seeds", "0"])
    before = json.loads(first.read_text())
    there = [*common, "--work", str(folder / "there"), "--out", str(second.parent), "--known", str(first)]
    detection.main([*there, "--seeds", "1"])
    after = json.loads(second.read_text())
    assert after["seeds"] == [0, 1]
    assert [row["cells"][0] for row in after["rows"]] == [row["cells"][0] for row in before["rows"]]
    assert {path.stem for path in (folder / "there" / "cells").iterdir()} == {"baseline-seed1", "first-2x-seed1"}
    capsys.readouterr()
    detection.main([*there, "--seeds", "0"])
    assert "first-2x-seed0: known" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="give a seed that the table does not have"):
        detection.main([*there, "--seeds", "0", "--rows", "after"])
    with pytest.raises(SystemExit, match="was measured with other settings"):
        detection.main([*there, "--seeds", "2", "--epochs", "2"])
    with pytest.raises(SystemExit, match=r"nowhere\.json' is no file"):
        detection.main([*there, "--known", str(folder / "nowhere.json")])


def test_a_detector_that_was_kept_but_not_judged_is_judged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = folder / "work"
    common = ["table", *given(folder), "--work", str(work), "--seeds", "0", "--only", "baseline"]
    detection.main(common)
    cell = work / "cells" / "baseline-seed0.json"
    cell.unlink()
    monkeypatch.setattr(detection_table, "train", lambda *_: pytest.fail("it is trained"))
    with pytest.raises(SystemExit, match="was trained with other settings"):
        detection.main([*common, "--epochs", "2"])
    detection.main(common)
    assert cell.exists()


def test_a_detector_without_its_description_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LeanconvError, match=r"needs a\.json beside it"):
        detection_training.load(tmp_path / "a.safetensors")
