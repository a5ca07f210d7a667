"""The accelerated network along a tape: the original's operations, with calls of modules at the sites.

At every site the script can stop; what later steps read is then the *frontier*, all that is needed to go on. A site
without a shortcut stops before its layer runs. One with a shortcut is fitted to the shortcut as it will be, which may
be computed after the layer: its layer is taken to give zeros, the script stops behind the sum, which then is the
shortcut alone, and the layer's share is added when the script goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.calibrate.streaming.tape import Call, Form, Operation, Tape, fill
from leanconv.network.function_trace import tensors
from leanconv.network.sites import Site

Env = dict[int, Tensor]


class CannotCut(Exception):
    """The tape does not show what is needed to stop and go on."""


@dataclass(frozen=True)
class _Compute:
    operation: Operation
    constants: dict[int, Tensor]

    @property
    def reads(self) -> Iterable[int]:
        return self.operation.taken

    def run(self, env: Env, model: nn.Module) -> None:
        operation = self.operation
        args, kwargs = fill((operation.args, operation.kwargs), env, self.constants)
        made = tensors(operation.function(*args, **kwargs))
        env.update(zip(operation.made, made, strict=True))


@dataclass(frozen=True)
class _Layer:
    """A layer, and its batch norm or what is left of it."""

    paths: tuple[str, ...]
    input: int
    output: int

    @property
    def reads(self) -> Iterable[int]:
        return (self.input,)

    def run(self, env: Env, model: nn.Module) -> None:
        env[self.output] = _through(model, self.paths, env[self.input])


@dataclass(frozen=True)
class _Nothing:
    """Zeros for a layer whose share comes later."""

    input: int
    output: int
    form: Form

    @property
    def reads(self) -> Iterable[int]:
        return (self.input,)

    def run(self, env: Env, model: nn.Module) -> None:
        x = env[self.input]
        env[self.output] = self.form.zeros(len(x), x.device)


@dataclass(frozen=True)
class _Shortcut:
    """The sum of nothing and a shortcut, in place of zeros and an addition."""

    shortcut: int
    output: int
    copy: bool  # the shortcut is needed again as it is

    @property
    def reads(self) -> Iterable[int]:
        return (self.shortcut,)

    def run(self, env: Env, model: nn.Module) -> None:
        found = env[self.shortcut]
        env[self.output] = found.clone() if self.copy else found


@dataclass(frozen=True)
class _Share:
    """The layer's share, into the sum."""

    paths: tuple[str, ...]
    input: int
    total: int

    @property
    def reads(self) -> Iterable[int]:
        return (self.input, self.total)

    def run(self, env: Env, model: nn.Module) -> None:
        env[self.total].add_(_through(model, self.paths, env[self.input]))


def _through(model: nn.Module, paths: tuple[str, ...], x: Tensor) -> Tensor:
    for path in paths:
        x = model.get_submodule(path)(x)
    return x


@dataclass(frozen=True)
class Stop:
    """Where a site stops: the number of steps before it, its inputs (one, or the maps of a pyramid) and, with a
    shortcut, the sum so far."""

    step: int
    inputs: tuple[int, ...]
    total: int | None


