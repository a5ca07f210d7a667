"""Whether, and how, a network can be run in parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import Batch, Batches, out_of_memory
from leanconv.calibrate.memory import Memory
from leanconv.calibrate.observe import observe
from leanconv.calibrate.patches import Positions
from leanconv.calibrate.probe import Probe, Responses
from leanconv.calibrate.script import CannotCut
from leanconv.calibrate.tapes import Tapes
from leanconv.calibrate.walk import Inputs, Walk
from leanconv.errors import LeanconvError
from leanconv.network.precision import exact_products
from leanconv.network.recording import map_tensors, tensors
from leanconv.network.tape import Tape
from leanconv.network.trial import SAME, SAME_HALF, difference


def tape_of(model: nn.Module, batch: Batch, probes: Iterable[Probe], device: torch.device) -> Tape:
    """A tape of one batch through the original network."""
    tapes = Tapes()
    observe(
        model,
        Batches.of(batch),
        list(probes),
        positions=None,
        device=device,
        take=lambda name, first, responses: None,
        tapes=tapes,
    )
    tape = tapes.get(batch)
    assert tape is not None
    return tape


# Positions an image that are compared.
LOOK = 64


@dataclass(frozen=True)
class Cutting:
    """How a network can be run. ``reason``: why it cannot be stopped between its layers, or None. ``one_by_one``:
    images do not mind which others go through with them. ``tape``: one that serves batches of any size."""

    reason: str | None
    one_by_one: bool = False
    tape: Tape | None = None
    largest: int = 0  # bytes of the largest tensor an image makes


def cutting(model: nn.Module, sample: Any, probes: Sequence[Probe], device: torch.device) -> Cutting:
    """Find out on a ``sample`` of the images.

    The network is taped on one image and replayed on others, made of the same numbers in other places. Every site
    must then receive what it receives in a plain run of a batch, but for rounding. If not, batches matter: once more
    with the whole sample.
    """
    if not isinstance(sample, Tensor):
        size = len(sample) if isinstance(sample, list) else len(next(tensors(sample)))
        return _replayed(model, sample, size, probes, device)
    if len(sample) > 1:
        found = _replayed(model, sample, 1, probes, device)
        if found.reason is None:
            return found
    return _replayed(model, sample, len(sample), probes, device)


def _replayed(model: nn.Module, sample: Any, size: int, probes: Sequence[Probe], device: torch.device) -> Cutting:
    """Taped on the first ``size`` images."""
    other = map_tensors(lambda tensor: tensor.flip(0).roll(1, -1), sample)
    fewer = isinstance(sample, Tensor) and size < len(sample)
    images = len(sample) if isinstance(sample, Tensor) else size
    positions = Positions(per_image=LOOK, images=images, seed=0, device=device)
    wanted: dict[str, Responses] = {}
    try:
        with exact_products(), torch.no_grad():
            batch = Batch(0, size, (sample[:size] if fewer else sample,))
            tape = tape_of(model, batch, probes, device)
            tapes = Tapes(tape, batch) if fewer else Tapes()
            tapes.add(batch, tape)
            walk = Walk(model, positions, Inputs(Memory(device, 1)), tapes, probes)
            whole = Batch(0, images, (other,))
            observe(
                model,
                Batches.of(whole),
                probes,
                positions=positions,
                device=device,
                take=lambda name, first, found: wanted.__setitem__(name, found),
            )
            wrong = _difference(walk(Batch(0, size, (other[:size],)) if fewer else whole), wanted)
    except CannotCut as error:
        return Cutting(str(error))
    except LeanconvError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        said = " ".join(str(error).split())[:200]
        return Cutting(f"running it again in parts failed ({type(error).__name__}: {said})")
    if wrong is not None:
        return Cutting(f"run again in parts it gives layer {wrong!r} something else")
    if not fewer:
        return Cutting(None)
    try:
        with exact_products(), torch.no_grad():
            serves = _difference(walk(whole), wanted) is None
    except Exception as error:  # a size is written into an operation
        if out_of_memory(error):
            raise
        serves = False
    return Cutting(None, True, tape if serves else None, tape.largest)


def _difference(found: dict[str, Responses], wanted: dict[str, Responses]) -> str | None:
    """The first site that responds otherwise than ``wanted``, or has something else added; of the first images."""
    for name, seen in found.items():
        for x, y in ((seen.y, wanted[name].y), (seen.addend, wanted[name].addend)):
            if x is None or y is None:
                continue
            if len(x) > len(y) or difference(x, y[: len(x)]) > SAME.get(x.dtype, SAME_HALF):
                return name
    return None
