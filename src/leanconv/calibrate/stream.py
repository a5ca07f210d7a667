"""The accelerated stream: responses of each site, in turn, to what the sites before it have become.

Two ways. *Cut*: the stream stops at every site and goes on from there, so that all sites together cost one pass of
the accelerated network. *Rerun*: every site costs a pass up to it; for networks that cannot be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import Batch, Batches, out_of_memory, to_device
from leanconv.calibrate.memory import Memory, Packed, Place
from leanconv.calibrate.observe import chosen_at, observe, signature
from leanconv.calibrate.patches import Positions, outputs_at
from leanconv.calibrate.probe import Probe, Responses
from leanconv.calibrate.samples import Piece
from leanconv.calibrate.script import CannotCut, Env, Script
from leanconv.errors import LeanconvError
from leanconv.network.precision import exact_products
from leanconv.network.recording import map_tensors, tensors
from leanconv.network.sites import Site
from leanconv.network.tape import Tape
from leanconv.network.trial import SAME, SAME_HALF, difference


class Stream(Protocol):
    order: list[str]  # the sites, as they must be asked for

    def pieces(self, probe: Probe, step: Callable[[], None]) -> list[Piece]:
        """Responses of ``probe``, batch by batch, in the network as it stands."""
        ...


@dataclass
class Rerun:
    model: nn.Module
    batches: Batches
    positions: Positions
    device: torch.device
    order: list[str]

    def pieces(self, probe: Probe, step: Callable[[], None]) -> list[Piece]:
        found: list[Piece] = []
        observe(
            self.model,
            self.batches,
            [probe],
            positions=self.positions,
            device=self.device,
            take=lambda _, first, responses: found.append((first, responses)),
            step=step,
        )
        return found


@dataclass
class _Frontier:
    """Where a batch has stopped, and what it needs to go on; ``env`` or ``packed``, neither before the first step."""

    step: int = 0
    env: Env | None = None
    packed: Packed | None = None
    place: Place | None = None
    size: int = 0


class Cut:
    """The stream along ``tapes``, one for each kind of batch, with the frontiers in ``memory``.

    Where a frontier finds no room the batch keeps the last one that did, at worst its images, and goes on from there
    again next time.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        positions: Positions,
        memory: Memory,
        tapes: dict[Any, Tape],
        sites: Iterable[Site],
        tape: Callable[[Batch], Tape],
    ):
        """``tape`` makes the tape of a kind of batch that is not among ``tapes``."""
        self._model, self._batches, self._positions, self._memory = model, batches, positions, memory
        self._sites, self._tape = list(sites), tape
        self._scripts = {kind: Script(tape, self._sites) for kind, tape in tapes.items()}
        for batch in batches:
            self._script(batch)
        orders = [script.order for script in self._scripts.values()]
        if any(order != orders[0] for order in orders):
            raise CannotCut("its layers run in another order for some batches")
        self.order = orders[0]
        self._frontiers: dict[tuple[int, int], _Frontier] = {}

    def pieces(self, probe: Probe, step: Callable[[], None]) -> list[Piece]:
        found: list[Piece] = []

        def work(batch: Batch) -> None:
            try:
                found.append((batch.first, self._at(probe, batch)))
            except Exception as error:
                if not out_of_memory(error):
                    raise
                # Once more from the images, with nothing else on the device.
                self._evict()
                found.append((batch.first, self._at(probe, batch)))
            step()

        self._batches.each(work)
        return found

    def _at(self, probe: Probe, batch: Batch) -> Responses:
        name, device = probe.site.name, self._memory.device
        script, key = self._script(batch), (batch.first, batch.size)
        stop = script.stops[name]
        frontier = self._frontiers.setdefault(key, _Frontier())
        begin, size = frontier.step, script.frontier_bytes(name)
        place = self._exchange(frontier, size)
        if frontier.packed is not None:
            env = frontier.packed.unpacked(device)
        elif frontier.env is not None:
            env = frontier.env if place is not None else Packed.of(frontier.env).unpacked(device)
        else:
            env = script.start(to_device(batch.inputs, device))
        if place is not None:
            self._frontiers[key] = _Frontier()  # until the new one is whole
        script.run(env, self._model, begin, stop.step)
        found = self._responses(probe, batch, env[stop.input], None if stop.total is None else env[stop.total])
        if place is not None:
            self._frontiers[key] = self._kept(stop.step, env, place, size)
        return found

    def _script(self, batch: Batch) -> Script:
        kind = signature(batch.inputs)
        if kind not in self._scripts:
            self._scripts[kind] = Script(self._tape(batch), self._sites)
        return self._scripts[kind]

    def _exchange(self, frontier: _Frontier, size: int) -> Place | None:
        """Room for the new frontier instead of the old one; None: keep the old one."""
        if frontier.place is not None:
            self._memory.release(frontier.place, frontier.size)
        place = self._memory.reserve(size)
        if place is None and frontier.place is not None:
            self._memory.take_back(frontier.place, frontier.size)
        return place

    def _kept(self, step: int, env: Env, place: Place, size: int) -> _Frontier:
        fastest: Place = "device" if self._memory.device.type == "cuda" else "host"
        if place == fastest:
            return _Frontier(step, env, None, place, size)
        packed = Packed.of(env)
        if place == "disk":
            assert self._memory.folder is not None
            packed = packed.written(self._memory.folder)
        else:
            packed = packed.moved(torch.device("cpu"))
        return _Frontier(step, None, packed, place, size)

    def _responses(self, probe: Probe, batch: Batch, x: Tensor, total: Tensor | None) -> Responses:
        chosen = chosen_at(probe, x, batch, self._positions)
        y = probe.from_input(x, chosen)
        if total is None:
            return Responses(y)
        return Responses(y, outputs_at(total, probe.site.geometry.kind, chosen).to(y.dtype))

    def _evict(self) -> None:
        """Forget what is kept on the device."""
        self._memory.shrink()
        for key, frontier in self._frontiers.items():
            if frontier.place == "device":
                self._frontiers[key] = _Frontier()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def tape_of(model: nn.Module, batch: Batch, probes: Iterable[Probe], device: torch.device) -> Tape:
    """A tape of one batch through the original network."""
    tapes: dict[Any, Tape] = {}
    observe(
        model,
        Batches(iter([batch.inputs]), batch.size),
        list(probes),
        positions=Positions(per_image=1, seed=0, device=device),
        device=device,
        take=lambda name, first, responses: None,
        tapes=tapes,
    )
    (tape,) = tapes.values()
    return tape


