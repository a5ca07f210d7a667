"""One run of a network as a list of tensor operations, to be run again in parts.

A *tape* holds what torch's dispatcher was asked to do, whatever Python code asked: the operations, the tensors they
took and made (as numbered *slots*), and where in the list certain modules began and ended. It does not depend on the
values of tensors, unless the network itself reads them. Such a network cannot be taped, and the tape says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from leanconv.calibrate.batches import Batch
from leanconv.network.function_trace import map_tensors, tensors
from leanconv.network.sites import Site

# What makes a run depend on the values of its images, by the dispatcher's own tags.
_OBSTACLES = {
    torch.Tag.data_dependent_output: "it reads a value out of a tensor",
    torch.Tag.dynamic_output_shape: "the size of a tensor depends on the values of another",
    torch.Tag.nondeterministic_seeded: "it draws random numbers",
}


def _obstacle(function: Any, args: Any, kwargs: Any) -> str | None:
    tags = function.tags
    if torch.Tag.nondeterministic_seeded in tags and _argument(function, args, kwargs, "dropout_p") == 0.0:
        return None  # attention that could drop out but does not
    if function is torch.ops.aten.index.Tensor and not any(
        t.dtype in (torch.bool, torch.uint8) for t in tensors(args[1])
    ):
        return None  # the result has as many numbers as there are indices; only a mask leaves that open
    return next((why for tag, why in _OBSTACLES.items() if tag in tags), None)


def _argument(function: Any, args: Any, kwargs: Any, name: str) -> Any:
    """The value of an argument, or its default; None if there is no such argument."""
    for index, argument in enumerate(function._schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) else kwargs.get(name, argument.default_value)
    return None


class Slot(int):
    """Stands for a tensor among the arguments of an operation."""


@dataclass(frozen=True)
class Operation:
    """``function(*args, **kwargs)`` with slots for tensors; ``taken`` are the slots it reads, ``made`` those of its
    results."""

    function: Any
    args: Any
    kwargs: Any
    taken: tuple[int, ...]
    made: tuple[int, ...]


@dataclass
class Call:
    """A module's part of the tape: operations ``start`` to ``end``, its first input and its output."""

    start: int
    input: int
    end: int | None = None  # None: the run stopped inside
    output: int | None = None


@dataclass(frozen=True)
class Form:
    """A tensor without its values. Tensors of equal ``storage`` share memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        storage = tensor.untyped_storage()
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, storage.data_ptr(), storage.nbytes())

    def zeros(self, rows: int, device: torch.device) -> Tensor:
        """Zeros of this form, but with this number of ``rows``."""
        return torch.empty_strided((rows, *self.shape[1:]), self.stride, dtype=self.dtype, device=device).zero_()


@dataclass
class Tape:
    """``size``: images in the batch. ``inputs``: slots of its tensors. ``sums``: for a layer with addends, how many
    operations had run when the sum was complete, and its slot. ``obstacle``: why the tape must not be used."""

    size: int = 0
    inputs: tuple[int, ...] = ()
    operations: list[Operation] = field(default_factory=list)
    constants: dict[int, Tensor] = field(default_factory=dict)
    forms: list[Form] = field(default_factory=list)
    calls: dict[str, list[Call]] = field(default_factory=dict)
    sums: dict[str, tuple[int, int]] = field(default_factory=dict)
    obstacle: str | None = None

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor made for one image."""
        made = (form.bytes for slot, form in enumerate(self.forms) if slot not in self.constants)
        return max(made, default=0) // max(self.size, 1)


class Tapes:
    """The tapes of a run, by the kind of batch they serve."""

    def __init__(self, any_size: Tape | None = None, batch: Batch | None = None):
        """With a tape that serves batches of any size, and the ``batch`` it was made of."""
        self._tapes: dict[Any, Tape] = {}
        self._any_size: Any = None
        if any_size is not None and batch is not None:
            self._any_size = _kind_of_one(batch)
            self._tapes[self._any_size] = any_size

    def key(self, batch: Batch) -> Any:
        kind = _kind_of_one(batch)
        return kind if kind == self._any_size else batch.kind

    def get(self, batch: Batch) -> Tape | None:
        return self._tapes.get(self.key(batch))

    def add(self, batch: Batch, tape: Tape) -> None:
        self._tapes[self.key(batch)] = tape


