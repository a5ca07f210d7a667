"""Exported files: they answer what the network answers, without leanconv, or they are not there."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import leanconv
from leanconv.errors import LeanconvError
from leanconv.runtimes.export import formats, trial
from leanconv.runtimes.export import onnx as onnx_room
from leanconv.runtimes.export import pt2 as pt2_room
from leanconv.runtimes.export.formats import EXPORTERS
from tests.support.command import NETWORK, call
from tests.support.equality import relative
from tests.support.networks import plain_network
from tests.support.pictures import smooth_images

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


class Asking(nn.Module):
    """Asks a layer for its weight's dtype and device in every forward, as some networks do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 24, 3, padding=1)
        self.third = nn.Conv2d(24, 24, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x.to(self.second.weight.dtype).to(self.third.weight.device)
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return {"map": torch.relu(self.third(x)), "mean": x.mean((2, 3))}


class Flat(nn.Module):
    """A Linear layer on all pixels: one image size only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.out = nn.Linear(4 * 8 * 8, 5)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.out(self.conv(x).flatten(1))
        return answer


@pytest.fixture(scope="module")
def fast() -> leanconv.Accelerated:
    return leanconv.accelerate(plain_network(), smooth_images(), speedup=2, progress=False)


@pytest.fixture(scope="module")
def onnx_file(fast: leanconv.Accelerated, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return leanconv.export(fast.model, smooth_images(1), tmp_path_factory.mktemp("onnx") / "new" / "fast.onnx").path


def in_onnxruntime(path: Path, x: Tensor) -> list[Tensor]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return [torch.as_tensor(found) for found in session.run(None, {"images": x.numpy()})]


@torch.no_grad()
def test_onnx_answers_as_torch_on_any_batch_and_size(fast: leanconv.Accelerated, onnx_file: Path) -> None:
    assert any(type(module).__name__ == "Factored" for module in fast.model.modules())
    for count, size in ((1, 16), (5, 16), (2, 24)):
        x = smooth_images(count, size, seed=3)
        (found,) = in_onnxruntime(onnx_file, x)
        assert relative(found, fast.model(x)) < 1e-5
    header = onnx.load(str(onnx_file))
    (given,) = header.graph.input
    assert [d.dim_param or d.dim_value for d in given.type.tensor_type.shape.dim] == ["batch", 3, "height", "width"]
    assert [(o.domain, o.version) for o in header.opset_import] == [("", 18)]
    assert [file.name for file in onnx_file.parent.iterdir()] == ["fast.onnx"]  # weights inside, nothing left over


def test_half_precision_and_channels_last_are_written_in_float32(tmp_path: Path, capsys) -> None:
    model = plain_network((8, 8), batch_norm=False).to(torch.bfloat16, memory_format=torch.channels_last)
    written = leanconv.export(model, smooth_images(1), tmp_path / "half.onnx")
    assert "the network is in bfloat16, the ONNX file computes in float32" in capsys.readouterr().err
    assert written.difference is not None
    assert written.difference < 1e-5
    assert next(model.parameters()).dtype == torch.bfloat16
    x = smooth_images(2)
    (found,) = in_onnxruntime(tmp_path / "half.onnx", x)
    assert relative(found, model.float()(x).detach()) < 1e-5


def test_a_network_of_one_size_keeps_it_and_says_so(tmp_path: Path, capsys) -> None:
    written = leanconv.export(Flat().train(), smooth_images(1, 8), tmp_path / "flat.onnx", opset=20)
    assert written.input == ("batch", 3, 8, 8)
    assert written.opset == 20
    assert written.checked == ((1, 3, 8, 8), (3, 3, 8, 8))
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("leanconv: warning: the ONNX file fixes the image size (8 x 8)")


def test_a_check_that_says_nothing_is_not_passed_over(tmp_path: Path, capsys) -> None:
    model = Flat()
    nn.init.zeros_(model.out.weight)
    nn.init.zeros_(model.out.bias)
    leanconv.export(model, smooth_images(1, 8), tmp_path / "zero.onnx", dynamic=False)
    assert "the network answers 0 whatever it is given" in capsys.readouterr().err


def test_a_fixed_file_has_the_examples_shape(tmp_path: Path, capsys) -> None:
    written = leanconv.export(Flat(), smooth_images(4, 8), tmp_path / "flat.onnx", dynamic=False, check=False)
    assert (written.input, written.checked, written.difference) == ((4, 3, 8, 8), (), None)
    assert capsys.readouterr().err == ""


class InPlace(nn.Module):
    """Changes a map where gradients are off."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        with torch.no_grad():
            y[:, 1].add_(5)
        return y


def test_what_only_changes_something_in_place_is_exported_too(tmp_path: Path) -> None:
    written = leanconv.export(InPlace().eval(), smooth_images(2, 8), tmp_path / "net.onnx")
    assert written.difference is not None
    assert written.difference < 1e-5


class AskingWithoutGradients(Asking):
    """Asks where gradients are off: that is a graph in torch.export's graph."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            half = x.to(self.second.weight.dtype) / 2
        return super().forward(x + half)


@pytest.mark.nightly
def test_weights_that_are_not_there_are_in_no_graph_of_the_file(tmp_path: Path) -> None:
    images = smooth_images()
    fast = leanconv.accelerate(AskingWithoutGradients().eval(), images, speedup=2, progress=False).model
    written = leanconv.export(fast, images[:2], tmp_path / "asking.pt2")
    graphs = [module for module in torch.export.load(written.path).graph_module.modules() if hasattr(module, "graph")]
    assert len(graphs) > 1
    assert not any("full" in str(node.target) for module in graphs for node in module.graph.nodes)


@pytest.mark.nightly
@torch.no_grad()
def test_pt2_loads_where_leanconv_cannot_be_imported(tmp_path: Path) -> None:
    model = Asking().eval()
    images = smooth_images(8)
    ranks = {"second": (8, 8), "third": (8, 8)}
    fast = leanconv.accelerate(model, [images], ranks=ranks, progress=False).model
    written = leanconv.export(fast, images[:1], tmp_path / "fast.pt2")
    assert written.input == ("batch", 3, "height", "width")
    x = smooth_images(5, 20, seed=4)
    torch.save(x, tmp_path / "x.pt")
    script = (
        "import sys; sys.modules['leanconv'] = None; import torch\n"
        "answer = torch.export.load('fast.pt2').module()(torch.load('x.pt'))\n"
        "torch.save(answer, 'answer.pt')"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found, wanted = torch.load(tmp_path / "answer.pt"), fast(x)
    assert found.keys() == wanted.keys()
    assert all(relative(found[key], wanted[key]) < 1e-6 for key in wanted)
    # Those weights, whose values are not a number, are not in the file: torch before 2.9 could not write it.
    program = torch.export.load(written.path)
    assert not any("full" in str(node.target) for node in program.graph.nodes)
    # The same network, whose layers are asked for weights they have not got, in ONNX.
    leanconv.export(fast, images[:1], tmp_path / "fast.onnx")
    assert all(
        relative(a, b) < 1e-5
        for a, b in zip(in_onnxruntime(tmp_path / "fast.onnx", x), trial.tensors(wanted), strict=True)
    )


def test_a_file_that_answers_otherwise_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = onnx_room._session
    monkeypatch.setattr(onnx_room, "_session", lambda *given: lambda x: [found * 1.001 for found in session(*given)(x)])
    with pytest.raises(LeanconvError, match=r"the ONNX file cannot be written: .* off, above 1e-04; nothing was left"):
        leanconv.export(Flat(), smooth_images(1, 8), tmp_path / "deep" / "flat.onnx", dynamic=False)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(pt2_room, "ELSEWHERE", "raise SystemExit('no such operator')")
    with pytest.raises(LeanconvError, match=r"plain torch does not load or run the file \(no such operator\)"):
        leanconv.export(Flat(), smooth_images(1, 8), tmp_path / "flat.pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime", "onnxscript"])
def test_a_missing_extra_is_named(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(LeanconvError, match=rf"^{missing} is not installed; pip install 'leanconv\[onnx\]'\.$"):
        leanconv.export(Flat(), smooth_images(1, 8), tmp_path / "flat.onnx")
    assert list(tmp_path.iterdir()) == []


def test_aot_without_a_compiler_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    def none() -> str:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(LeanconvError, match=r"needs a C\+\+ compiler, and there is none here"):
        leanconv.export(Flat(), smooth_images(1, 8), tmp_path / "flat.pt2", "aot", device="cpu")


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler")
@torch.no_grad()
def test_aot_package_answers_as_torch(tmp_path: Path) -> None:
    model = Flat()
    path = leanconv.export(model, smooth_images(1, 8), tmp_path / "flat.pt2", "aot").path
    x = smooth_images(4, 8, seed=5)
    assert relative(torch._inductor.aoti_load_package(str(path))(x), model(x)) < 1e-5


def test_detectors_are_refused(tmp_path: Path) -> None:
    import torchvision

    model = torchvision.models.get_model("ssdlite320_mobilenet_v3_large", weights=None, weights_backbone=None)
    for name, exporter in EXPORTERS.items():
        with pytest.raises(LeanconvError, match=r"SSD is a detector, .* export its backbone"):
            leanconv.export(model, torch.zeros(1, 3, 64, 64), tmp_path / f"a{exporter.suffix}", name)
    assert list(tmp_path.iterdir()) == []


def test_a_format_is_known_by_its_ending_or_its_name(tmp_path: Path) -> None:
    assert formats.choose_exporter(tmp_path / "a.onnx", None).name == "onnx"
    assert formats.choose_exporter(tmp_path / "a.pt2", None).name == "pt2"
    assert formats.choose_exporter(tmp_path / "a.pt2", "aot").name == "aot"
    with pytest.raises(LeanconvError, match=r"^format names the format 'onx', .* did you mean onnx"):
        leanconv.export(Flat(), smooth_images(1, 8), tmp_path / "a.onnx", "onx")
    with pytest.raises(LeanconvError, match=r"^device does not go with format onnx"):
        leanconv.export(Flat(), smooth_images(1, 8), tmp_path / "a.onnx", device="cpu")


@pytest.mark.parametrize("name", list(EXPORTERS))
def test_every_format_has_its_module(name: str) -> None:
    assert callable(EXPORTERS[name].module.prepare)
    assert callable(EXPORTERS[name].module.write)


def test_every_format_can_be_of_one_size(tmp_path: Path) -> None:
    for name in ("onnx", "pt2"):
        file = tmp_path / f"flat{EXPORTERS[name].suffix}"
        written = leanconv.export(Flat(), smooth_images(2, 8), file, dynamic=False, check=False)
        assert (written.format, written.input, written.difference) == (name, (2, 3, 8, 8), None)
        assert str(written).endswith("not checked")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NETWORK)
    (tmp_path / "empty").mkdir()
    (tmp_path / "there.onnx").write_text("mine")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("net.py:build --format tflite --out a.onnx", "--format names the format 'tflite', which does not exist"),
        ("net.py:build --format onnx --out a.pt2", "'a.pt2' does not end in .onnx"),
        ("net.py:build --format aot --out a.so", "'a.so' does not end in .pt2"),
        ("net.py:build --out there.onnx", "'there.onnx' exists already"),
        ("net.py:build --out there.onnx/a.onnx", "there.onnx' is not a folder you may write to"),
        ("net.py:build --out a.onnx --opset 9", "opset=9 must be a whole number from 17"),
        ("net.py:build --out a.onnx --device cpu", "--device does not go with --format onnx"),
        ("net.py:build --out a.pt2 --opset 18", "--opset does not go with --format pt2"),
        (
            "net.py:build --out a.engine",
            "none of the endings of exported files; use .onnx (onnx), .pt2 (pt2)",
        ),
        ("net.py:grey --out a.onnx --size 16", "the network fails on an input of 1 x 3 x 16 x 16"),
        ("empty --out a.onnx", "'empty' has no leanconv.json"),
    ],
)
def test_bad_input(arguments: str, message: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    before = sorted(file.name for file in place.iterdir())
    code, out, err = call(f"export {arguments}", monkeypatch, capsys)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert sorted(file.name for file in place.iterdir()) == before
    assert (place / "there.onnx").read_text() == "mine"


@torch.no_grad()
def test_from_a_saved_folder(place: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The folder's own picture size and channels are used."""
    from leanconv.images import Preprocess

    (place / "net2.py").write_text(NETWORK.replace("nn.Conv2d(8, 8, 3))", "nn.Conv2d(8, 8, 3), Wide())") + WIDE)
    namespace: dict[str, object] = {}
    exec((place / "net2.py").read_text(), namespace)
    model = namespace["grey"]()  # type: ignore[operator]
    result = leanconv.accelerate(model, smooth_images(8, 12, 1), ranks={"2": (4, 4)}, progress=False)
    known = Preprocess(size=12, resize=12, channels=1, mean=(0.5,), std=(0.5,)).to_json()
    dataclasses.replace(result, preprocess=known).save("folder")
    code, out, err = call("export folder --model net2.py:grey --out grey.onnx --json", monkeypatch, capsys)
    assert code == 0, err
    told = json.loads(out)
    assert told["input"] == ["batch", 1, 12, 12]
    assert told["checked"] == [[1, 1, 12, 12], [3, 1, 12, 12]]
    assert (told["path"], told["opset"], told["dtype"]) == ("grey.onnx", 18, "float32")
    assert told["bytes"] == (place / "grey.onnx").stat().st_size
    assert told["difference"] < 1e-4
    x = smooth_images(2, 12, 1)
    (found,) = in_onnxruntime(place / "grey.onnx", x)
    assert relative(found, leanconv.load("folder", model)(x)) < 1e-5


WIDE = """
class Wide(nn.Module):
    def forward(self, x):
        assert x.shape[-1] == 8, "of one size"
        return x
"""
