"""The original stream along its tape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import Batch
from leanconv.calibrate.observe import chosen_at
from leanconv.calibrate.positions import Positions
from leanconv.calibrate.prefetch import Inputs
from leanconv.calibrate.probes import Probe, Responses
from leanconv.calibrate.streaming.replay import CannotCut, Env, Script, Stop
from leanconv.calibrate.streaming.tape_cache import Tapes
from leanconv.network.sites import Site


class Walk:
    """The original along its tapes: what a pass with hooks would see, without the hooks, for batches of a kind that
    has been taped. A GPU waits for Python otherwise."""

    def __init__(
        self,
        model: nn.Module,
        positions: Positions,
        inputs: Inputs,
        tapes: Tapes,
        probes: Iterable[Probe],
        sites: Iterable[Site],
    ):
        """``sites``: all layers the tapes were looked at with. Whatever number of images their tape is of, they run on
        any; operations inside the others may be tied to it."""
        self._model, self._positions, self._inputs, self._tapes = model, positions, inputs, tapes
        self._probes = {probe.site.name: probe for probe in probes}
        self._sites = list(sites)
        self._scripts: dict[Any, Script] = {}

    def knows(self, batch: Batch) -> bool:
        """Whether there is a tape that serves this batch."""
        if self._tapes.get(batch) is None:
            return False
        try:
            self._script(batch)
        except CannotCut:
            return False
        return True

    def __call__(self, batch: Batch) -> Iterator[tuple[str, Responses]]:
        """Responses of every probe, one by one: memory they leave then serves the next."""
        script = self._script(batch)
        env, begin = script.start(self._inputs.get(batch)), 0
        for name in script.order:
            probe, stop = self._probes[name], script.stops[name]
            script.run(env, self._model, begin, stop.step)
            begin = stop.step
            if not probe.own_output or probe.site.calls > 1:
                yield name, responses_at(probe, batch, env, stop, self._positions)
                continue
            x = env[stop.inputs[0]]
            chosen = chosen_at(probe, x, batch, self._positions)
            addend = None if stop.total is None else probe.outputs(env[stop.total], chosen)
            output = script.through(env, self._model, name)
            if output is None:
                y = probe.from_input(x, chosen)
            else:
                y, begin = probe.outputs(output, chosen), stop.step + 1
            yield name, Responses(y, addend)

    def _script(self, batch: Batch) -> Script:
        key = self._tapes.key(batch)
        if key not in self._scripts:
            tape = self._tapes.get(batch)
            assert tape is not None
            self._scripts[key] = Script(tape, self._sites, self._probes)
        return self._scripts[key]


def responses_at(probe: Probe, batch: Batch, env: Env, stop: Stop, positions: Positions) -> Responses:
    """Of a site where a script has stopped."""
    found: list[Tensor] = []
    addend = None
    for slot in stop.inputs:
        x = env[slot]
        chosen = chosen_at(probe, x, batch, positions)
        addend = None if stop.total is None else probe.outputs(env[stop.total], chosen)
        found.append(probe.from_input(x, chosen))
    return Responses(torch.cat(found) if len(found) > 1 else found[0], addend)
