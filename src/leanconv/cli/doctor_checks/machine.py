"""The machine: what it can compute with, and where there is room."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from leanconv.cli.doctor_checks.line import Line, attempt, looked_at
from leanconv.cli.doctor_checks.packages import broken
from leanconv.errors import LeanconvError, listing

# Less room than this is worth a word: the weights of a large network, twice.
SCARCE = 2 * 10**9


def devices() -> list[Line]:
    gpus, problem = attempt(_gpus)
    return [looked_at("cpu", _cpu), *(gpus or []), *([Line(name="cuda", problem=problem)] if problem else [])]


def _cpu() -> str:
    import torch

    from leanconv.runtimes.bench.machine import cores, cpu_name

    return f"{cpu_name()}, {platform.machine()}; cores: {cores()}, threads of torch: {torch.get_num_threads()}"


def _gpus() -> list[Line]:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"no device found; torch is built for CUDA {built}" if built else "torch is built without it"
        return [Line(name="cuda", found=why)]
    return [looked_at(f"cuda:{number}", partial(_gpu, number)) for number in range(torch.cuda.device_count())]


def _gpu(number: int) -> str:
    import torch

    about = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    return f"{about.name}, capability {about.major}.{about.minor}, {_gigabytes(free)} of {_gigabytes(total)} free"


def runtimes() -> list[Line]:
    """What ``bench --runtime`` takes, and whether it would; on the CPU, and on the GPU where there is one."""
    import torch

    from leanconv.runtimes.bench.runners import RUNTIMES

    places = ["cuda", "cpu"] if attempt(torch.cuda.is_available)[0] else ["cpu"]
    return [_runtime(name, places) for name in RUNTIMES]


def _runtime(name: str, places: list[str]) -> Line:
    import torch
    from torch import nn

    from leanconv.runtimes.bench.runners import RUNTIMES, Conditions

    able, refusals = [], []
    for place in places:
        conditions = Conditions(device=torch.device(place))
        _, problem = attempt(partial(RUNTIMES[name].refuse, nn.Identity(), conditions))
        if problem is None:
            able.append(place)
        else:
            refusals.append(problem.removeprefix(f"{LeanconvError.__name__}: ").rstrip("."))
    if not able:
        # To bench a library that cannot be imported is not there; here it matters whether it is.
        return Line(name=name, problem=broken(_NEEDED.get(name, ())) or refusals[-1])
    details = attempt(_DETAILS[name])[0] if name in _DETAILS else None
    return Line(name=name, found="on " + " and ".join(able) + (f": {details}" if details else ""))


def _compilers() -> str:
    compiler = next((found for found in map(shutil.which, ("c++", "g++", "clang++", "cl")) if found), None)
    triton = "Triton" if importlib.util.find_spec("triton") is not None else None
    return listing([one for one in (compiler, triton) if one])


def _providers() -> str:
    return listing(importlib.import_module("onnxruntime").get_available_providers())


def _plugins() -> str:
    return listing(importlib.import_module("openvino").Core().available_devices)


# Libraries of a runtime, as PyPI calls them.
_NEEDED = {"onnxruntime": ("onnxruntime", "onnx", "onnxscript"), "openvino": ("openvino", "onnx", "onnxscript")}
_DETAILS = {"torch-compile": _compilers, "onnxruntime": _providers, "openvino": _plugins}


def kernels() -> Line:
    """leanconv's own kernels for GPUs, and whether they run here."""
    found, problem = attempt(_kernels)
    return found if found is not None else Line(name="leanconv.kernels", problem=problem)


def _kernels() -> Line:
    import torch

    from leanconv.kernels.availability import missing
    from leanconv.kernels.tune import cache_file

    if not torch.cuda.is_available():
        found = "for NVIDIA GPUs, and none is found here; networks run on torch's own"
        return Line(name="leanconv.kernels", found=found)
    problem = missing(torch.device("cuda"))
    if problem is not None:
        return Line(name="leanconv.kernels", problem=problem.rstrip("."))
    return Line(name="leanconv.kernels", found=f"on cuda; what was measured is kept in {cache_file()}")


def room() -> list[Line]:
    return [
        looked_at("memory", _memory),
        _disk("this folder", Path.cwd),
        _disk("temporary files", lambda: Path(tempfile.gettempdir())),
        looked_at("trained weights", _cache),
    ]


def _memory() -> str:
    from leanconv.calibrate.memory import free_host

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{_gigabytes(free_host())} of {_gigabytes(total)} free; a run keeps within half of that"


def _disk(name: str, where: Callable[[], Path]) -> Line:
    free, problem = attempt(lambda: shutil.disk_usage(where()).free)
    if problem is not None:
        return Line(name=name, problem=problem)
    found = f"{_gigabytes(free)} free at {where()}"
    return Line(name=name, found=found, problem="that is little" if free < SCARCE else None)


def _cache() -> str:
    """Where torch keeps the weights it has fetched; it may not exist yet."""
    import torch

    folder = Path(torch.hub.get_dir()) / "checkpoints"
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise LeanconvError(f"{str(there)!r} cannot be written; set TORCH_HOME to a folder that can")
    if there != folder:
        return f"none fetched yet, they would go to {folder}"
    sizes = [file.stat().st_size for file in folder.iterdir() if file.is_file()]
    return f"{len(sizes)} files, {_gigabytes(sum(sizes))}, in {folder}"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
