"""Responses of each site, in turn: of the original network, and of the accelerated one as it stands.

The accelerated network is run in one of two ways. *Cut*: the pass stops at every site and goes on from there, so that
all sites together cost one pass. *Rerun*: every site costs a pass up to it; for networks that cannot be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from leanconv.calibrate.batches import Batch, Batches, log, out_of_memory
from leanconv.calibrate.memory import Memory, Packed, Place
from leanconv.calibrate.observe import chosen_at, observe
from leanconv.calibrate.positions import Positions
from leanconv.calibrate.prefetch import Inputs
from leanconv.calibrate.probes import Probe, Responses
from leanconv.calibrate.samples import Piece
from leanconv.calibrate.streaming.replay import CannotCut, Env, Script, Scripts, Stop
from leanconv.system.process_memory import give_back

# On a CPU, after frontiers of so many bytes, memory they have left scattered is given back to the system.
TIDY = 256 << 20


@dataclass(frozen=True)
class Source:
    """What all passes read and where they may keep things."""

    batches: Batches
    positions: Positions
    memory: Memory
    inputs: Inputs


class Walk:
    """The original along its tapes: what a pass with hooks would see, without the hooks, for batches of a kind that
    has been taped. A GPU waits for Python otherwise."""

    def __init__(self, model: nn.Module, source: Source, scripts: Scripts, probes: Sequence[Probe]):
        self._model, self._source, self._scripts = model, source, scripts
        self._probes = {probe.site.name: probe for probe in probes}

    def knows(self, batch: Batch) -> bool:
        """Whether there is a tape that serves this batch."""
        try:
            return self._scripts.get(batch) is not None
        except CannotCut:
            return False

    def __call__(self, batch: Batch) -> Iterator[tuple[str, Responses]]:
        """Responses of every probe, one by one: memory they leave then serves the next."""
        script, positions = self._scripts.of(batch), self._source.positions
        env, begin = script.start(self._source.inputs.get(batch)), 0
        for name in script.order:
            probe, stop = self._probes[name], script.stops[name]
            script.run(env, self._model, begin, stop.step)
            begin = stop.step
            if not probe.own_output or probe.site.calls > 1:
                yield name, _responses_at(probe, batch, env, stop, positions)
                continue
            x = env[stop.inputs[0]]
            chosen = chosen_at(probe, x, batch, positions)
            addend = None if stop.total is None else probe.outputs(env[stop.total], chosen)
            output = script.run_layer(env, self._model, name)
            if output is None:
                y = probe.from_input(x, chosen)
            else:
                y, begin = probe.outputs(output, chosen), stop.step + 1
            yield name, Responses(y, addend)


def _responses_at(probe: Probe, batch: Batch, env: Env, stop: Stop, positions: Positions) -> Responses:
    """Of a site where a script has stopped."""
    parts = []
    addend = None
    for slot in stop.inputs:
        chosen = chosen_at(probe, env[slot], batch, positions)
        addend = None if stop.total is None else probe.outputs(env[stop.total], chosen)
        parts.append(probe.from_input(env[slot], chosen))
    return Responses(torch.cat(parts) if len(parts) > 1 else parts[0], addend)


class Pass(Protocol):
    """Of the accelerated network, which changes meanwhile."""

    order: list[str]  # the sites, as they must be asked for

    def pieces(self, probe: Probe, step: Callable[[], None]) -> Iterable[Piece]:
        """Responses of ``probe``, batch by batch, in the network as it stands; ``step`` is called after each batch."""


@dataclass
class Rerun:
    model: nn.Module
    source: Source
    order: list[str]

    def pieces(self, probe: Probe, step: Callable[[], None]) -> list[Piece]:
        source = self.source
        while True:
            pieces: list[Piece] = []
            try:
                observe(
                    self.model,
                    source.batches,
                    [probe],
                    positions=source.positions,
                    device=source.memory.device,
                    take=lambda _, first, responses, pieces=pieces: pieces.append((first, responses)),  # type: ignore[misc]
                    step=step,
                    inputs=source.inputs,
                )
                return pieces
            except Exception as error:  # once more with the memory the images took
                if not out_of_memory(error) or not source.inputs.drop_all():
                    raise


@dataclass
class _Frontier:
    """Where a batch has stopped, and what it needs to go on; ``env`` or ``packed``, neither before the first step."""

    step: int = 0
    env: Env | None = None
    packed: Packed | None = None
    place: Place | None = None
    size: int = 0


class Cut:
    """The pass along tapes of all kinds of batches, with the frontiers in memory.

    Where there is no room for a frontier the batch keeps the last one that had room, at worst its images, and goes on
    from there again next time.
    """

    def __init__(self, model: nn.Module, source: Source, scripts: Scripts):
        self._model, self._batches, self._positions = model, source.batches, source.positions
        self._memory, self._inputs, self._scripts = source.memory, source.inputs, scripts
        orders = [scripts.of(batch).order for batch in source.batches]
        if any(order != orders[0] for order in orders):
            raise CannotCut("its layers run in another order for some batches")
        self.order = orders[0]
        self._frontiers: dict[tuple[int, int], _Frontier] = {}

    def pieces(self, probe: Probe, step: Callable[[], None]) -> Iterator[Piece]:
        moved = 0
        for batch in self._batches:
            moved += self._scripts.of(batch).frontier_bytes(probe.site.name, batch.size)
            if self._memory.fastest == "host" and moved >= TIDY:
                give_back()
                moved = 0
            try:
                responses = self._responses(probe, batch)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                # Once more from the images, with no other batch in the way.
                self._evict()
                responses = self._responses(probe, batch)
            yield batch.first, responses
            step()

    def _responses(self, probe: Probe, batch: Batch) -> Responses:
        """Take the batch from its frontier to the site, and keep the new frontier if there is room for it."""
        script, key = self._scripts.of(batch), batch.key
        stop = script.stops[probe.site.name]
        old = self._frontiers.get(key, _Frontier())
        size = script.frontier_bytes(probe.site.name, batch.size)
        place = self._exchange(old, size)
        env = self._resume(old, batch, script, copy=place is None)
        if place is not None:
            self._frontiers[key] = _Frontier()
            if old.packed is not None:
                old.packed.forget()
        try:
            script.run(env, self._model, old.step, stop.step)
            responses = _responses_at(probe, batch, env, stop, self._positions)
            if place is not None:
                self._frontiers[key] = self._keep(stop.step, env, place, size)
        except BaseException:
            if place is not None:
                self._memory.release(place, size)
            raise
        if place is not None:
            self._inputs.drop(batch)
        return responses

    def _resume(self, frontier: _Frontier, batch: Batch, script: Script, *, copy: bool) -> Env:
        """What the next step needs; with ``copy`` the frontier stays as it is."""
        device = self._memory.device
        if frontier.packed is not None:
            return frontier.packed.unpacked(device)
        if frontier.env is not None:
            return Packed.of(frontier.env).unpacked(device) if copy else frontier.env
        return script.start(self._inputs.get(batch))

    def _exchange(self, frontier: _Frontier, size: int) -> Place | None:
        """Reserve memory for the new frontier instead of the old one; None: keep the old one."""
        if frontier.place is not None:
            self._memory.release(frontier.place, frontier.size)
        place = self._memory.reserve(size)
        if place is None and frontier.place is not None:
            self._memory.take_back(frontier.place, frontier.size)
        return place

    def _keep(self, step: int, env: Env, place: Place, size: int) -> _Frontier:
        if place == self._memory.fastest:
            return _Frontier(step, env, None, place, size)
        packed = Packed.of(env)
        if place == "host":
            return _Frontier(step, None, packed.moved(torch.device("cpu")), place, size)
        assert self._memory.file is not None
        try:
            return _Frontier(step, None, packed.written(self._memory.file), place, size)
        except OSError as error:  # the disk is fuller than it was: from the images again
            log.warning("cannot write to %s (%s); this takes longer.", self._memory.folder, error.strerror)
            self._memory.release(place, size)
            self._memory.shrink("disk")
            return _Frontier()

    def _evict(self) -> None:
        """Forget what is kept where the network runs, and keep nothing more there."""
        fastest = self._memory.fastest
        for key, frontier in self._frontiers.items():
            if frontier.place == fastest:
                self._memory.release(fastest, frontier.size)
                self._frontiers[key] = _Frontier()
        self._inputs.drop_all()
        self._memory.shrink(fastest)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
