"""Modules without initial values, for weights that are about to be set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@contextmanager
def blank() -> Iterator[None]:
    """Modules made inside the block have shapes and no values. Drawing initial ones takes most of the time of building,
    and random numbers from the user."""
    with torch.device("meta"), _NoInitialisation():
        yield


class _NoInitialisation(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init" or func in (Tensor.normal_, Tensor.uniform_):
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))