@dataclass(frozen=True)
class Cutting:
    """How a network can be run: ``reason`` why it cannot be stopped between its layers, or None; whether images may
    go through it one by one; and the largest tensor, in bytes, one image makes in it."""

    reason: str | None
    one_by_one: bool = False
    largest: int = 0


def cutting(model: nn.Module, sample: Any, probes: Sequence[Probe], device: torch.device) -> Cutting:
    """Find out on a ``sample`` of the images.

    The network is taped on one image and replayed on another, made of the same numbers in other places. Every site
    must then receive what it receives in a plain run of a batch, but for rounding. If not, batches matter: once more
    with the whole sample.
    """
    if isinstance(sample, Tensor) and len(sample) > 1:
        found = _replayed(model, sample, 1, probes, device)
        if found.reason is None:
            return found
    size = next(tensors(sample)).shape[0] if not isinstance(sample, list) else len(sample)
    return _replayed(model, sample, size, probes, device)


def _replayed(model: nn.Module, sample: Any, size: int, probes: Sequence[Probe], device: torch.device) -> Cutting:
    sites = [probe.site for probe in probes]
    other = map_tensors(lambda tensor: tensor.flip(0).roll(1, -1), sample)
    plain = isinstance(sample, Tensor)
    first, others = (sample[:size], other[:size]) if plain else (sample, other)
    try:
        with exact_products(), torch.no_grad():
            tape = tape_of(model, Batch(0, size, first), probes, device)
            script = Script(tape, sites)
            wanted = _inputs_of(model, to_device(other, device), sites)
            env, begin = script.start(to_device(others, device)), 0
            for name in script.order:
                stop = script.stops[name]
                script.run(env, model, begin, stop.step)
                begin = stop.step
                x, y = env[stop.input], wanted[name]
                y = y[: len(x)] if plain else y
                if x.shape != y.shape or difference(x, y) > SAME.get(x.dtype, SAME_HALF):
                    return Cutting(f"run again in parts it gives layer {name!r} something else")
    except CannotCut as error:
        return Cutting(str(error))
    except LeanconvError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        said = " ".join(str(error).split())[:200]
        return Cutting(f"running it again in parts failed ({type(error).__name__}: {said})")
    alone = plain and size == 1
    return Cutting(None, alone, max(form.bytes for form in tape.forms) if alone else 0)


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
