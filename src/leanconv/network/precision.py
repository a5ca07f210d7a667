"""How exactly a GPU multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_products() -> Iterator[None]:
    """A GPU's convolutions in float32 proper: TF32 keeps ten bits, whose rounding a deep network multiplies too."""
    now = torch.backends.cudnn
    with now.flags(enabled=now.enabled, benchmark=now.benchmark, deterministic=now.deterministic, allow_tf32=False):
        yield
