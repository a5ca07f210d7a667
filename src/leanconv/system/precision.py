"""How exactly a GPU multiplies, and how it chooses its kernels. A user may have set that in torch's newer way, by the
operation; its older way, for all at once, then refuses to be read or set where operations differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def tf32() -> bool:
    """Whether the user lets float32 convolutions be computed with ten bits of mantissa."""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return str(torch.backends.cudnn.conv.fp32_precision) == "tf32"  # type: ignore[attr-defined]


@contextmanager
def exact_products() -> Iterator[None]:
    """A GPU's convolutions in float32 proper: TF32 keeps ten bits, whose rounding a deep network multiplies too."""
    cudnn = torch.backends.cudnn
    # Where operations differ there is only the newer way; where they do not, that would make them, for whoever reads
    # the older one inside the block.
    settings, name, exact = (cudnn.conv, "fp32_precision", "ieee") if _differ() else (cudnn, "allow_tf32", False)  # type: ignore[attr-defined]
    with _set(settings, **{name: exact}):
        yield


@contextmanager
def quick_products(device: torch.device) -> Iterator[None]:
    """A GPU's float32 matrix products in TF32, ten bits of mantissa and several times faster.

    For the inner loop of the solver only: what is measured and what is inverted is computed exactly.
    """
    flags = torch.backends.cuda.matmul
    # torch refuses its older names once a program has used the newer one; torch 2.8 has only the older.
    settings = {"fp32_precision": "tf32"} if hasattr(flags, "fp32_precision") else {"allow_tf32": True}
    with _set(flags, **(settings if device.type == "cuda" else {})):
        yield


@contextmanager
def chosen_kernels(*, benchmark: bool, deterministic: bool) -> Iterator[None]:
    """Whether cuDNN tries its kernels, and takes only those that give the same bits every time."""
    with _set(torch.backends.cudnn, benchmark=benchmark, deterministic=deterministic):
        yield


def _differ() -> bool:
    try:
        bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return True
    return False


@contextmanager
def _set(settings: Any, **wanted: Any) -> Iterator[None]:
    before = {name: getattr(settings, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(settings, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)
