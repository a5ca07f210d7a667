"""``leanconv doctor``: what it finds, and that nothing broken breaks it."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from leanconv.cli.doctor_checks import machine, packages
from leanconv.cli.doctor_checks.line import Line, attempt
from leanconv.cli.doctor_checks.run import Examination, examine

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found() -> Examination:
    return examine()


def test_it_names_versions_devices_runtimes_and_room(found: Examination) -> None:
    data = found.to_json()
    assert data["works"] is True
    assert data["versions"]["torch"] == {"found": torch.__version__, "problem": None}
    assert data["versions"]["python"]["found"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}")
    assert f"threads of torch: {torch.get_num_threads()}" in data["devices"]["cpu"]["found"]
    assert any(name.startswith("cuda") for name in data["devices"])
    assert data["runtimes"]["torch"]["found"].startswith("on ")
    assert "CPUExecutionProvider" in data["runtimes"]["onnxruntime"]["found"]
    assert re.match(r"\d+\.\d GB of \d+\.\d GB free", data["room"]["memory"]["found"])
    assert "checkpoints" in data["room"]["trained weights"]["found"]
    json.dumps(data)


def test_every_line_is_printed(found: Examination) -> None:
    text = str(found)
    for title, lines in found.sections.items():
        assert re.search(rf"^{title} ", text, re.MULTILINE)
        assert all(re.search(rf" {re.escape(line.name)} ", text) for line in lines)


def test_extras_are_those_of_the_package() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {
        name: [re.match(r"[\w-]+", one)[0] for one in what] for name, what in project["optional-dependencies"].items()
    }
    assert {name: list(extra.packages) for name, extra in packages.EXTRAS.items()} == known
    needed = {re.match(r"[\w-]+", one)[0] for one in project["dependencies"]}
    assert needed == {*packages.ESSENTIAL, "scikit-learn"}


def test_runtimes_are_those_of_bench() -> None:
    from leanconv.runtimes.bench.runners import RUNTIMES

    assert [line.name for line in machine.runtimes()] == list(RUNTIMES)


def broken(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    """An install of ``name`` whose import fails with ``error``."""
    true = importlib.import_module

    def load(module: str, package: str | None = None) -> object:
        if module == name:
            raise error
        return true(module, package)

    monkeypatch.setattr(importlib, "import_module", load)


@pytest.mark.parametrize(
    "error", [ImportError("libcudart.so: cannot open"), OSError("DLL load failed"), RuntimeError("ABI"), SystemExit(1)]
)
def test_a_broken_extra_is_said_and_no_more(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "onnxruntime", error)
    (line,) = [one for one in packages.extras() if one.name == "onnx"]
    assert line.problem is not None
    assert f"onnxruntime cannot be imported ({type(error).__name__}" in line.problem
    assert "for leanconv export --format onnx" in line.problem
    assert line.problem.endswith(": pip install --force-reinstall onnxruntime")
    (line,) = [one for one in machine.runtimes() if one.name == "onnxruntime"]
    assert line.found is None
    assert line.problem == (
        f"onnxruntime cannot be imported ({type(error).__name__}: {error}): pip install --force-reinstall onnxruntime"
    )


def test_a_missing_extra_says_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "EXTRAS", {"report": packages.Extra(("no-such-package",), "leanconv report")})
    (line,) = packages.extras()
    assert str(line) == "no-such-package is missing, for leanconv report: pip install 'leanconv[report]'"


def test_missing_and_broken_are_mended_each_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "EXTRAS", {"all": packages.Extra(("no-such-package", "onnx", "plotly"), "a test")})
    broken(monkeypatch, "onnx", ImportError("libprotobuf.so"))
    (line,) = packages.extras()
    assert line.problem == (
        "no-such-package is missing, onnx cannot be imported (ImportError: libprotobuf.so), for a test: "
        "pip install 'leanconv[all]' and pip install --force-reinstall onnx"
    )


def test_a_runtime_that_does_not_work_is_nowhere_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    from leanconv.runtimes.bench.runners import RUNTIMES

    def refuse(model: object, conditions: object) -> None:
        raise RuntimeError("no plugins.xml")

    monkeypatch.setattr(RUNTIMES["openvino"], "refuse", refuse, raising=False)
    found = examine().to_json()
    assert found["runtimes"]["openvino"]["problem"] == "RuntimeError: no plugins.xml"
    assert found["extras"]["openvino"]["problem"] == (
        "openvino does not run here (RuntimeError: no plugins.xml), for leanconv bench --runtime openvino, together "
        "with the extra onnx: pip install --force-reinstall openvino"
    )
    assert found["extras"]["onnx"]["problem"] is None


def test_an_old_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_least", lambda: {"numpy": "99.1"})
    line = packages.package("numpy")
    assert line.problem == "is older than 99.1: pip install -U numpy"
    assert packages._numbers("2.11.0+cu130") > packages._numbers("2.8")


def test_something_essential_broken_exits_2(leanconv_command, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "torchvision", RuntimeError("operator torchvision::nms does not exist"))
    monkeypatch.setattr("leanconv.cli.doctor_checks.run.extras", list)
    code, out, err = leanconv_command("doctor")
    assert code == 2
    assert err == (
        "leanconv: error: torchvision does not work (cannot be imported (RuntimeError: operator torchvision::nms does "
        "not exist): pip install --force-reinstall torchvision); install it again.\n"
    )
    assert "safetensors" in out
    code, out, err = leanconv_command("doctor --json")
    assert code == 2
    assert json.loads(out)["works"] is False


def test_a_torch_that_cannot_compute_exits_2(leanconv_command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("Intel oneMKL FATAL ERROR")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    monkeypatch.setattr("leanconv.cli.doctor_checks.run.extras", list)
    code, _, err = leanconv_command("doctor")
    assert code == 2
    assert "torch does not compute (RuntimeError: Intel oneMKL FATAL ERROR)" in err


def test_a_driver_that_fails_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> bool:
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr(torch.cuda, "is_available", fails)
    assert [line.name for line in machine.devices()] == ["cpu", "cuda"]
    assert machine.devices()[1].problem == "RuntimeError: CUDA driver initialization failed"
    assert machine.runtimes()[0] == Line(name="torch", found="on cpu")


def test_kernels_say_whether_they_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from leanconv.kernels import availability

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "none is found here" in str(machine.kernels())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(availability, "missing", lambda device: "Triton is not installed; pip install triton.")
    assert machine.kernels() == Line(name="leanconv.kernels", problem="Triton is not installed; pip install triton")
    monkeypatch.setattr(availability, "missing", lambda device: None)
    assert "kernels.json" in str(machine.kernels())

    def broken() -> bool:
        raise OSError("no driver")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    assert machine.kernels() == Line(name="leanconv.kernels", problem="OSError: no driver")


def test_a_full_disk_and_a_cache_out_of_reach_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SCARCE", 10**18)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "file" / "hub"))
    lines = {line.name: line for line in machine.room()}
    assert lines["this folder"].problem == "that is little"
    assert "cannot be written; set TORCH_HOME" in (lines["trained weights"].problem or "")
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    assert "none fetched yet" in str(machine.room()[-1])


def test_what_libraries_say_on_import_is_left_out(capsys) -> None:
    assert attempt(lambda: print("welcome")) == (None, None)
    assert capsys.readouterr().out == ""


def test_the_command(leanconv_command, found: Examination, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leanconv.cli.doctor_checks.examine", lambda: found)
    code, out, err = leanconv_command("doctor")
    assert (code, err) == (0, "")
    assert out == f"{found}\n"
    code, out, _ = leanconv_command("doctor --json")
    assert code == 0
    assert json.loads(out) == found.to_json()
