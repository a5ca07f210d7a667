"""The inputs a file is tried on, and how much its answers differ from the network's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree

# Batches a file is tried with, and how much larger images are where sizes are free. Odd sizes show most fixed axes;
# networks that do not take them get sizes that can be halved five times.
BATCHES = (1, 3)
LARGER = ((37, 51, 23), (32, 64, 96))
# Largest difference, relative to the largest answer.
CLOSE = 1e-4


class Failed(Exception):
    """With these free axes the file cannot be written, or answers differently; with fewer it may be right."""


@contextlib.contextmanager
def failing(sentence: str, *, writes: bool = False) -> Iterator[None]:
    """Any error inside the block becomes ``Failed`` with this sentence. In a block that ``writes``, an ``OSError`` is
    about the disk and stays as it is."""
    try:
        yield
    except Exception as error:
        if writes and isinstance(error, OSError):
            raise
        raise Failed(f"{sentence} ({error_text(error)})") from error


def trial_inputs(model: nn.Module, example: Tensor, free: dict[int, str]) -> list[Tensor]:
    """One of ``example``'s shape; with a free batch two of other batches; with free sizes also one of another height
    and width."""
    generator = torch.Generator().manual_seed(0)
    batches = BATCHES if 0 in free else (len(example),)
    inputs = [_filled(example, [batch, *example.shape[1:]], generator) for batch in batches]
    sizes = [axis for axis in free if axis > 0]
    if sizes:
        inputs.append(_of_another_size(model, example, sizes, generator))
    return inputs


@torch.no_grad()
def _of_another_size(model: nn.Module, example: Tensor, sizes: list[int], generator: torch.Generator) -> Tensor:
    for more in LARGER:
        shape = [1, *example.shape[1:]]
        for axis, extra in zip(sizes, more, strict=False):
            shape[axis] += extra
        other = _filled(example, shape, generator)
        try:
            model(other)
        except Exception as error:
            reason = error
        else:
            return other
    raise Failed(f"the network itself fails on {' x '.join(map(str, shape))} ({error_text(reason)})")


def _filled(example: Tensor, shape: list[int], generator: torch.Generator) -> Tensor:
    if not example.is_floating_point():  # such as indices, of which only the user knows which there are
        return example[torch.arange(shape[0], device=example.device) % len(example)]
    return torch.randn(shape, generator=generator).to(example)


def tensors(answer: object) -> list[Tensor]:
    """The tensors of an answer of any structure, in the order exporters keep."""
    return [leaf for leaf in _pytree.tree_leaves(answer) if isinstance(leaf, Tensor)]


@torch.no_grad()
def compare(model: nn.Module, other: Callable[[Tensor], Sequence[Tensor]], inputs: list[Tensor]) -> float:
    """The largest difference of any answer, relative to its largest value; ``Failed`` where it is above ``CLOSE``."""
    largest = 0.0
    for x in inputs:
        shape = " x ".join(map(str, x.shape))
        with failing(f"the network itself fails on {shape}"):
            expected = tensors(model(x))
        with failing(f"the file fails on {shape}"):
            answers = other(x)
        if [a.shape for a in answers] != [a.shape for a in expected]:
            raise Failed(f"the file's answers to {shape} have other shapes than the network's")
        for a, b in zip(answers, expected, strict=True):
            off = _difference(a, b)
            allowed = max(CLOSE, 4 * torch.finfo(b.dtype).eps) if b.is_floating_point() else CLOSE
            if not off <= allowed:
                raise Failed(f"the file's answers to {shape} are {off:.1e} off, above {allowed:.0e}")
            largest = max(largest, off)
    return largest


def _difference(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    if not b.numel() or torch.equal(a, b):
        return 0.0
    scale = float(b.abs().max())
    return float((a - b).abs().max()) / scale if scale else math.inf


def error_text(error: BaseException) -> str:
    """The first line of an error, short enough for a sentence."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160].rstrip('.')}" if lines else type(error).__name__
