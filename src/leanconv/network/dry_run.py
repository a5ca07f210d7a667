"""A trial: put other modules at some paths of a network, run it once, compare the outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.network.fold import Filters
from leanconv.network.function_trace import map_tensors, opaque, tensors
from leanconv.network.layers.kinds import LAYERS
from leanconv.network.layers.modules import Factored, put
from leanconv.system.precision import exact_products

# Relative difference of outputs that rounding explains; a wrong replacement differs by far more.
SAME = {torch.float64: 1e-6, torch.float32: 1e-3}
SAME_HALF = 0.1

# A deep network may multiply rounding by thousands. How much is seen from inputs a few last bits apart; this many
# times what that does is allowed too, up to a limit.
ROUNDING, MARGIN, AT_MOST = 8, 4, 0.02


class Trial:
    """A network and its outputs on a sample. After every trial the network is as it was before."""

    def __init__(self, model: nn.Module, sample: Any):
        self.model, self._sample = model, sample
        self.filters = Filters(model)
        self.opaque = False  # whether the outputs hold something other than tensors and numbers
        self._reference = self._answers()

    @property
    def tells(self) -> bool:
        """Whether the outputs hold floating-point numbers to compare."""
        return any(answer.is_floating_point() for answer in self._reference)

    @cached_property
    def _rounding(self) -> list[float]:
        """What rounding may change in every output. Takes a run, which most networks do not need."""
        pairs = zip(self._rounded_answers(), self._reference, strict=True)
        return [min(MARGIN * _difference(moved, answer), AT_MOST) for moved, answer in pairs]

    def _rounded_answers(self) -> list[Tensor]:
        """Outputs of inputs a few last bits away; the usual outputs where the network refuses those."""
        try:
            answers = self._answers(_last_bits)
        except Exception:
            return self._reference
        return answers if len(answers) == len(self._reference) else self._reference

    def holds(self, stand_ins: Mapping[str, nn.Module], must_run: Iterable[str], *, leniency: float = 1.0) -> bool:
        """Whether the outputs are the same with ``stand_ins`` (path -> module), and those of ``must_run`` were run."""
        called: set[str] = set()
        try:
            with self._in_place(stand_ins, called):
                outputs = self._answers()
        except Exception:
            return False
        return called >= set(must_run) and self._same(outputs, leniency)

    def _same(self, outputs: list[Tensor], leniency: float) -> bool:
        if [output.shape for output in outputs] != [reference.shape for reference in self._reference]:
            return False
        differences = [_difference(*pair) for pair in zip(outputs, self._reference, strict=True)]
        allowed = [SAME.get(reference.dtype, SAME_HALF) for reference in self._reference]
        if all(difference <= leniency * same for difference, same in zip(differences, allowed, strict=True)):
            return True
        bounds = zip(differences, allowed, self._rounding, strict=True)
        return all(difference <= leniency * max(same, rounding) for difference, same, rounding in bounds)

    def _answers(self, change: Callable[[Tensor], Tensor] = torch.clone) -> list[Tensor]:
        """Outputs on a copy of the sample, with the same random numbers every time."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]), exact_products():
            torch.default_generator.manual_seed(0)
            inputs = map_tensors(lambda tensor: change(tensor.detach()), self._sample)
            torch.default_generator.manual_seed(0)
            answer = self.model(inputs)
            self.opaque |= opaque(answer)
            return [output.detach().clone() for output in tensors(answer)]

    @contextmanager
    def _in_place(self, stand_ins: Mapping[str, nn.Module], called: set[str]) -> Iterator[None]:
        before = {path: self.model.get_submodule(path) for path in stand_ins}
        try:
            for path, module in stand_ins.items():
                # As factors will: a network that asks for the layer's type or attributes fails here.
                old = before[path]
                shape = old.weight.shape if isinstance(old, LAYERS) else ()
                wrapper = Factored([("whole", module)], shape).train(old.training)

                def note(module: nn.Module, args: Any, result: Any, path: str = path) -> None:
                    called.add(path)

                wrapper.register_forward_hook(note)
                put(self.model, path, wrapper)
            yield
        finally:
            for path, module in before.items():
                put(self.model, path, module)


def _last_bits(tensor: Tensor) -> Tensor:
    """The same numbers but for rounding, within their range."""
    if not tensor.is_floating_point() or torch.equal(tensor, tensor.round()):
        return tensor.clone()  # whole numbers are labels or counts
    relative = ROUNDING * torch.finfo(tensor.dtype).eps
    moved = tensor * (1 + relative * (2 * torch.rand(tensor.shape).to(tensor) - 1))
    return moved.clamp(tensor.min(), tensor.max())


def _difference(output: Tensor, reference: Tensor) -> float:
    """Relative; 0 for numbers that are not floating-point."""
    if not reference.is_floating_point() or output.shape != reference.shape:
        return 0.0
    if not torch.equal(output.isnan(), reference.isnan()):
        return math.inf
    difference = float(torch.linalg.vector_norm((output - reference).double().nan_to_num()))
    size = float(torch.linalg.vector_norm(reference.double().nan_to_num()))
    return difference / size if size else (0.0 if difference == 0 else math.inf)
