"""The detection benchmark from end to end, on a few small pictures and a network that takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.detection import run as detection
from benchmarks.detection import training as detection_training
from benchmarks.detection.networks import faster_rcnn_vgg16
from leanconv import LeanconvError
from leanconv.images.detection_data import find_scenes
from tests.support.detection_benchmark import given, small_detector
from tests.support.networks import small_features
from tests.support.processes import together

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
    torch.testing.assert_close(data.boxes[0, 0], scenes[0].target["boxes"][0] / 2)
    pictures, sizes, boxes, _ = detection_training.scaled(*data.batch(torch.arange(6), torch.zeros(6) > 0), 16)
    assert pictures.shape == (6, 3, 16, 16)
    assert sizes[:2].tolist() == [[12, 16], [16, 10]]
    torch.testing.assert_close(boxes[0, 0], scenes[0].target["boxes"][0] / 4)


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
    plain = detection_training.backbone_macs(faster_rcnn_vgg16(3, features=small_features()), 64, "cpu")
    assert plain / about["macs"] == pytest.approx(float(speedup), rel=0.05)


def test_the_same_seed_trains_the_same_detector(folder: Path) -> None:
    for name in ("a", "b"):
        detection.main(["train", *given(folder, "--out", str(folder / f"{name}.safetensors"))])
    assert (folder / "a.safetensors").read_bytes() == (folder / "b.safetensors").read_bytes()


SHARE = """
from pathlib import Path
from tests.support.detection_benchmark import detection_training, small_detector, small_scenes

data = detection_training.read(small_scenes(Path({folder!r})), 64, "cpu")
seen, batch = [], type(data).batch
type(data).batch = lambda self, chosen, mirrored: seen.append(chosen.tolist()) or batch(self, chosen, mirrored)
detector = small_detector()
before = [parameter.detach().clone() for parameter in detector.parameters()]
detection_training.train(detector, data, detection_training.Training(epochs=2, batch=4, frozen=0), "cpu", say=False)
moved = sum(not torch.equal(a, b) for a, b in zip(before, detector.parameters(), strict=True))
torch.save([seen, moved, detector.state_dict()], {folder!r} + f"/{{rank}}.pt")
"""


def test_two_processes_share_every_batch_and_train_one_detector(folder: Path) -> None:
    assert [code for code, said in together(SHARE.format(folder=str(folder)))] == [0, 0]
    (ours, moved, mine), (theirs, _, other) = (torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert [len(set(a) | set(b)) for a, b in zip(ours, theirs, strict=True)] == [4, 4]  # of 6 pictures, once an epoch
    assert moved == len(list(small_detector().parameters()))
    assert all(torch.equal(mine[key], other[key]) for key in mine)


def test_batches_larger_than_the_data_are_refused(folder: Path) -> None:
    with pytest.raises(SystemExit, match="give another --batch"):
        detection.main(["train", *given(folder, "--batch", "60", "--out", str(folder / "a.safetensors"))])


def test_a_detector_without_its_description_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LeanconvError, match=r"needs a\.json beside it"):
        detection_training.load(tmp_path / "a.safetensors")
