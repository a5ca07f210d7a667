"""The accelerated network along a tape: the original's operations, with calls of modules at the sites.

At every site the script can stop; what later steps read is then the *frontier*, all that is needed to go on. A site
without a shortcut stops before its layer runs. One with a shortcut is fitted to that of the accelerated network, which
may be computed after the layer: zeros stand for the layer's output, the script stops behind the sum, which is then the
shortcut alone, and the layer's output is added when the script goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.calibrate.batches import Batch
from leanconv.calibrate.streaming.tape import Form, Operation, Tape, Tapes, fill
from leanconv.network.function_trace import tensors
from leanconv.network.sites import Site

Env = dict[int, Tensor]


class CannotCut(Exception):
    """The tape does not show what is needed to stop and go on."""


@dataclass(frozen=True)
class _Step:
    """``reads``, ``makes``: slots."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(frozen=True)
class _Compute(_Step):
    """An operation of the tape."""

    operation: Operation
    constants: dict[int, Tensor]

    def run(self, env: Env, model: nn.Module) -> None:
        operation = self.operation
        args, kwargs = fill((operation.args, operation.kwargs), env, self.constants)
        env.update(zip(self.makes, tensors(operation.function(*args, **kwargs)), strict=True))


@dataclass(frozen=True)
class _Layer(_Step):
    """A layer and its batch norm, or what is left of it. Without ``makes`` its output is added to the sum, the second
    slot that is read."""

    paths: tuple[str, ...]

    def run(self, env: Env, model: nn.Module) -> Tensor:
        output = env[self.reads[0]]
        for path in self.paths:
            output = model.get_submodule(path)(output)
        if self.makes:
            env[self.makes[0]] = output
        else:
            env[self.reads[1]].add_(output)
        return output


@dataclass(frozen=True)
class _Zeros(_Step):
    """Zeros for a layer whose output is added later."""

    form: Form

    def run(self, env: Env, model: nn.Module) -> None:
        x = env[self.reads[0]]
        env[self.makes[0]] = self.form.zeros(len(x), x.device)


@dataclass(frozen=True)
class _Shortcut(_Step):
    """A shortcut as the sum so far, instead of an addition to zeros."""

    copy: bool  # the shortcut itself is needed again

    def run(self, env: Env, model: nn.Module) -> None:
        shortcut = env[self.reads[0]]
        env[self.makes[0]] = shortcut.clone() if self.copy else shortcut


@dataclass(frozen=True)
class Stop:
    """Where a site stops: the number of steps before it, its inputs (one, or the maps of a pyramid) and, with a
    shortcut, the sum so far."""

    step: int
    inputs: tuple[int, ...]
    total: int | None