class Script:
    """Steps of one tape, in which all ``sites`` are calls of modules and the ``wanted`` ones stops."""

    def __init__(self, tape: Tape, sites: Iterable[Site], wanted: Collection[str]):
        if tape.obstacle:
            raise CannotCut(tape.obstacle)
        self._tape, self._wanted = tape, wanted
        # The last operation that reads each slot.
        self._read = {slot: number for number, operation in enumerate(tape.operations) for slot in operation.taken}
        self.stops: dict[str, Stop] = {}
        self._steps: list[Any] = []
        self._write(list(sites))
        # A slot can go behind the last step that reads it, or is a stop that looks at it.
        self._last: dict[int, int] = {}
        for number, step in enumerate(self._steps):
            for slot in (*step.reads, *_made(step)):
                self._last[slot] = number
        for stop in self.stops.values():
            for slot in (*stop.inputs, stop.total):
                if slot is not None:
                    self._last[slot] = max(self._last.get(slot, -1), stop.step)
        self._gone: list[list[int]] = [[] for _ in range(len(self._steps) + 1)]
        for slot, number in self._last.items():
            self._gone[number].append(slot)
        self.order = sorted(self.stops, key=lambda name: self.stops[name].step)
        self._bytes = self._count()

    def _write(self, sites: list[Site]) -> None:
        tape = self._tape
        end = len(tape.operations)
        begins: dict[int, list[tuple[Site, int]]] = {}  # with the number of the call
        sums: dict[int, list[tuple[Site, int]]] = {}
        inside: set[int] = set()  # operations a module's call stands for
        for site in sites:
            if site.name not in tape.calls:
                raise CannotCut(f"layer {site.name!r} did not run")
            for path in _paths(site):
                for call in tape.calls.get(path, []):
                    inside.update(range(call.start, end if call.end is None else call.end))
            self._check_calls(site)
            for number, call in enumerate(tape.calls[site.name]):
                begins.setdefault(call.start, []).append((site, number))
            if self._late(site):
                if site.name not in tape.sums:
                    raise CannotCut(f"the sum behind layer {site.name!r} was not seen")
                number, total = tape.sums[site.name]
                sums.setdefault(number, []).append((site, total))
        shortcuts = {number - 1: s for number, found in sums.items() for s in [self._shortcut(number, found)] if s}
        self._plain_sums = {site.name for number in shortcuts for site, _ in sums[number + 1]}
        for number in range(end + 1):
            for site, total in sums.get(number, []):
                self._stop(site, total)
                self._steps.append(_Share(_paths(site), tape.calls[site.name][0].input, total))
            for site, call_number in begins.get(number, []):
                self._begin(site, call_number)
            if number in shortcuts:
                self._steps.append(shortcuts[number])
            elif number < end and number not in inside:
                self._steps.append(_Compute(tape.operations[number], tape.constants))

    def _check_calls(self, site: Site) -> None:
        """All inputs of a layer that runs several times must be there when it first runs."""
        tape, calls = self._tape, self._tape.calls[site.name]
        if len(calls) != site.calls:
            raise CannotCut(f"layer {site.name!r} runs {len(calls)} times for some images and {site.calls} for others")
        later = {slot for operation in tape.operations[calls[0].start : calls[-1].start] for slot in operation.made}
        if any(call.input in later for call in calls):
            raise CannotCut(f"layer {site.name!r} runs again on what came of its first run")

    def _begin(self, site: Site, number: int) -> None:
        tape = self._tape
        call = tape.calls[site.name][number]
        tail = self._tail(site, number)
        if not self._late(site):
            if site.name in self._wanted and number == 0:
                self._stop(site, None)
            if tail is not None and tail.output is not None:  # else nothing behind it was recorded, or is needed
                self._steps.append(_Layer(_paths(site), call.input, tail.output))
            return
        if tail is None or tail.output is None:
            raise CannotCut(f"the output of layer {site.name!r} was not seen")
        if site.name not in self._plain_sums:
            self._steps.append(_Nothing(call.input, tail.output, tape.forms[tail.output]))

    def _tail(self, site: Site, number: int = 0) -> Call | None:
        calls = self._tape.calls.get(site.tail, [])
        return calls[number] if number < len(calls) else None

    def _shortcut(self, number: int, found: list[tuple[Site, int]]) -> _Shortcut | None:
        """For a sum that is one addition, right before operation ``number``, of a layer's output and a tensor alike."""
        tape, (site, total) = self._tape, found[0]
        tail, operation = self._tail(site), tape.operations[number - 1]
        added = operation.function in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
        taken = operation.taken
        if len(found) > 1 or site.adds > 1 or not added or tail is None or tail.output not in taken or len(taken) != 2:
            return None
        other = taken[0] if taken[1] == tail.output else taken[1]
        form, wanted = tape.forms[other], tape.forms[total]
        alike = (form.shape, form.stride, form.dtype) == (wanted.shape, wanted.stride, wanted.dtype)
        if not alike or other == tail.output or other in tape.constants:
            return None
        # Whoever reads the shortcut's memory later must not find the layer's share in it; unless it was meant to.
        later = (slot for slot, last in self._read.items() if last >= number and slot != total)
        copy = any(tape.forms[slot].storage == form.storage for slot in later)
        return _Shortcut(other, total, copy and other != total)

    def _late(self, site: Site) -> bool:
        """Whether the layer's share comes after the shortcut's."""
        return site.adds > 0 and site.name in self._wanted

    def _stop(self, site: Site, total: int | None) -> None:
        inputs = tuple(call.input for call in self._tape.calls[site.name])
        self.stops[site.name] = Stop(len(self._steps), inputs, total)

    def start(self, batch: Any) -> Env:
        """The frontier before the first step."""
        return dict(zip(self._tape.inputs, tensors(batch), strict=True))

    def run(self, env: Env, model: nn.Module, begin: int, end: int) -> None:
        """Take ``env``, the frontier at step ``begin``, to step ``end``. Tensors go as soon as nobody needs them."""
        with torch.no_grad():
            for number in range(begin, end):
                self._steps[number].run(env, model)
                for slot in self._gone[number]:
                    env.pop(slot, None)

    def through(self, env: Env, model: nn.Module, name: str) -> Tensor | None:
        """From the stop of site ``name`` through its layer, whose output (batch norm included) is returned; None
        where the tape ends before it."""
        number = self.stops[name].step
        if number == len(self._steps):
            return None
        step = self._steps[number]
        with torch.no_grad():
            output = _through(model, step.paths, env[step.input])
            if isinstance(step, _Share):
                env[step.total].add_(output)
            else:
                env[step.output] = output
        for slot in self._gone[number]:
            env.pop(slot, None)
        return output

    def frontier_bytes(self, name: str, size: int) -> int:
        """Memory of the frontier where site ``name`` stops, for ``size`` images."""
        return self._bytes[name] * size // max(self._tape.size, 1)

    def _count(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        made, done = set(self._tape.inputs), 0
        for name in self.order:
            step = self.stops[name].step
            for earlier in self._steps[done:step]:
                made.update(_made(earlier))
            done = step
            made = {slot for slot in made if self._last.get(slot, -1) >= step}
            forms = [self._tape.forms[slot] for slot in made]
            sizes[name] = sum({form.storage: form.bytes for form in forms}.values())
        return sizes


def _made(step: Any) -> Iterable[int]:
    if isinstance(step, _Compute):
        return step.operation.made
    return () if isinstance(step, _Share) else (step.output,)


def _paths(site: Site) -> tuple[str, ...]:
    return (site.name,) if site.batch_norm is None else (site.name, site.batch_norm)
