"""The examples run, each in a short form, and print what they promise."""

from __future__ import annotations

import importlib.util
import json
import re
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

import leanconv
from leanconv import demo
from tests.support.detection_benchmark import detection, given

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def example(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.nightly
def test_own_network(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("own_network").main(epochs=1)
    said = capsys.readouterr().out
    assert "3.0" in re.search(r"^.*fewer MACs", said, re.MULTILINE)[0]
    shares = re.findall(r"^(\w+): (.*) % of 797 digits", said, re.MULTILINE)
    assert [name for name, _ in shares] == ["original", "accelerated", "loaded"]
    assert shares[1][1] == shares[2][1]


@pytest.mark.nightly
@pytest.mark.parametrize("pictures", ["photos", "--synthetic 6 --weights none --size 64"])
def test_classify(pictures: str, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("classify").main([*pictures.split(), "--speedup", "3", "--samples", "500", "--out", "fast"])
    said = capsys.readouterr().out
    assert re.search(r"the same first answer on \d+\.\d % of [34] pictures", said)
    assert 3 <= leanconv.load_result("fast").speedup < 3.06


@pytest.mark.nightly
def test_resnet50_of_timm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = "--model resnet10t --synthetic 4 --weights none --size 32 --samples 200 --speedup 1.3"
    example("resnet50_timm").main([*given.split(), "--out", str(tmp_path / "fast")])
    said = capsys.readouterr().out
    assert "1.3x asked for" in said
    assert "leanconv.load(" in said


@pytest.mark.nightly
def test_photos_are_read_as_timm_says(world: Path) -> None:
    import timm

    data = example("resnet50_timm").Photos("photos", timm.create_model("resnet10t"), 3)
    assert (len(data), data[0].shape[0]) == (3, 3)


@pytest.mark.nightly
def test_onnx_deploy(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("onnx_deploy")
    assert module.accelerated(Namespace(folder=Path("vgg16-4x")))[1] == (3, 224, 224)
    module.main(["--out", "fast.onnx"])
    said = capsys.readouterr().out
    assert "takes any batch of 1 x 32 x 32" in said
    assert float(re.search(r"difference from torch: (\S+)", said)[1]) < 1e-4


@pytest.mark.parametrize("name", ["classify", "resnet50_timm"])
def test_pictures_or_none_must_be_said(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example(name).main([])
    assert "give a folder of pictures, or --synthetic N" in capsys.readouterr().err


def test_detect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = folder / "detector.safetensors", folder / "drawn" / "both.png"
    detection.main(["train", *given(folder, "--out", str(file))])
    images = str(folder / "train-0.tar")
    arguments = [str(folder / "val-0.tar"), "--model", str(file), "--images", images, "--limit", "4", "--device", "cpu"]
    example("detect").main([*arguments, "--speedup", "2", "--threshold", "0", "--out", str(out)])
    assert "backbone: 2.0" in capsys.readouterr().out
    with Image.open(out) as picture:
        # Two pictures beside each other with a gap of 4, the six below each other.
        assert picture.size == (2 * 64 + 4, 3 * (48 + 64) + 5 * 4)
        assert np.asarray(picture).std() > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "fasterrcnn_resnet51_fpn"], "did you mean fasterrcnn_resnet50_fpn"),
        (["--model", "nowhere.safetensors"], r"needs nowhere\.json beside it"),
        (["--model", "ssd300_vgg16", "--weights", "classes.json"], "do not fit ssd300_vgg16"),
        (["--out", "both.txt"], "must end in .png or .jpg"),
    ],
)
def test_detect_says_what_is_wrong(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit, match=sentence):
        example("detect").main(["val-0.tar", "--images", "train-0.tar", "--device", "cpu", *arguments])


@pytest.mark.nightly
def test_the_notebook_runs(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / "digits.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in code), "commit the notebook without outputs"
    for cell in code:
        cell.source = (
            cell.source.replace("EPOCHS = 6", "EPOCHS = 1").replace("[:1000]", "[:200]").replace("[1000:]", "[1600:]")
        )
        cell.source = re.sub(r"samples=\d+", "samples=200", cell.source).replace("[:500]", "[:50]")
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in code for output in cell.outputs)
    assert "4.0" in re.search(r"^.*fewer MACs", printed, re.MULTILINE)[0]
    assert all(name in printed for name in demo.METHODS)


def test_every_example_says_how_it_is_run() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert f"\n    python examples/{path.name}" in path.read_text().split('"""')[1], path.name
    notebook = json.loads((EXAMPLES / "digits.ipynb").read_text())
    assert notebook["cells"][0]["cell_type"] == "markdown"
