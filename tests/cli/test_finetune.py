"""leanconv finetune."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import leanconv
from leanconv.cli.main import run
from leanconv.errors import LeanconvError
from leanconv.evaluation.class_names import class_indices_of_both
from leanconv.images import Preprocess, find_pictures
from leanconv.train import finetune as finetune_module
from tests.support.command import call
from tests.support.processes import apart
from tests.support.training import (
    assert_same_bits,
    write_pictures,
)

NETWORK = """
import torch
from torch import nn

def build(classes=2):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AvgPool2d(4), nn.Flatten(), nn.Linear(32, classes),
    )

def three():
    return build(3)
"""


def network_of(name: str) -> nn.Module:
    namespace: dict = {}
    exec(NETWORK, namespace)
    return namespace[name]()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an accelerated network, pictures and the network's code."""
    place = tmp_path_factory.mktemp("finetune")
    (place / "net.py").write_text(NETWORK)
    write_pictures(place / "photos", 40)
    prepare = Preprocess(size=8, resize=8)
    images = torch.stack([prepare(picture.read()) for picture in find_pictures(place / "photos")])
    for name in ("build", "three"):
        result = leanconv.accelerate(network_of(name), images, 1.3, samples=500, progress=False)
        finetune_module.replace(result, preprocess=prepare.to_json()).save(place / name)
    return place


@pytest.fixture
def command(saved: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(saved)
    return lambda arguments: call(f"finetune {arguments} --workers 0 --device cpu", monkeypatch, capsys)


MODEL = "--model net.py:build"


def test_finetune_with_labels(saved: Path, command, tmp_path: Path) -> None:
    arguments = f"build {MODEL} --data photos --lr 0.05 --epochs 3 --batch 8 --holdout 0.25"
    code, out, err = command(f"{arguments} --out {tmp_path / 'tuned'}")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].split("  ")[-1].strip() == "held-out top-1"
    assert len(lines) == 2 + 4 + 2
    assert "held-out top-1" in lines[-2]
    assert lines[-1] == f"saved to {tmp_path / 'tuned'}"
    assert "leanconv: fine-tuning: epoch 1.0/3, step 3" in err
    code, out, err = command(f"{arguments} --out {tmp_path / 'other'} --json --quiet")
    assert code == 0, err
    assert err == ""
    found = json.loads(out)
    assert found["folder"] == str(tmp_path / "other")
    assert [row["step"] for row in found["history"]["rows"]] == [0, 3, 6, 9]
    assert found["verdict"] == lines[-2]
    assert found["settings"]["lr"] == 0.05
    assert (found["stopped"], found["unreadable"], found["distilled"]) == (None, [], False)
    results = [leanconv.load_result(tmp_path / name, network_of("build")) for name in ("tuned", "other")]
    assert_same_bits(results[0].model, results[1].model)
    assert results[0].preprocess["size"] == 8
    assert results[0].training["history"]["rows"] == found["history"]["rows"]


def test_finetune_without_labels_and_with_folders_of_its_own_to_judge_by(saved: Path, command, tmp_path: Path) -> None:
    for part in ("train", "val"):
        write_pictures(tmp_path / "parts" / part, 24)
    (tmp_path / "flat").mkdir()
    for path in (saved / "photos" / "left").iterdir():
        (tmp_path / "flat" / path.name).write_bytes(path.read_bytes())
    for number, data in enumerate((tmp_path / "parts", tmp_path / "flat")):
        code, out, err = command(
            f"build --distill net.py:build --data {data} --lr 0.001 --epochs 2 --batch 10 --augment off --features 1 "
            f"--out {tmp_path / str(number)} --json"
        )
        assert code == 0, err
        found = json.loads(out)
        assert found["distilled"] is True
        rows = found["history"]["rows"]
        assert [row["step"] for row in rows] == ([0, 2, 4] if number == 0 else [0, 1, 2])
        assert rows[-1]["held_loss"] < rows[0]["held_loss"]


def test_finetune_passes_over_a_corrupt_image_and_says_what_went_wrong(command, tmp_path: Path) -> None:
    write_pictures(tmp_path / "photos", 100, size=8)
    (tmp_path / "photos" / "left" / "004.png").write_bytes(b"not a png")
    code, out, err = command(
        f"build {MODEL} --data {tmp_path / 'photos'} --lr 1e30 --batch 90 --out {tmp_path / 'x'} --json"
    )
    assert code == 0
    found = json.loads(out)
    assert found["unreadable"] == ["left/004.png"]
    assert err.count("warning: cannot read left/004.png (UnidentifiedImageError: ") == 1
    assert "became NaN or infinite" in found["stopped"]
    assert f"leanconv: warning: {found['stopped']}" in err
    assert (tmp_path / "x" / "model.safetensors").exists()
    (tmp_path / "photos" / "left" / "006.png").write_bytes(b"")
    code, _, err = command(f"build {MODEL} --data {tmp_path / 'photos'} --lr 1e-3 --out {tmp_path / 'y'}")
    assert code == 2
    assert "2 of 100 images cannot be read" in err
    assert not (tmp_path / "y").exists()


