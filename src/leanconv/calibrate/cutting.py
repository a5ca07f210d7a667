"""Whether, and how, a network can be run in parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import Batch, Batches, out_of_memory, to_device
from leanconv.calibrate.observe import observe
from leanconv.calibrate.probe import Probe
from leanconv.calibrate.script import CannotCut, Script
from leanconv.calibrate.tapes import Tapes
from leanconv.errors import LeanconvError
from leanconv.network.precision import exact_products
from leanconv.network.recording import map_tensors, tensors
from leanconv.network.sites import Site
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
    sites = [probe.site for probe in probes]
    other = map_tensors(lambda tensor: tensor.flip(0).roll(1, -1), sample)
    fewer = isinstance(sample, Tensor) and size < len(sample)
    try:
        with exact_products(), torch.no_grad():
            tape = tape_of(model, Batch(0, size, (sample[:size] if fewer else sample,)), probes, device)
            script = Script(tape, sites)
            wanted = _inputs_of(model, to_device(other, device), sites)
            wrong = _difference(script, model, to_device(other[:size] if fewer else other, device), wanted)
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
            serves = _difference(script, model, to_device(other, device), wanted) is None
    except Exception as error:  # a size is written into an operation
        if out_of_memory(error):
            raise
        serves = False
    return Cutting(None, True, tape if serves else None, tape.largest)


def _difference(script: Script, model: nn.Module, inputs: Any, wanted: dict[str, Tensor]) -> str | None:
    """The first site that receives something else than ``wanted``, as far as there are rows of it."""
    env, begin = script.start(inputs), 0
    for name in script.order:
        stop = script.stops[name]
        script.run(env, model, begin, stop.step)
        begin = stop.step
        x, y = env[stop.input], wanted[name]
        if len(x) > len(y) or x.shape[1:] != y.shape[1:]:
            return name
        if difference(x, y[: len(x)]) > SAME.get(x.dtype, SAME_HALF):
            return name
    return None


def _inputs_of(model: nn.Module, batch: Any, sites: Iterable[Site]) -> dict[str, Tensor]:
    """What every site's layer receives in a plain run."""
    found: dict[str, Tensor] = {}
    handles = []
    for site in sites:

        def before(module: nn.Module, args: Any, kwargs: Any, name: str = site.name) -> None:
            found[name] = next(tensors((args, kwargs))).clone()

        handles.append(model.get_submodule(site.name).register_forward_pre_hook(before, with_kwargs=True))
    try:
        model(batch)
    finally:
        for handle in handles:
            handle.remove()
    return found