def _kind_of_one(batch: Batch) -> Any:
    """The kind of a batch without its number of images."""
    return tuple((shape[1:], stride[1:], dtype) for shape, stride, dtype in batch.kind)


class Recorder(TorchDispatchMode):
    """Writes a tape while it is active. What happens inside ``pause()`` is not the network's and is left out."""

    def __init__(self, inputs: Any, size: int) -> None:
        """``inputs`` of the network, ``size`` images."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape(size)
        self._slots = WeakTensorKeyDictionary()  # a slot is forgotten when its tensor dies
        self._paused = 0
        self.tape.inputs = tuple(self._new(tensor) for tensor in tensors(inputs))

    @contextmanager
    def pause(self) -> Iterator[None]:
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._paused and not self.tape.obstacle:
            self.tape.obstacle = _obstacle(func, args, kwargs)
        if self._paused or self.tape.obstacle:
            return func(*args, **kwargs)
        taken = tuple(self._slot(tensor) for tensor in tensors((args, kwargs)))
        slots: tuple[Any, Any] = map_tensors(self._slot, (args, kwargs))
        result = func(*args, **kwargs)
        made = tuple(self._made(tensor) for tensor in tensors(result))
        self.tape.operations.append(Operation(func, *slots, taken, made))
        return result

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A hook: the module at ``path`` begins."""
        call = Call(len(self.tape.operations), self._slot(next(tensors((args, kwargs)))))
        self.tape.calls.setdefault(path, []).append(call)

    def leave(self, path: str, module: nn.Module, args: Any, result: Any) -> None:
        """A hook: the module at ``path`` ends."""
        call = self.tape.calls[path][-1]
        call.end = len(self.tape.operations)
        call.output = self._slot(result) if isinstance(result, Tensor) else None

    def record_sum(self, path: str, total: Tensor) -> None:
        self.tape.sums[path] = len(self.tape.operations), self._slot(total)

    def _slot(self, tensor: Tensor) -> Any:
        slot = self._slots.get(tensor)
        if slot is None:  # not made in this run: a weight, or a number written into the program
            slot = self._new(tensor)
            self.tape.constants[slot] = tensor
        return slot

    def _made(self, tensor: Tensor) -> int:
        slot = self._slots.get(tensor)  # an operation in place returns its input
        return self._new(tensor) if slot is None else slot

    def _new(self, tensor: Tensor) -> Slot:
        slot = Slot(len(self.tape.forms))
        self.tape.forms.append(Form.of(tensor))
        self._slots[tensor] = slot
        return slot


class _Exits(TorchFunctionMode):
    """Notices values that leave torch, where they cannot be followed. The dispatcher does not see these calls."""

    def __init__(self, tape: Tape):
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.numpy, Tensor.tolist, Tensor.__array__):
            self._tape.obstacle = self._tape.obstacle or "it takes numbers out of torch"
        return func(*args, **(kwargs or {}))


@contextmanager
def taping(model: nn.Module, sites: Sequence[Site], inputs: Any, size: int) -> Iterator[Recorder]:
    """Record what runs inside the block on ``inputs``, and where the sites' layers and batch norms are in it."""
    recorder = Recorder(inputs, size)
    with ExitStack() as stack:
        for path in [path for site in sites for path in (site.name, site.batch_norm) if path is not None]:
            module = model.get_submodule(path)
            enter, leave = partial(recorder.enter, path), partial(recorder.leave, path)
            # First in, first out: before and after any hook that takes samples there.
            stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
            stack.enter_context(module.register_forward_hook(leave, prepend=True))
        with recorder, _Exits(recorder.tape):
            yield recorder


def fill(value: Any, env: dict[int, Tensor], constants: dict[int, Tensor]) -> Any:
    """``value`` with tensors for slots."""
    if isinstance(value, Slot):
        return env[value] if value in env else constants[value]
    if isinstance(value, (list, tuple)):
        return type(value)(fill(item, env, constants) for item in value)
    if isinstance(value, dict):
        return {key: fill(item, env, constants) for key, item in value.items()}
    return value
