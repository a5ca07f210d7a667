"""The libraries leanconv uses: which are there, whether they can be imported, and what the missing ones are for."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Sequence
from dataclasses import dataclass

from leanconv.doctor.line import Line, attempt

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
    "report": Extra(("plotly",), "leanconv report, leanconv compare --plot"),
    "timm": Extra(("timm",), "networks called timm:NAME"),
    "datasets": Extra(("datasets",), "images called hf:NAME:SPLIT"),
    "detection": Extra(("torchmetrics", "pycocotools"), "leanconv evaluate --metric coco"),
    "baselines": Extra(("tensorly",), "leanconv.baselines, other methods to compare with"),
}


def essentials() -> tuple[list[Line], list[str]]:
    """The libraries that came with leanconv, and a sentence for each that keeps commands from working."""
    lines = [package(name) for name in (*ESSENTIAL, "scikit-learn")]
    broken = [
        f"{line.name} does not work ({line.problem})" for line in lines if line.problem and line.name in ESSENTIAL
    ]
    return lines, broken


def extras() -> list[Line]:
    return [_extra(name, extra) for name, extra in EXTRAS.items()]


def _extra(name: str, extra: Extra) -> Line:
    lines = [package(one) for one in extra.packages]
    found = ", ".join(f"{line.name} {line.found}" for line in lines if line.found) or None
    missing = [line for line in lines if line.problem]
    if not missing:
        return Line(name=name, found=found)
    why = ", ".join(f"{line.name} {line.problem}" for line in missing)
    return Line(name=name, found=found, problem=f"{why}, for {extra.purpose}: pip install 'leanconv[{name}]'")


def package(name: str) -> Line:
    """Its version, and what is wrong with it: missing, broken or too old."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    module, problem = attempt(lambda: importlib.import_module(MODULES.get(name, name)))
    if module is None:
        absent = version is None and problem is not None and problem.startswith("ModuleNotFoundError")
        return Line(name=name, found=version, problem="is missing" if absent else f"cannot be imported ({problem})")
    # The module's own word says more, such as what torch was built for.
    own = getattr(module, "__version__", None)
    version = str(own or version or "of unknown version")
    least = _least().get(name)
    if least is not None and _numbers(version) < _numbers(least):
        return Line(name=name, found=version, problem=f"is older than {least}: pip install -U {name}")
    return Line(name=name, found=version)


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
