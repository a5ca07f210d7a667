"""The accelerated stream: responses of each site, in turn, to what the sites before it have become.

Two ways. *Cut*: the stream stops at every site and goes on from there, so that all sites together cost one pass of
the accelerated network. *Rerun*: every site costs a pass up to it; for networks that cannot be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from leanconv.calibrate.batches import Batch, Batches, log, out_of_memory
from leanconv.calibrate.memory import Memory, Packed, Place
from leanconv.calibrate.observe import observe
from leanconv.calibrate.positions import Positions
from leanconv.calibrate.prefetch import Inputs
from leanconv.calibrate.probes import Probe, Responses
from leanconv.calibrate.samples import Piece
from leanconv.calibrate.streaming.original import responses_at
from leanconv.calibrate.streaming.replay import CannotCut, Env, Script
from leanconv.calibrate.streaming.tape import Tape
from leanconv.calibrate.streaming.tape_cache import Tapes
from leanconv.network.sites import Site
from leanconv.system.process_memory import give_back

# On a CPU, after frontiers of so many bytes, memory they have left scattered is given back to the system.
TIDY = 256 << 20


class Stream(Protocol):
    order: list[str]  # the sites, as they must be asked for

    def pieces(self, probe: Probe, step: Callable[[], None]) -> Iterable[Piece]:
        """Responses of ``probe``, batch by batch, in the network as it stands."""
        ...


@dataclass
class Rerun:
    model: nn.Module
    batches: Batches
    positions: Positions
    device: torch.device
    inputs: Inputs
    order: list[str]

    def pieces(self, probe: Probe, step: Callable[[], None]) -> list[Piece]:
        try:
            return self._pieces(probe, step)
        except Exception as error:
            if not out_of_memory(error) or not self.inputs.drop_all():
                raise
        return self._pieces(probe, step)  # with the room the images took

    def _pieces(self, probe: Probe, step: Callable[[], None]) -> list[Piece]:
        found: list[Piece] = []
        observe(
            self.model,
            self.batches,
            [probe],
            positions=self.positions,
            device=self.device,
            take=lambda _, first, responses: found.append((first, responses)),
            step=step,
            inputs=self.inputs,
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
        inputs: Inputs,
        tapes: Tapes,
        sites: Iterable[Site],
        wanted: Iterable[str],
        tape: Callable[[Batch], Tape],
    ):
        """``wanted``: those of the ``sites`` that will be asked for. ``tape`` makes the tape of a kind of batch that
        is not among ``tapes``."""
        self._model, self._batches, self._positions, self._memory = model, batches, positions, memory
        self._inputs, self._sites, self._wanted, self._tape = inputs, list(sites), set(wanted), tape
        self._tapes = tapes
        self._scripts: dict[Any, Script] = {}
        for batch in batches:
            self._script(batch)
        orders = [script.order for script in self._scripts.values()]
        if any(order != orders[0] for order in orders):
            raise CannotCut("its layers run in another order for some batches")
        self.order = orders[0]
        self._frontiers: dict[tuple[int, int], _Frontier] = {}

    def pieces(self, probe: Probe, step: Callable[[], None]) -> Iterator[Piece]:
        moved = 0
        for batch in self._batches:
            moved += self._script(batch).frontier_bytes(probe.site.name, batch.size)
            if self._memory.fastest == "host" and moved >= TIDY:
                give_back()
                moved = 0
            try:
                found = self._at(probe, batch)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                # Once more from the images, with no other batch in the way.
                self._evict()
                found = self._at(probe, batch)
            yield batch.first, found
            step()

    def _at(self, probe: Probe, batch: Batch) -> Responses:
        script, key = self._script(batch), (batch.first, batch.size)
        stop = script.stops[probe.site.name]
        old = self._frontiers.get(key, _Frontier())
        size = script.frontier_bytes(probe.site.name, batch.size)
        place = self._exchange(old, size)
        env = self._resumed(old, batch, script, copy=place is None)
        if place is None:  # no room: the old one stays
            script.run(env, self._model, old.step, stop.step)
            return responses_at(probe, batch, env, stop, self._positions)
        self._frontiers[key] = _Frontier()
        if old.packed is not None:
            old.packed.forget()
        try:
            script.run(env, self._model, old.step, stop.step)
            found = responses_at(probe, batch, env, stop, self._positions)
            self._frontiers[key] = self._kept(stop.step, env, place, size)
        except BaseException:
            self._memory.release(place, size)
            raise
        self._inputs.drop(batch)
        return found

    def _resumed(self, frontier: _Frontier, batch: Batch, script: Script, *, copy: bool) -> Env:
        """What the next step needs; with ``copy`` the frontier stays as it is."""
        device = self._memory.device
        if frontier.packed is not None:
            return frontier.packed.unpacked(device)
        if frontier.env is not None:
            return Packed.of(frontier.env).unpacked(device) if copy else frontier.env
        return script.start(self._inputs.get(batch))

    def _script(self, batch: Batch) -> Script:
        key = self._tapes.key(batch)
        if key not in self._scripts:
            self._scripts[key] = Script(self._tapes.get(batch) or self._tape(batch), self._sites, self._wanted)
        return self._scripts[key]

    def _exchange(self, frontier: _Frontier, size: int) -> Place | None:
        """Room for the new frontier instead of the old one; None: keep the old one."""
        if frontier.place is not None:
            self._memory.release(frontier.place, frontier.size)
        place = self._memory.reserve(size)
        if place is None and frontier.place is not None:
            self._memory.take_back(frontier.place, frontier.size)
        return place

    def _kept(self, step: int, env: Env, place: Place, size: int) -> _Frontier:
        if place == self._memory.fastest:
            return _Frontier(step, env, None, place, size)
        packed = Packed.of(env)
        if place == "host":
            return _Frontier(step, None, packed.moved(torch.device("cpu")), place, size)
        try:
            return _Frontier(step, None, packed.written(self._memory), place, size)
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
