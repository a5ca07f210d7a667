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

    The network is taped on one image and replayed on all. Every site must then respond as in a plain run, and have the
    same added to it, but for rounding. If not, batches matter: it is taped on the sample and replayed on another, made
    of the same numbers in other places.
    """
    positions = Positions(per_image=LOOK, images=2, seed=0, device=device)
    try:
        with exact_products(), torch.no_grad():
            if isinstance(sample, Tensor) and len(sample) > 1:
                found = _taped_alone(model, sample, probes, positions)
                if found is not None:
                    return found
            other = map_tensors(lambda tensor: tensor.flip(0).roll(1, -1), sample)
            size = len(sample) if isinstance(sample, (list, Tensor)) else len(next(tensors(sample)))
            tape = tape_of(model, Batch(0, size, (sample,)), probes, device)
            wanted = _seen(model, Batch(0, size, (other,)), probes, positions)
            walk = _walk(model, Batch(0, size, (sample,)), tape, probes, positions, any_size=False)
            wrong = _difference(walk(Batch(0, size, (other,))), wanted)
            return Cutting(None if wrong is None else f"run again in parts it gives layer {wrong!r} something else")
    except CannotCut as error:
        return Cutting(str(error))
    except LeanconvError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        said = " ".join(str(error).split())[:200]
        return Cutting(f"running it again in parts failed ({type(error).__name__}: {said})")


def _taped_alone(model: nn.Module, sample: Tensor, probes: Sequence[Probe], positions: Positions) -> Cutting | None:
    """On a tape of the first image; None where an image's responses depend on its company."""
    whole, first, last = (Batch(b, n, (sample[b : b + n],)) for b, n in ((0, 2), (0, 1), (1, 1)))
    wanted = _seen(model, whole, probes, positions)
    alone: dict[str, Responses] = {}
    tapes = Tapes()
    observe(
        model,
        Batches.of(first),
        probes,
        positions=positions,
        device=positions.device,
        take=lambda name, _, found: alone.__setitem__(name, found),
        tapes=tapes,
    )
    tape = tapes.get(first)
    assert tape is not None
    if _difference(alone, wanted) is not None:
        return None
    try:
        walk = _walk(model, first, tape, probes, positions, any_size=True)
        if _difference(walk(whole), wanted) is None:
            return Cutting(None, True, tape, tape.largest)
    except CannotCut:
        raise
    except Exception as error:  # a size is written into an operation
        if out_of_memory(error):
            raise
    walk = _walk(model, first, tape, probes, positions, any_size=False)
    wrong = _difference(walk(last), {name: _second(found) for name, found in wanted.items()})
    if wrong is not None:
        return Cutting(f"run again in parts it gives layer {wrong!r} something else")
    return Cutting(None, True, None, tape.largest)


def _walk(
    model: nn.Module, batch: Batch, tape: Tape, probes: Sequence[Probe], positions: Positions, *, any_size: bool
) -> Walk:
    tapes = Tapes(tape, batch) if any_size else Tapes()
    tapes.add(batch, tape)
    return Walk(model, positions, Inputs(Memory(positions.device, 1)), tapes, probes)


def _seen(model: nn.Module, batch: Batch, probes: Sequence[Probe], positions: Positions) -> dict[str, Responses]:
    """Responses in a plain run."""
    found: dict[str, Responses] = {}
    observe(
        model,
        Batches.of(batch),
        probes,
        positions=positions,
        device=positions.device,
        take=lambda name, _, responses: found.__setitem__(name, responses),
    )
    return found


def _second(found: Responses) -> Responses:
    """Those of the second of two images."""
    half = len(found.y) // 2
    return Responses(found.y[half:], None if found.addend is None else found.addend[half:])


def _difference(found: dict[str, Responses], wanted: dict[str, Responses]) -> str | None:
    """The first site that responds otherwise than ``wanted``, or has something else added; of the first images."""
    for name, seen in found.items():
        for x, y in ((seen.y, wanted[name].y), (seen.addend, wanted[name].addend)):
            if x is None or y is None:
                continue
            if len(x) > len(y) or difference(x, y[: len(x)]) > SAME.get(x.dtype, SAME_HALF):
                return name
    return None