class Script:
    """Steps of one tape, in which all ``sites`` are calls of modules and those called ``stops`` can be stopped at."""

    def __init__(self, tape: Tape, sites: Sequence[Site], stops: Collection[str]):
        if tape.obstacle:
            raise CannotCut(tape.obstacle)
        self._tape, self._stop_names = tape, stops
        # The last operation that reads each slot.
        self._read = {slot: index for index, operation in enumerate(tape.operations) for slot in operation.taken}
        self.stops: dict[str, Stop] = {}
        self._steps: list[_Compute | _Layer | _Zeros | _Shortcut] = []
        self._write(sites)
        # The last step that reads each slot, or is a stop that looks at it.
        last: dict[int, int] = {}
        for index, step in enumerate(self._steps):
            last.update(dict.fromkeys((*step.reads, *step.makes), index))
        for stop in self.stops.values():
            for slot in (*stop.inputs, *([] if stop.total is None else [stop.total])):
                last[slot] = max(last.get(slot, -1), stop.step)
        self._freed: list[list[int]] = [[] for _ in range(len(self._steps) + 1)]
        for slot, index in last.items():
            self._freed[index].append(slot)
        self.order = sorted(self.stops, key=lambda name: self.stops[name].step)
        self._bytes = self._count_bytes(last)

    def _write(self, sites: Sequence[Site]) -> None:
        tape = self._tape
        end = len(tape.operations)
        begins: dict[int, list[tuple[Site, int]]] = {}  # operation -> sites whose call of this index begins there
        sums: dict[int, list[tuple[Site, int]]] = {}  # operation -> sites whose sum, this slot, is complete before it
        inside: set[int] = set()  # operations that are part of a module's call
        for site in sites:
            if site.name not in tape.calls:
                raise CannotCut(f"layer {site.name!r} did not run")
            for path in _paths(site):
                for call in tape.calls.get(path, []):
                    inside.update(range(call.start, end if call.end is None else call.end))
            self._check_calls(site)
            for index, call in enumerate(tape.calls[site.name]):
                begins.setdefault(call.start, []).append((site, index))
            if self._comes_later(site):
                if site.name not in tape.sums:
                    raise CannotCut(f"the sum behind layer {site.name!r} was not seen")
                index, total = tape.sums[site.name]
                sums.setdefault(index, []).append((site, total))
        shortcuts: dict[int, _Shortcut] = {}  # instead of these operations
        added: set[str] = set()  # the sites they serve
        for index, terms in sums.items():
            shortcut = self._shortcut(index - 1, *terms[0]) if len(terms) == 1 else None
            if shortcut is not None:
                shortcuts[index - 1] = shortcut
                added.add(terms[0][0].name)
        for index in range(end + 1):
            for site, total in sums.get(index, []):
                self._stop(site, total)
                self._steps.append(_Layer((tape.calls[site.name][0].input, total), (), _paths(site)))
            for site, call_index in begins.get(index, []):
                self._begin(site, call_index, zeros=site.name not in added)
            if index in shortcuts:
                self._steps.append(shortcuts[index])
            elif index < end and index not in inside:
                operation = tape.operations[index]
                self._steps.append(_Compute(operation.taken, operation.made, operation, tape.constants))

    def _check_calls(self, site: Site) -> None:
        """All inputs of a layer that runs several times must be there when it first runs."""
        tape, calls = self._tape, self._tape.calls[site.name]
        if len(calls) != site.calls:
            raise CannotCut(f"layer {site.name!r} runs {len(calls)} times for some images and {site.calls} for others")
        later = {slot for operation in tape.operations[calls[0].start : calls[-1].start] for slot in operation.made}
        if any(call.input in later for call in calls):
            raise CannotCut(f"layer {site.name!r} runs again on what came of its first run")

    def _begin(self, site: Site, index: int, *, zeros: bool) -> None:
        """A call of a site's layer; ``zeros``: whether it needs a stand-in, if its output is added later."""
        input = self._tape.calls[site.name][index].input
        output = self._output(site, index)
        if not self._comes_later(site):
            if site.name in self._stop_names and index == 0:
                self._stop(site, None)
            if output is not None:  # else nothing behind the layer was recorded, or is needed
                self._steps.append(_Layer((input,), (output,), _paths(site)))
        elif output is None:
            raise CannotCut(f"the output of layer {site.name!r} was not seen")
        elif zeros:
            self._steps.append(_Zeros((input,), (output,), self._tape.forms[output]))

    def _output(self, site: Site, index: int = 0) -> int | None:
        """The output of a layer and its batch norm, if it is on the tape."""
        calls = self._tape.calls.get(site.tail, [])
        return calls[index].output if index < len(calls) else None

    def _shortcut(self, index: int, site: Site, total: int) -> _Shortcut | None:
        """Instead of operation ``index``, if that alone adds a layer's output and another tensor of its form."""
        tape, output, operation = self._tape, self._output(site), self._tape.operations[index]
        taken = operation.taken
        adds = operation.function in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
        if site.adds > 1 or not adds or output not in taken or len(taken) != 2:
            return None
        other = taken[0] if taken[1] == output else taken[1]
        form, of_sum = tape.forms[other], tape.forms[total]
        alike = (form.shape, form.stride, form.dtype) == (of_sum.shape, of_sum.stride, of_sum.dtype)
        if not alike or other == output or other in tape.constants:
            return None
        # Who reads the shortcut's memory later must not see the layer's output added to it, unless that is the sum.
        later = (slot for slot, last in self._read.items() if last > index and slot != total)
        copy = any(tape.forms[slot].storage == form.storage for slot in later)
        return _Shortcut((other,), (total,), copy and other != total)

    def _comes_later(self, site: Site) -> bool:
        """Whether the layer's output is added after the shortcut."""
        return site.adds > 0 and site.name in self._stop_names

    def _stop(self, site: Site, total: int | None) -> None:
        inputs = tuple(call.input for call in self._tape.calls[site.name])
        self.stops[site.name] = Stop(len(self._steps), inputs, total)

    def _count_bytes(self, last: dict[int, int]) -> dict[str, int]:
        """Memory of the frontier at every stop."""
        sizes: dict[str, int] = {}
        alive, done = set(self._tape.inputs), 0
        for name in self.order:
            step = self.stops[name].step
            alive.update(slot for earlier in self._steps[done:step] for slot in earlier.makes)
            done = step
            alive = {slot for slot in alive if last.get(slot, -1) >= step}
            forms = [self._tape.forms[slot] for slot in alive]
            sizes[name] = sum({form.storage: form.bytes for form in forms}.values())
        return sizes

    def frontier_bytes(self, name: str, size: int) -> int:
        """Memory of the frontier where site ``name`` stops, for ``size`` images."""
        return self._bytes[name] * size // max(self._tape.size, 1)

    def start(self, batch: Any) -> Env:
        """The frontier before the first step."""
        return dict(zip(self._tape.inputs, tensors(batch), strict=True))

    @torch.no_grad()
    def run(self, env: Env, model: nn.Module, begin: int, end: int) -> None:
        """Take ``env``, the frontier at step ``begin``, to step ``end``. Tensors that are not read again are freed."""
        for index in range(begin, end):
            self._run_step(index, env, model)

    @torch.no_grad()
    def run_layer(self, env: Env, model: nn.Module, name: str) -> Tensor | None:
        """Run the layer of site ``name`` from its stop and return its output, batch norm included; None where the tape
        ends before it."""
        index = self.stops[name].step
        return None if index == len(self._steps) else self._run_step(index, env, model)

    def _run_step(self, index: int, env: Env, model: nn.Module) -> Tensor | None:
        output = self._steps[index].run(env, model)
        for slot in self._freed[index]:
            env.pop(slot, None)
        return output


class Scripts:
    """The scripts of a run's tapes, each written when a batch first needs it."""

    def __init__(self, tapes: Tapes, sites: Sequence[Site], stops: Collection[str]):
        self._tapes, self._sites, self._stops = tapes, sites, stops
        self._scripts: dict[Any, Script] = {}

    def get(self, batch: Batch) -> Script | None:
        """None where there is no tape for such a batch."""
        key = self._tapes.key(batch)
        if key not in self._scripts:
            tape = self._tapes.get(batch)
            if tape is None:
                return None
            self._scripts[key] = Script(tape, self._sites, self._stops)
        return self._scripts[key]

    def of(self, batch: Batch) -> Script:
        """The script for a batch that there is a tape for."""
        script = self.get(batch)
        assert script is not None
        return script


def _paths(site: Site) -> tuple[str, ...]:
    return (site.name,) if site.batch_norm is None else (site.name, site.batch_norm)
