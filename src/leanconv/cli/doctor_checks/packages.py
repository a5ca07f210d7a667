"""The libraries leanconv uses: which are there, whether they can be imported, and what the missing ones are for."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Sequence
from dataclasses import dataclass

from leanconv.cli.doctor_checks.line import Line, attempt

# Name on PyPI -> name in Python, where they differ.
MODULES = {"pillow": "PIL", "scikit-learn": "sklearn"}
# Without these no command works.
ESSENTIAL = ("torch", "torchvision", "numpy", "safetensors", "pillow", "typer", "rich")


@dataclass(frozen=True)
class Extra:
    """What ``pip install 'leanconv[NAME]'`` adds, and what that is needed for."""

    packages: tuple[str, ...]
    purpose: str


EXTRAS = {
    "onnx": Extra(("onnx", "onnxscript", "onnxruntime"), "leanconv export --format onnx, bench --runtime onnxruntime"),
    "openvino": Extra(("openvino",), "leanconv bench --runtime openvino, together with the extra onnx"),
    "kernels": Extra(("triton",), "leanconv.optimize_, bench --runtime torch-kernels, on an NVIDIA GPU"),
    "report": Extra(("plotly",), "leanconv report, leanconv compare --plot"),
    "timm": Extra(("timm",), "networks called timm:NAME"),
    "datasets": Extra(("datasets",), "images called hf:NAME:SPLIT"),
    "detection": Extra(("torchmetrics", "pycocotools"), "leanconv evaluate --metric coco"),
}


def essentials() -> tuple[list[Line], list[str]]:
    """The libraries that came with leanconv, and a sentence for each that keeps commands from working."""
    lines = [package(name) for name in (*ESSENTIAL, "scikit-learn")]
    broken = [
        f"{line.name} does not work ({line.problem})" for line in lines if line.problem and line.name in ESSENTIAL
    ]
    return lines, broken


def extras(runtimes: Sequence[Line] = ()) -> list[Line]:
    """``runtimes``: what was found out about them, which a library that can be imported may still not do."""
    stopped = {line.name: line.problem for line in runtimes if line.problem}
    return [_extra(name, extra, stopped) for name, extra in EXTRAS.items()]


def _extra(name: str, extra: Extra, stopped: dict[str, str]) -> Line:
    looked = [_look(one) for one in extra.packages]
    found = ", ".join(f"{one.name} {one.found}" for one in looked if one.found) or None
    why = [f"{one.name} {one.problem}" for one in looked if one.problem]
    remedies = [one.remedy or f"pip install 'leanconv[{name}]'" for one in looked if one.problem]
    for one in looked:
        if not one.problem and one.name in stopped:
            why.append(f"{one.name} does not run here ({stopped[one.name]})")
            remedies += [] if "pip install" in stopped[one.name] else [_again(one.name)]
    if not why:
        return Line(name=name, found=found)
    problem = f"{', '.join(why)}, for {extra.purpose}"
    return Line(
        name=name, found=found, problem=": ".join(filter(None, [problem, " and ".join(dict.fromkeys(remedies))]))
    )


def package(name: str) -> Line:
    """Its version, and what is wrong with it: missing, broken or too old."""
    found = _look(name)
    problem = found.problem if found.remedy is None else f"{found.problem}: {found.remedy}"
    return Line(name=name, found=found.found, problem=problem)


def broken(names: Sequence[str]) -> str | None:
    """What is wrong with those of ``names`` that are installed, and do not work."""
    lines = [package(name) for name in names]
    return ", ".join(f"{line.name} {line.problem}" for line in lines if line.found and line.problem) or None


def _again(name: str) -> str:
    return f"pip install --force-reinstall {name}"


@dataclass(frozen=True, kw_only=True)
class _Looked:
    """``remedy`` None: where there is a problem, it is to be installed like everything that is missing."""

    name: str
    found: str | None
    problem: str | None = None
    remedy: str | None = None


def _look(name: str) -> _Looked:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    module, problem = attempt(lambda: importlib.import_module(MODULES.get(name, name)))
    if module is None:
        absent = version is None and problem is not None and problem.startswith("ModuleNotFoundError")
        if absent:
            return _Looked(name=name, found=None, problem="is missing")
        return _Looked(name=name, found=version, problem=f"cannot be imported ({problem})", remedy=_again(name))
    # The module's own word says more, such as what torch was built for.
    own = getattr(module, "__version__", None)
    version = str(own or version or "of unknown version")
    least = _least().get(name)
    if least is not None and _numbers(version) < _numbers(least):
        return _Looked(name=name, found=version, problem=f"is older than {least}", remedy=f"pip install -U {name}")
    return _Looked(name=name, found=version)


def _least() -> dict[str, str]:
    """The oldest versions that will do, by the package's own word; nothing where leanconv is not installed."""
    try:
        required: Sequence[str] = importlib.metadata.requires("leanconv") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = [re.match(r"([\w.-]+)\s*>=\s*([\d.]+)", one) for one in required]
    return {one[1].lower(): one[2] for one in found if one}


def _numbers(version: str) -> tuple[int, ...]:
    """``2.11.0+cu130`` -> (2, 11, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
