"""Whether, and how, a network can be run in parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import Batch, out_of_memory
from leanconv.calibrate.observe import Seen, see
from leanconv.calibrate.probes import Probe
from leanconv.calibrate.streaming.replay import CannotCut, Script
from leanconv.calibrate.streaming.tape import Tape, Tapes
from leanconv.errors import LeanconvError
from leanconv.network.dry_run import SAME, SAME_HALF
from leanconv.network.function_trace import map_tensors, tensors
from leanconv.system.precision import exact_products, tf32

# Dtypes that convolutions compute in channels-last order, and faster; others they reorder.
QUICK = (torch.float32, torch.bfloat16, torch.float16)


def suits_channels_last(sample: Any, probes: Sequence[Probe], device: torch.device) -> bool:
    """Whether these are images of the usual layout, for a network of convolutions, on a device that is faster with
    channels last. At least two images: the layout of a single one does not always show."""
    usual = isinstance(sample, Tensor) and sample.dim() == 4 and sample.dtype in QUICK and sample.is_contiguous()
    planes = sum(probe.site.geometry.kind == "conv2d" for probe in probes)
    return usual and len(sample) > 1 and 2 * planes > len(probes) and _faster(device, sample.dtype)


def _faster(device: torch.device, dtype: torch.dtype) -> bool:
    """On a GPU it is NVIDIA's tensor cores that need channels last: float16 from compute capability 7.0 on, bfloat16
    and float32 (as TF32, where that is allowed) from 8.0."""
    if device.type != "cuda":
        return device.type == "cpu"
    if torch.version.hip is not None or (dtype == torch.float32 and not tf32()):
        return False
    return torch.cuda.get_device_capability(device) >= ((7, 0) if dtype == torch.float16 else (8, 0))


@dataclass(frozen=True)
class Cutting:
    """How a network can be run. ``reason``: why it cannot be stopped between its layers, or None. ``one_by_one``: the
    result for an image does not depend on the other images of its batch. ``tape``: one that serves batches of any
    size."""

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
    """Find out on a ``sample`` of the images, which the parts get ``channels_last`` or as they are. ``plain``: what the
    sites see in a plain run of it, or empty, to be filled.

    The network is taped on one image and replayed on all. Every site must then receive what it does in a plain run of
    the images as they are, and have the same added to it, but for rounding. If not, batches matter: it is taped on the
    sample and replayed on another.
    """
    subject = _Subject(model, probes, device)
    try:
        with exact_products(), torch.no_grad():
            size = len(sample) if isinstance(sample, (list, Tensor)) else len(next(tensors(sample)))
            batch = Batch(0, size, (sample,), channels_last)
            result = subject.taped_alone(batch, plain) if isinstance(sample, Tensor) and size > 1 else None
            return result or subject.taped_together(batch)
    except CannotCut as error:
        return Cutting(str(error))
    except LeanconvError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        said = " ".join(str(error).split())[:200]
        return Cutting(f"running it again in parts failed ({type(error).__name__}: {said})")


@dataclass(frozen=True)
class _Subject:
    """A network that is tried, and probes of its sites."""

    model: nn.Module
    probes: Sequence[Probe]
    device: torch.device

    def taped_alone(self, sample: Batch, plain: dict[str, Seen]) -> Cutting | None:
        """With a tape of the first image; None where the result for an image depends on the others. ``plain``: as
        above."""
        if not plain:
            plain.update(self.see(sample.as_given()))
        seen, tape = self.see_and_tape(sample.part(0, 1))
        if _different(seen, plain, slice(0, 1)) is not None:
            return None
        try:
            if self.wrong(tape, sample, plain) is None:
                return Cutting(None, True, tape, tape.largest)
        except CannotCut:
            raise
        except Exception as error:  # a size is written into an operation
            if out_of_memory(error):
                raise
        wrong = self.wrong(tape, sample.part(1, 2), plain, slice(1, 2))
        if wrong is None and sample.channels_last:
            # Some views of one image's maps cannot be made of several's: this tells whether the network takes those.
            wrong = _different(self.see(sample), plain)
        return Cutting(_something_else(wrong), wrong is None, None, tape.largest)

    def taped_together(self, sample: Batch) -> Cutting:
        """With a tape of the whole sample, replayed on other images."""
        other = replace(sample, pieces=(map_tensors(_altered, sample.pieces[0]),))
        plain = self.see(other.as_given())
        _, tape = self.see_and_tape(sample)
        return Cutting(_something_else(self.wrong(tape, other, plain)))

    def see(self, batch: Batch) -> dict[str, Seen]:
        return see(self.model, batch, self.probes, self.device)

    def see_and_tape(self, batch: Batch) -> tuple[dict[str, Seen], Tape]:
        tapes = Tapes()
        seen, tape = see(self.model, batch, self.probes, self.device, tapes=tapes), tapes.get(batch)
        assert tape is not None
        return seen, tape

    def wrong(self, tape: Tape, batch: Batch, plain: dict[str, Seen], images: slice = slice(None)) -> str | None:
        """The first site that sees something else along the tape than in the plain run, of which the batch is these
        ``images``."""
        sites = [probe.site for probe in self.probes]
        script = Script(tape, sites, {site.name for site in sites})
        env, begin = script.start(batch.on(self.device)), 0
        seen: dict[str, Seen] = {}
        for name in script.order:
            stop = script.stops[name]
            script.run(env, self.model, begin, stop.step)
            begin = stop.step
            # The layer's output will be added to the sum in place.
            addend = None if stop.total is None else env[stop.total].clone()
            seen[name] = Seen(tuple(env[slot].clone() for slot in stop.inputs), addend)
        return _different(seen, plain, images)


def _altered(tensor: Tensor) -> Tensor:
    """Other values of about the same size, in other places."""
    moved = tensor.flip(0).roll(1, -1)
    return 0.8 * moved if tensor.is_floating_point() else moved


def _something_else(layer: str | None) -> str | None:
    return None if layer is None else f"run again in parts it gives layer {layer!r} something else"


def _different(seen: dict[str, Seen], plain: dict[str, Seen], images: slice = slice(None)) -> str | None:
    """The first site where relative differences are more than rounding. All are fetched from the device at once."""
    names: list[str] = []
    errors, sizes, allowed = [], [], []
    for name, ours in seen.items():
        theirs = plain[name]
        if len(ours.inputs) != len(theirs.inputs):
            return name
        for x, whole in zip((*ours.inputs, ours.addend), (*theirs.inputs, theirs.addend), strict=True):
            if x is None or whole is None:
                continue
            y = whole[images]
            if x.shape != y.shape:
                return name
            names.append(name)
            errors.append(torch.linalg.vector_norm((x - y).float()))
            sizes.append(torch.linalg.vector_norm(y.float()))
            allowed.append(SAME.get(x.dtype, SAME_HALF))
    measured: list[list[float]] = torch.stack([torch.stack(errors), torch.stack(sizes)]).tolist()
    # Not >, or NaN would pass.
    wrong = (
        name for name, error, size, share in zip(names, *measured, allowed, strict=True) if not error <= share * size
    )
    return next(wrong, None)
