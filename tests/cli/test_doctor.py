"""``leanconv doctor``: what it finds, and that nothing broken breaks it."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch

from leanconv.cli import doctor
from leanconv.cli.doctor import Line, attempt, examine
from leanconv.runtimes.runners import RUNTIMES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sections() -> dict[str, dict[str, Line]]:
    sections, broken = examine()
    assert broken == []
    return sections


def test_it_names_versions_machine_and_runtimes(sections: dict[str, dict[str, Line]]) -> None:
    assert sections["versions"]["torch"] == (torch.__version__, None)
    assert sections["versions"]["python"].found.startswith(f"{sys.version_info[0]}.{sys.version_info[1]}")
    assert f"threads of torch: {torch.get_num_threads()}" in sections["machine"]["cpu"].found
    assert re.match(r"\d+\.\d GB free", sections["machine"]["memory"].found)
    assert list(sections["runtimes"]) == list(RUNTIMES)
    assert sections["runtimes"]["torch"].found.startswith("on cpu")
    assert "CPUExecutionProvider" in sections["runtimes"]["onnxruntime"].found


def test_needs_and_extras_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # As an installed package says them; the one installed may be older.
    said = list(project["dependencies"])
    for name, packages in project["optional-dependencies"].items():
        said += [f"{one}{' and' if ';' in one else ';'} extra == '{name}'" for one in packages]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: said)
    sections, _ = examine()
    needed = {re.match(r"[\w-]+", one)[0] for one in project["dependencies"]}
    assert set(sections["versions"]) == {"leanconv", "python", *needed}
    assert set(sections["extras"]) == set(project["optional-dependencies"])
    for name, packages in project["optional-dependencies"].items():
        assert all(re.match(r"[\w-]+", one)[0] in str(sections["extras"][name]) for one in packages)


def broken(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    """An install of ``name`` whose import fails with ``error``."""
    true = importlib.import_module

    def load(module: str, package: str | None = None) -> object:
        if module == name:
            raise error
        return true(module, package)

    monkeypatch.setattr(importlib, "import_module", load)
    monkeypatch.setattr(doctor, "import_module", load)


@pytest.mark.parametrize(
    "error", [ImportError("libcudart.so: cannot open"), OSError("DLL load failed"), RuntimeError("ABI"), SystemExit(1)]
)
def test_a_broken_extra_is_said_and_no_more(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "onnxruntime", error)
    sections, problems = examine()
    assert problems == []
    said = (
        f"onnxruntime cannot be imported ({type(error).__name__}: {error}): pip install --force-reinstall onnxruntime"
    )
    assert sections["extras"]["onnx"].problem == said
    assert sections["runtimes"]["onnxruntime"].found is None
    if not isinstance(error, SystemExit):
        assert sections["runtimes"]["onnxruntime"].problem == said.replace("): ", "); ")


def test_what_is_missing_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["torch>=2.8", "no-such-package>=1; extra == 'report'", 'plotly>=6.0; extra == "report"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: required)
    line = examine()[0]["extras"]["report"]
    assert line.problem == "no-such-package is missing: pip install 'leanconv[report]'"
    assert line.found.startswith("plotly ")


def test_without_metadata_it_still_says_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> list[str]:
        raise doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", absent)
    sections, problems = examine()
    assert problems == []
    assert sections["runtimes"]["torch"].found.startswith("on ")


def test_a_runtime_that_does_not_work_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: object, conditions: object) -> None:
        raise RuntimeError("no plugins.xml")

    monkeypatch.setattr(RUNTIMES["openvino"], "refuse", refuse, raising=False)
    assert examine()[0]["runtimes"]["openvino"] == (None, "RuntimeError: no plugins.xml")


def test_an_old_library_is_said() -> None:
    assert doctor.package("numpy", "99.1").problem == "is older than 99.1: pip install -U numpy"
    assert doctor.package("torch", "2.8").problem is None


def test_something_essential_broken_exits_2(leanconv_command, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "torchvision", RuntimeError("operator torchvision::nms does not exist"))
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
    code, _, err = leanconv_command("doctor")
    assert code == 2
    assert "torch does not compute (RuntimeError: Intel oneMKL FATAL ERROR)" in err


def test_a_driver_that_fails_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> bool:
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr(torch.cuda, "is_available", fails)
    sections, problems = examine()
    assert problems == []
    assert sections["machine"]["gpu"] == (None, "RuntimeError: CUDA driver initialization failed")
    assert sections["runtimes"]["torch"] == ("on cpu", None)


def test_what_libraries_say_on_import_is_left_out(capsys) -> None:
    assert attempt(lambda: print("welcome")) == (None, None)
    assert capsys.readouterr().out == ""


def test_the_command(leanconv_command, sections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: (sections, []))
    code, out, err = leanconv_command("doctor")
    assert (code, err) == (0, "")
    for title, lines in sections.items():
        assert all(re.search(rf"^{title} +{re.escape(name)} ", out, re.MULTILINE) for name in lines)
    code, out, _ = leanconv_command("doctor --json")
    assert code == 0
    told = json.loads(out)
    assert told["works"] is True
    assert told["versions"]["torch"] == {"found": torch.__version__, "problem": None}
