"""How exactly a device multiplies, and how a GPU chooses its kernels. torch has an older setting for all operations and
newer ones by operation. Where a user made operations differ, the older setting can be neither read nor set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def tf32() -> bool:
    """Whether float32 convolutions may be computed with ten bits of mantissa."""
    cudnn = torch.backends.cudnn
    if _set_by_operation():
        return str(cudnn.conv.fp32_precision) == "tf32"  # type: ignore[attr-defined]
    return bool(cudnn.allow_tf32)


@contextmanager
def exact_products() -> Iterator[None]:
    """A GPU's convolutions in full float32. TF32 keeps ten bits, and a deep network multiplies that rounding."""
    cudnn = torch.backends.cudnn
    # The newer way only where it is in use: it would make the operations differ, and code inside the block that reads
    # the older setting would fail.
    by_operation = _set_by_operation()
    with _set(cudnn.conv, fp32_precision="ieee") if by_operation else _set(cudnn, allow_tf32=False):  # type: ignore[attr-defined]
        yield


@contextmanager
def quick_products(device: torch.device) -> Iterator[None]:
    """A GPU's float32 matrix products in TF32, ten bits of mantissa and several times faster.

    For the inner loop of the solver only: what is measured or inverted is computed exactly.
    """
    flags = torch.backends.cuda.matmul
    # torch refuses its older names once a program has used the newer one; torch 2.8 has only the older.
    settings = {"fp32_precision": "tf32"} if hasattr(flags, "fp32_precision") else {"allow_tf32": True}
    with _set(flags, **(settings if device.type == "cuda" else {})):
        yield


def multiplies_bfloat16(tensor: Tensor) -> bool:
    """Whether this is a float32 tensor on a CPU with instructions for bfloat16 products: five times faster."""
    if tensor.device.type != "cpu" or tensor.dtype != torch.float32:
        return False
    asked = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(ask is not None and ask() for ask in asked)


@contextmanager
def chosen_kernels(*, benchmark: bool, deterministic: bool) -> Iterator[None]:
    """Whether cuDNN tries its kernels, and takes only those that give the same bits every time."""
    with _set(torch.backends.cudnn, benchmark=benchmark, deterministic=deterministic):
        yield


def _set_by_operation() -> bool:
    try:
        bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return True
    return False


@contextmanager
def _set(settings: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(settings, name) for name in values}
    try:
        for name, value in values.items():
            setattr(settings, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(settings, name, value)
