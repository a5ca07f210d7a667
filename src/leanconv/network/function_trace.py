"""Record one run of a network: which operation used which tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from leanconv.errors import LeanconvError
from leanconv.network.activations import ActivationSpec, activation_of_call, activation_of_module
from leanconv.network.effective_conv import inherits_forward
from leanconv.network.layers.kinds import LAYERS, REPLACEABLE, kind_of, kind_of_function
from leanconv.network.recognise import is_addition, is_batch_norm, is_norm_with_activation

# A tensor at one moment: an operation in place gives the same object a new key.
Key = tuple[int, int]
EventKind = Literal["layer", "batch_norm", "activation", "add", "call", "other"]


def _key(tensor: Tensor) -> Key:
    return id(tensor), 0 if tensor.is_inference() else tensor._version


def tensors(value: Any) -> Iterator[Tensor]:
    """Those in ``value`` and in its lists, tuples, dicts and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    for item in _items(value) or ():
        yield from tensors(item)


def opaque(value: Any) -> bool:
    """Whether ``value`` holds something ``tensors`` cannot look into."""
    items = _items(value)
    if items is None:
        return not isinstance(value, (Tensor, str, int, float, complex, type(None)))
    return any(opaque(item) for item in items)


def _items(value: Any) -> Iterable[Any] | None:
    """None for what is no container."""
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, dict):
        return value.values()
    if is_dataclass(value) and not isinstance(value, type):
        return vars(value).values()
    return None


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with every tensor in its lists, tuples and dicts replaced by ``function`` of it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, item) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value


@dataclass
class Event:
    """One operation: what it was, what went in and what came out."""

    kind: EventKind
    inputs: list[Key]
    outputs: list[Key]
    name: str = ""
    activation: ActivationSpec | None = None
    in_shape: tuple[int, ...] = ()
    out_shape: tuple[int, ...] = ()
    weight_shape: tuple[int, ...] = ()
    function: Any = None  # of a call


class Recording(TorchFunctionMode):
    """The events of one run. Functions that a recognised module calls are not recorded again."""

    def __init__(self, norms: dict[int, str]) -> None:
        """``norms``: paths of the batch norms that are recorded as functions, by the id of their running mean."""
        super().__init__()
        self._norms = norms
        self.events: list[Event] = []
        self._alive: list[Tensor] = []  # ids stay unique while their tensors live
        self._inside = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        used = list(tensors(args)) + list(tensors(kwargs))
        inputs = [_key(tensor) for tensor in used]
        result = func(*args, **kwargs)
        made = list(tensors(result))
        # Reading a tensor's shape or device does not use it, nor does a function that returns it as it is (dropout in
        # eval mode). Writing it into another tensor uses it and returns nothing.
        if func is Tensor.__setitem__:
            self._record(Event("other", inputs, []), used, [args[0]])
        elif made and not all(_key(tensor) in inputs for tensor in made):
            event = Event("other", inputs, [])
            if spec := activation_of_call(func, args, kwargs):
                event.kind, event.activation = "activation", spec
            elif func is F.batch_norm and len(args) > 1 and id(args[1]) in self._norms:
                event.kind, event.name, event.inputs = "batch_norm", self._norms[id(args[1])], inputs[:1]
            elif is_addition(func, kwargs, used):
                event.kind = "add"
            elif (layer_kind := kind_of_function(func)) and layer_kind.over_a_map and len(used) > 1:
                event.kind, event.name, event.function = "call", f"{func.__name__}#{len(self.events)}", func
                event.in_shape, event.out_shape = tuple(used[0].shape), tuple(made[0].shape)
                event.weight_shape = tuple(used[1].shape)
            self._record(event, used, made)
        return result

    def finish(self, result: Any) -> None:
        """The outputs of the network are used by its caller."""
        self._record(Event("other", [_key(tensor) for tensor in tensors(result)], []), [], [])

    def _record(self, event: Event, used: list[Tensor], made: list[Tensor]) -> None:
        event.outputs = [_key(tensor) for tensor in made]
        self.events.append(event)
        self._alive.extend(used)
        self._alive.extend(made)

    def watch(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        """Record the calls of a module that is one operation. Returns its hooks; other modules get none."""
        kind, activation = _kind(module)
        if kind is None:
            return []
        pending: list[list[Key]] = []  # inputs of calls that have not returned

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._inside += 1
            inputs = list(tensors((args, kwargs)))
            if isinstance(module, REPLACEABLE) and inputs and inherits_forward(module):
                _check_input(name, module, inputs[0])
            pending.append([_key(tensor) for tensor in inputs])

        def after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            self._inside -= 1
            event = Event(kind, pending.pop(), [], name=name, activation=activation)
            used, made = list(tensors((args, kwargs))), list(tensors(result))
            if used and made:
                event.in_shape, event.out_shape = tuple(used[0].shape), tuple(made[0].shape)
            self._record(event, used, made)

        pre_hook = module.register_forward_pre_hook(before, with_kwargs=True)
        return [pre_hook, module.register_forward_hook(after, with_kwargs=True)]


def _check_input(name: str, layer: nn.Module, x: Tensor) -> None:
    kind = kind_of(layer)
    axis = kind.channel_axis(x.dim())
    channels, actual = kind.geometry(layer).in_channels, x.shape[axis] if 0 <= axis < x.dim() else 0
    if channels != actual:
        raise LeanconvError(
            f"layer {name!r} takes {channels} input channels but was given {actual} (input shape "
            f"{tuple(x.shape)}); give images with the channels and size the network was trained on."
        )


@contextmanager
def recording(model: nn.Module) -> Iterator[Recording]:
    """Record the run inside the block; hooks are removed on any error."""
    # A norm with an activation of its own is two steps: the functions it calls are recorded instead.
    norms = {id(m.running_mean): name for name, m in model.named_modules() if is_norm_with_activation(m)}
    recorded = Recording(norms)
    handles = [handle for name, module in model.named_modules() for handle in recorded.watch(name, module)]
    try:
        with torch.no_grad(), recorded:
            yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _kind(module: nn.Module) -> tuple[EventKind | None, ActivationSpec | None]:
    if isinstance(module, LAYERS):
        return "layer", None
    if is_batch_norm(module):
        return "batch_norm", None
    spec = activation_of_module(module)
    return ("activation", spec) if spec else (None, None)
