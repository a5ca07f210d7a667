"""How far an accelerated network is from the original on a few images: without labels, and with intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import Batch
from leanconv.evaluation.classification import judging
from leanconv.evaluation.paired import kl_divergences
from leanconv.network.function_trace import tensors
from leanconv.result import HeldOut
from leanconv.system.random_state import untouched_rng

# The largest relative error and KL that are reported, also for a network that returns NaN.
FARTHEST = 1e3
# Half the width of a 95 % interval, in standard deviations.
DEVIATIONS = 1.96
# Where a network that returns a dictionary has its class scores (transformers, torchvision).
SCORES = ("logits", "out")


@dataclass
class Differences:
    """What one process has seen. ``change`` and ``length``: of every tensor, ||out - out'|| and ||out||, summed over
    the images. ``same`` and ``kl``: of every image, where the outputs are class scores; ``pixels``: of maps."""

    change: list[float] = field(default_factory=list)
    length: list[float] = field(default_factory=list)
    same: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    images: int = 0
    pixels: bool = False

    def add(self, output: Any, other: Any, size: int) -> None:
        """The outputs of both networks for a batch of ``size`` images."""
        pairs = list(zip(_floating(output), _floating(other), strict=True))
        if not self.images:
            self.change, self.length = [0.0] * len(pairs), [0.0] * len(pairs)
        # Some networks return more tensors for some batches; of those the first ones count.
        for index, (a, b) in enumerate(pairs[: len(self.change)]):
            self.change[index] += _lengths(a - b, size)
            self.length[index] += _lengths(a, size)
        self.images += size
        scores, others = _class_scores(output, size), _class_scores(other, size)
        if scores is not None and others is not None:
            self.pixels = scores.dim() > 2
            self.same += (scores.argmax(1) == others.argmax(1)).double().reshape(size, -1).mean(1).tolist()
            self.kl += kl_divergences(others, scores).nan_to_num(nan=FARTHEST, posinf=FARTHEST).tolist()


def differences(
    original: nn.Module, accelerated: nn.Module, batches: Iterable[Batch], device: torch.device, seed: int
) -> Differences:
    """Both networks, which are on ``device``, run on the same images. ``seed``: for what they draw, if they do."""
    found = Differences()
    with judging(original, accelerated), _same_buffers(original), _same_buffers(accelerated):
        for batch in batches:
            outputs = []
            for network in (original, accelerated):
                with untouched_rng(seed):
                    outputs.append(network(batch.on(device)))
            found.add(outputs[0], outputs[1], batch.size)
    return found


def together(everybody: list[Differences], *, seen: bool) -> HeldOut | None:
    """What all processes have seen; None where the outputs have nothing that can be compared."""
    everybody = [one for one in everybody if one.images]
    images, relative = sum(one.images for one in everybody), _relative(everybody)
    if relative is None:
        return None
    same = [value for one in everybody for value in one.same]
    kl = [value for one in everybody for value in one.kl]
    if len(same) < images:  # no class scores
        return HeldOut(images, relative, seen)
    pixels = any(one.pixels for one in everybody)
    return HeldOut(
        images,
        relative,
        seen,
        agreement=sum(same) / images,
        agreement_interval=normal(same, most=1.0) if pixels else wilson(sum(same), images),
        kl=sum(kl) / images,
        kl_interval=normal(kl),
        pixels=pixels,
    )


def wilson(hits: float, count: int) -> tuple[float, float]:
    """95 % interval of a share by Wilson's score: it stays between 0 and 1, and is right for few images too."""
    z, p = DEVIATIONS, hits / count
    middle, width = p + z * z / (2 * count), z * math.sqrt(p * (1 - p) / count + (z / (2 * count)) ** 2)
    return max(0.0, (middle - width) / (1 + z * z / count)), min(1.0, (middle + width) / (1 + z * z / count))


def normal(values: list[float], most: float = math.inf) -> tuple[float, float] | None:
    """95 % interval of a mean that is never negative, as if means were normal; None of one value."""
    if len(values) < 2:
        return None
    several = torch.tensor(values, dtype=torch.float64)
    mean, width = float(several.mean()), DEVIATIONS * float(several.std()) / math.sqrt(len(values))
    return max(0.0, mean - width), min(most, mean + width)


def _relative(everybody: list[Differences]) -> float | None:
    """Mean over the tensors; None where the original's are all 0, not finite, or no floating-point numbers."""
    changes = [sum(parts) for parts in zip(*(one.change for one in everybody), strict=False)]
    lengths = [sum(parts) for parts in zip(*(one.length for one in everybody), strict=False)]
    shares = [change / length for change, length in zip(changes, lengths, strict=True) if length > 0]
    if not shares or not math.isfinite(sum(lengths)):
        return None
    mean = sum(shares) / len(shares)
    return min(mean, FARTHEST) if mean == mean else FARTHEST


def _floating(output: Any) -> list[Tensor]:
    found = [tensor for tensor in tensors(output) if tensor.is_floating_point()]
    return [tensor if tensor.dtype == torch.float64 else tensor.float() for tensor in found]


def _lengths(output: Tensor, size: int) -> float:
    """The sum over the images; the length of it all where the first dimension is not that of the images."""
    by_image = output.dim() > 0 and len(output) == size
    return float(output.reshape(size if by_image else 1, -1).norm(dim=1).sum(dtype=torch.float64))


def _class_scores(output: Any, size: int) -> Tensor | None:
    """The only tensor of ``output``, or that under a name of class scores, if it is images x classes (x height x
    width)."""
    named = [output[name] for name in SCORES if name in output] if isinstance(output, dict) else []
    found = _floating(named[:1] or output)
    if len(found) != 1 or found[0].dim() not in (2, 4) or len(found[0]) != size or found[0].shape[1] < 2:
        return None
    return found[0]


@contextmanager
def _same_buffers(network: nn.Module) -> Iterator[None]:
    """Running a network may change some of its buffers."""
    before = {name: buffer.clone() for name, buffer in network.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in network.named_buffers():
                if name in before and buffer.shape == before[name].shape:
                    buffer.copy_(before[name])
