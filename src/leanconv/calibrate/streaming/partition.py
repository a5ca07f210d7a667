"""Whether, and how, a network can be run in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import Batch, Batches, out_of_memory
from leanconv.calibrate.observe import Seen, observe
from leanconv.calibrate.probes import Probe
from leanconv.calibrate.streaming.replay import CannotCut, Script
from leanconv.calibrate.streaming.tape import Tape
from leanconv.calibrate.streaming.tape_cache import Tapes
from leanconv.errors import LeanconvError
from leanconv.network.dry_run import SAME, SAME_HALF
from leanconv.network.function_trace import map_tensors, tensors
from leanconv.system.precision import exact_products, tf32

# Numbers whose convolutions work on them in channels-last order themselves, and quicker; others they reorder.
QUICK = (torch.float32, torch.bfloat16, torch.float16)


def suits_channels_last(sample: Any, probes: Sequence[Probe], device: torch.device) -> bool:
    """Whether these are images as most are given, for a network of convolutions on a device that is quicker so. Two of
    them: the layout of one alone does not always show."""
    usual = isinstance(sample, Tensor) and sample.dim() == 4 and sample.dtype in QUICK and sample.is_contiguous()
    planes = sum(probe.site.geometry.kind == "conv2d" for probe in probes)
    return usual and len(sample) > 1 and 2 * planes > len(probes) and _quicker(device, sample.dtype)


def _quicker(device: torch.device, dtype: torch.dtype) -> bool:
    """On a GPU it is NVIDIA's tensor cores that want channels last: float16 from compute capability 7.0 on, bfloat16
    and float32, which goes there as TF32 where that is allowed, from 8.0."""
    if device.type != "cuda":
        return device.type == "cpu"
    if torch.version.hip is not None or (dtype == torch.float32 and not tf32()):
        return False
    return torch.cuda.get_device_capability(device) >= ((7, 0) if dtype == torch.float16 else (8, 0))


def tape_of(
    model: nn.Module,
    batch: Batch,
    probes: Sequence[Probe],
    device: torch.device,
    whole: dict[str, Seen] | None = None,
) -> Tape:
    """A tape of one batch through the original network; ``whole`` receives what the sites saw."""
    tapes = Tapes()
    _pass(model, batch, probes, device, whole, tapes)
    tape = tapes.get(batch)
    assert tape is not None
    return tape


def _pass(
    model: nn.Module,
    batch: Batch,
    probes: Sequence[Probe],
    device: torch.device,
    whole: dict[str, Seen] | None,
    tapes: Tapes | None = None,
) -> None:
    observe(
        model,
        Batches.of(batch),
        probes,
        positions=None,
        device=device,
        take=lambda name, first, found: None,
        whole=whole,
        tapes=tapes,
    )


@dataclass(frozen=True)
class Cutting:
    """How a network can be run. ``reason``: why it cannot be stopped between its layers, or None. ``one_by_one``:
    images do not mind which others go through with them. ``tape``: one that serves batches of any size."""

    reason: str | None
    one_by_one: bool = False
    tape: Tape | None = None
    largest: int = 0  # bytes of the largest tensor an image makes


def cutting(
    model: nn.Module,
    sample: Any,
    probes: Sequence[Probe],
    device: torch.device,
    plain: dict[str, Seen],
    channels_last: bool = False,
) -> Cutting:
    """Find out on a ``sample`` of the images, taken in parts ``channels_last`` or as they are. ``plain``: what the
    sites see in a plain run of it, or empty, to be filled.

    The network is taped on one image and replayed on all. Every site must then receive what it does in a plain run of
    the images as they are, and have the same added to it, but for rounding. If not, batches matter: it is taped on the
    sample and replayed on another.
    """
    try:
        with exact_products(), torch.no_grad():
            size = len(sample) if isinstance(sample, (list, Tensor)) else len(next(tensors(sample)))
            batch = Batch(0, size, (sample,), channels_last)
            if isinstance(sample, Tensor) and size > 1:
                found = _taped_alone(model, batch, probes, device, plain)
                if found is not None:
                    return found
            other = replace(batch, pieces=(map_tensors(_other, sample),))
            wanted: dict[str, Seen] = {}
            _pass(model, other.as_given(), probes, device, wanted)
            tape = tape_of(model, batch, probes, device)
            wrong = _wrong(model, tape, probes, other, device, wanted)
            return Cutting(None if wrong is None else _something_else(wrong))
    except CannotCut as error:
        return Cutting(str(error))
    except LeanconvError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        said = " ".join(str(error).split())[:200]
        return Cutting(f"running it again in parts failed ({type(error).__name__}: {said})")


def _other(tensor: Tensor) -> Tensor:
    """Other numbers of about the same size, in other places."""
    moved = tensor.flip(0).roll(1, -1)
    return 0.8 * moved if tensor.is_floating_point() else moved


def _something_else(layer: str) -> str:
    return f"run again in parts it gives layer {layer!r} something else"


def _taped_alone(
    model: nn.Module, sample: Batch, probes: Sequence[Probe], device: torch.device, wanted: dict[str, Seen]
) -> Cutting | None:
    """On a tape of the first image; None where what becomes of an image depends on its company. ``wanted``: of the
    sample as it was given, filled if it is empty."""
    alone: dict[str, Seen] = {}
    if not wanted:
        _pass(model, sample.as_given(), probes, device, wanted)
    tape = tape_of(model, sample.part(0, 1), probes, device, alone)
    if _different(alone, wanted, slice(0, 1)) is not None:
        return None
    try:
        if _wrong(model, tape, probes, sample, device, wanted) is None:
            return Cutting(None, True, tape, tape.largest)
    except CannotCut:
        raise
    except Exception as error:  # a size is written into an operation
        if out_of_memory(error):
            raise
    wrong = _wrong(model, tape, probes, sample.part(1, 2), device, wanted, slice(1, 2))
    if wrong is None and sample.channels_last:
        # Some views of one image's maps are none of several's: whether the network takes those is not known yet.
        together: dict[str, Seen] = {}
        _pass(model, sample, probes, device, together)
        wrong = _different(together, wanted, slice(None))
    if wrong is not None:
        return Cutting(_something_else(wrong))
    return Cutting(None, True, None, tape.largest)


def _wrong(
    model: nn.Module,
    tape: Tape,
    probes: Sequence[Probe],
    batch: Batch,
    device: torch.device,
    wanted: dict[str, Seen],
    images: slice = slice(None),
) -> str | None:
    """The first site that sees something else along the tape; ``wanted`` is of more ``images`` than the batch."""
    sites = [probe.site for probe in probes]
    script = Script(tape, sites, {site.name for site in sites})
    env, begin = script.start(batch.on(device)), 0
    found: dict[str, Seen] = {}
    for name in script.order:
        stop = script.stops[name]
        script.run(env, model, begin, stop.step)
        begin = stop.step
        # The sum goes on to take in the layer's share.
        addend = None if stop.total is None else env[stop.total].clone()
        found[name] = Seen(tuple(env[slot].clone() for slot in stop.inputs), addend)
    return _different(found, wanted, images)


def _different(found: dict[str, Seen], wanted: dict[str, Seen], images: slice) -> str | None:
    """The first site where relative differences are more than rounding. One question to the device for all."""
    names: list[str] = []
    errors, sizes, allowed = [], [], []
    for name, seen in found.items():
        whole = wanted[name]
        pairs = list(zip(seen.inputs, whole.inputs, strict=False))
        if len(pairs) < max(len(seen.inputs), len(whole.inputs)):
            return name
        for x, y in ((a, _rows(b, images)) for a, b in [*pairs, (seen.addend, whole.addend)]):
            if x is None or y is None:
                continue
            if x.shape != y.shape:
                return name
            names.append(name)
            errors.append(torch.linalg.vector_norm((x - y).float()))
            sizes.append(torch.linalg.vector_norm(y.float()))
            allowed.append(SAME.get(x.dtype, SAME_HALF))
    measured: list[list[float]] = torch.stack([torch.stack(errors), torch.stack(sizes)]).tolist()
    for number, name in enumerate(names):
        if not measured[0][number] <= allowed[number] * measured[1][number]:
            return name
    return None


def _rows(tensor: Tensor | None, images: slice) -> Tensor | None:
    return None if tensor is None else tensor[images]