CLI_REFUSALS = [
    (f"build {MODEL} --data photos --out photos", "exists already"),
    (f"build {MODEL} --data nowhere --out x", "does not exist"),
    (f"build {MODEL} --data empty --out x", "no images in"),
    (f"build {MODEL} --data flat --out x", "lie in no class folder (a.png); give a folder a class, or --distill"),
    ("three --model net.py:three --data photos --out x", "2 class names but the network 3 outputs"),
    (f"build {MODEL} --data photos --classes far.json --out x", "class indices must be 0 to 1; found right: 7"),
    (f"build {MODEL} --data photos --holdout 0.001 --out x", "holdout=0.001 of 40 images leaves none to hold out"),
    (f"build {MODEL} --data photos --validation others --out x", "there are validation images of up, and none"),
    (f"build {MODEL} --data photos --size 16 --out x", "the model raised RuntimeError on a batch of shape (1, 3, 16"),
    (f"build {MODEL} --data photos --lr 0 --out x", "lr=0.0 must be a number above 0"),
    (f"build {MODEL} --data photos --optimizer lion --out x", "optimizer='lion' is not known"),
    (
        f"build {MODEL} --data photos --augment 2 --out x",
        "--augment '2' must be a number above 0 and at most 1, or off",
    ),
    (f"build {MODEL} --data photos --augment on --out x", "--augment 'on' must be"),
    (f"build {MODEL} --data photos --weights none --out x", "--weights goes with --distill"),
    (f"build {MODEL} --data photos --features 2 --out x", "--features goes with --distill"),
    ("build --distill net.py:build --classes far.json --data photos --out x", "--classes does not go with --distill"),
    ("build --distill net.py:three --data photos --out x", "the network built does not fit 'build'"),
    (f"build {MODEL} --distill net.py:three --data photos --out x", "where the original answers"),
    ("build --data photos --out x", "leanconv cannot build by name"),
    ("photos --data photos --out x", "has no leanconv.json"),
    ("vgg16 --data photos --out x", "is not a folder"),
    (f"build {MODEL} --data photos --workdir photos --out x", "holds other files and no earlier training"),
]


@pytest.mark.parametrize(("arguments", "message"), CLI_REFUSALS, ids=[a for a, _ in CLI_REFUSALS])
def test_finetune_refuses_bad_input_with_one_sentence(arguments: str, message: str, saved: Path, command) -> None:
    (saved / "empty").mkdir(exist_ok=True)
    (saved / "far.json").write_text('{"left": 0, "right": 7}')
    Image.new("RGB", (8, 8)).save(saved / "photos" / "left" / "000.png")
    for path in (saved / "flat" / "a.png", saved / "others" / "up" / "a.png"):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    before = {path for path in saved.rglob("*") if "__pycache__" not in path.parts}
    code, out, err = command(arguments)
    assert code == 2
    assert message in err
    assert out == ""
    assert sum(line.startswith("leanconv: error:") for line in err.splitlines()) == 1
    assert {path for path in saved.rglob("*") if "__pycache__" not in path.parts} == before


def command_of_one(place: Path, out: Path) -> None:
    os.chdir(place)
    shown = out.with_name(f"shown-{os.environ['RANK']}")
    sys.argv = f"leanconv finetune build {MODEL} --data photos --batch 8 --epochs 1 --workers 0 --json -q".split()
    sys.argv += ["--device", "cpu", "--out", str(out)]
    with shown.open("w") as sys.stdout:
        run()


def test_finetune_under_torchrun(saved: Path, tmp_path: Path) -> None:
    assert apart(command_of_one, saved, tmp_path / "x", processes=2) == [0, 0]
    found = json.loads((tmp_path / "shown-0").read_text())
    assert found["folder"] == str(tmp_path / "x")
    assert (tmp_path / "shown-1").read_text() == ""
    assert leanconv.load_result(tmp_path / "x", network_of("build")).training["history"] == found["history"]


def test_classes_named_otherwise_where_they_are_judged_are_refused(tmp_path: Path) -> None:
    write_pictures(tmp_path / "words")
    write_pictures(tmp_path / "numbers")
    for number, word in enumerate(("left", "right")):
        (tmp_path / "numbers" / word).rename(tmp_path / "numbers" / str(number))
    words, numbers = (find_pictures(tmp_path / name) for name in ("words", "numbers"))
    with pytest.raises(LeanconvError, match="named 0, 1 where they are trained on and left, right where"):
        class_indices_of_both(numbers, words, None)
    assert class_indices_of_both(words, words, None) == {"left": 0, "right": 1}
    assert class_indices_of_both(numbers, numbers, None) == {"0": 0, "1": 1}
