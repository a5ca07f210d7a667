"""leanconv: a trained convolutional network in, the same network several times cheaper out."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from leanconv.errors import LeanconvError

__version__ = "0.1.0"

if TYPE_CHECKING:
    from leanconv import models
    from leanconv.api import accelerate, analyze, paper, reachable
    from leanconv.config import Distill
    from leanconv.evaluation.api import evaluate
    from leanconv.forms.channel import Channel
    from leanconv.forms.spatial import Spatial
    from leanconv.forms.three_d import ThreeD
    from leanconv.kernels.optimize import optimize_
    from leanconv.pipeline.analysis import Analysis
    from leanconv.pipeline.plan import Plan
    from leanconv.ranks.latency.selector import Latency
    from leanconv.result import Accelerated, HeldOut, LayerReport
    from leanconv.runtimes.bench.comparison import bench
    from leanconv.runtimes.export.program import export
    from leanconv.runtimes.target import Measured, Target
    from leanconv.storage.folder import load, load_result
    from leanconv.train.finetune import FineTuned, finetune

__all__ = [
    "Accelerated",
    "Analysis",
    "Channel",
    "Distill",
    "FineTuned",
    "HeldOut",
    "Latency",
    "LayerReport",
    "LeanconvError",
    "Measured",
    "Plan",
    "Spatial",
    "Target",
    "ThreeD",
    "__version__",
    "accelerate",
    "analyze",
    "bench",
    "evaluate",
    "export",
    "finetune",
    "load",
    "load_result",
    "models",
    "optimize_",
    "paper",
    "reachable",
]

# torch takes seconds to import; `leanconv --help` must not wait for it.
_WHERE = {
    "accelerate": "leanconv.api",
    "analyze": "leanconv.api",
    "Analysis": "leanconv.pipeline.analysis",
    "Plan": "leanconv.pipeline.plan",
    "Distill": "leanconv.config",
    "Latency": "leanconv.ranks.latency.selector",
    "Channel": "leanconv.forms.channel",
    "Spatial": "leanconv.forms.spatial",
    "ThreeD": "leanconv.forms.three_d",
    "paper": "leanconv.api",
    "reachable": "leanconv.api",
    "Accelerated": "leanconv.result",
    "HeldOut": "leanconv.result",
    "LayerReport": "leanconv.result",
    "evaluate": "leanconv.evaluation.api",
    "FineTuned": "leanconv.train.finetune",
    "finetune": "leanconv.train.finetune",
    "load": "leanconv.storage.folder",
    "load_result": "leanconv.storage.folder",
    "bench": "leanconv.runtimes.bench.comparison",
    "export": "leanconv.runtimes.export.program",
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
