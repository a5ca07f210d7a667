"""leanconv: a trained convolutional network in, the same network several times cheaper out."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from leanconv._version import __version__
from leanconv.errors import LeanconvError

if TYPE_CHECKING:
    from leanconv import models
    from leanconv.api import accelerate, reachable
    from leanconv.kernels.optimize import optimize_
    from leanconv.result import Accelerated, LayerReport
    from leanconv.runtimes.bench.comparison import bench
    from leanconv.runtimes.export import export
    from leanconv.runtimes.target import Measured, Target
    from leanconv.storage.folder import load, load_result
    from leanconv.train.finetune import FineTuned, finetune

__all__ = [
    "Accelerated",
    "FineTuned",
    "LayerReport",
    "LeanconvError",
    "Measured",
    "Target",
    "__version__",
    "accelerate",
    "bench",
    "export",
    "finetune",
    "load",
    "load_result",
    "models",
    "optimize_",
    "reachable",
]

# torch takes seconds to import; `leanconv --help` must not wait for it.
_WHERE = {
    "accelerate": "leanconv.api",
    "reachable": "leanconv.api",
    "Accelerated": "leanconv.result",
    "LayerReport": "leanconv.result",
    "FineTuned": "leanconv.train.finetune",
    "finetune": "leanconv.train.finetune",
    "load": "leanconv.storage.folder",
    "load_result": "leanconv.storage.folder",
    "bench": "leanconv.runtimes.bench.comparison",
    "export": "leanconv.runtimes.export",
    "Measured": "leanconv.runtimes.target",
    "Target": "leanconv.runtimes.target",
    "models": "leanconv.models",
    "optimize_": "leanconv.kernels.optimize",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'leanconv' has no attribute {name!r}")
    module = importlib.import_module(_WHERE[name])
    value = module if _WHERE[name] == f"leanconv.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
