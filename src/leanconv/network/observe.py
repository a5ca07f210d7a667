"""Find the sites of a network by running it once and recording which operation consumed which tensor."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from leanconv.errors import LeanconvError
from leanconv.network import reasons
from leanconv.network.geometry import Cost, Geometry, Pair
from leanconv.network.recognise import (
    CONVOLUTIONS,
    LAYERS,
    activation_call,
    activation_module,
    has_hooks,
    is_batch_norm,
)
from leanconv.network.sites import ActivationSpec, Layer, Site, Survey

# A tensor at one moment: an operation in place makes a new key of the same object.
Key = tuple[int, int]


def _key(tensor: Tensor) -> Key:
    return id(tensor), 0 if tensor.is_inference() else tensor._version


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


@dataclass
class Event:
    """One operation: what it was, what went in and what came out."""

    kind: Literal["layer", "batch_norm", "activation", "call", "other"]
    inputs: list[Key]
    outputs: list[Key]
    name: str = ""
    activation: ActivationSpec | None = None
    in_shape: tuple[int, ...] = ()
    out_shape: tuple[int, ...] = ()
    weight_shape: tuple[int, ...] = ()


class Recording(TorchFunctionMode):
    """The events of one run. Inside a recognised module the functions it calls are not recorded again."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._alive: list[Tensor] = []  # ids stay unique while their tensors live
        self._inside = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        given = list(_tensors(args)) + list(_tensors(kwargs))
        inputs = [_key(tensor) for tensor in given]
        result = func(*args, **kwargs)
        made = list(_tensors(result))
        # Questions about a tensor (its shape, its device) consume nothing.
        if made:
            event = Event("other", inputs, [])
            if spec := activation_call(func, args, kwargs):
                event.kind, event.activation = "activation", spec
            elif func in CONVOLUTIONS and len(given) > 1:
                event.kind, event.name = "call", f"{func.__name__}#{len(self.events)}"
                event.in_shape, event.out_shape = tuple(given[0].shape), tuple(made[0].shape)
                event.weight_shape = tuple(given[1].shape)
            self._record(event, given, made)
        return result

    def _record(self, event: Event, given: list[Tensor], made: list[Tensor]) -> None:
        event.outputs = [_key(tensor) for tensor in made]
        self.events.append(event)
        self._alive.extend(given)
        self._alive.extend(made)

    def enter(self, name: str, module: nn.Module, args: Any) -> list[Key]:
        self._inside += 1
        inputs = list(_tensors(args))
        if isinstance(module, LAYERS) and inputs:
            _check_input(name, module, inputs[0])
        return [_key(tensor) for tensor in inputs]

    def leave(self, event: Event, args: Any, result: Any) -> None:
        self._inside -= 1
        given, made = list(_tensors(args)), list(_tensors(result))
        if given and made:
            event.in_shape, event.out_shape = tuple(given[0].shape), tuple(made[0].shape)
        self._record(event, given, made)


def _check_input(name: str, layer: nn.Module, x: Tensor) -> None:
    if isinstance(layer, nn.Linear):
        wanted, found = layer.in_features, x.shape[-1] if x.dim() else 0
    else:
        wanted = int(layer.in_channels)  # type: ignore[arg-type]
        axis = x.dim() - len(layer.kernel_size) - 1  # type: ignore[arg-type]
        found = x.shape[axis] if 0 <= axis < x.dim() else 0
    if wanted != found:
        raise LeanconvError(
            f"layer {name!r} takes {wanted} input channels but was given {found} (input shape "
            f"{tuple(x.shape)}); give images with the channels and size the network was trained on."
        )


@contextmanager
def recording(model: nn.Module) -> Iterator[Recording]:
    """Record the run inside the block; hooks come off on any error."""
    tape = Recording()
    handles = []
    for name, module in model.named_modules():
        event_kind, spec = _kind(module)
        if event_kind is None:
            continue
        pending: list[list[Key]] = []

        def before(module: nn.Module, args: Any, name: str = name, pending: Any = pending) -> None:
            pending.append(tape.enter(name, module, args))

        def after(
            module: nn.Module,
            args: Any,
            result: Any,
            name: str = name,
            kind: Any = event_kind,
            spec: Any = spec,
            pending: Any = pending,
        ) -> None:
            tape.leave(Event(kind, pending.pop(), [], name=name, activation=spec), args, result)

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        with torch.no_grad(), tape:
            yield tape
    finally:
        for handle in handles:
            handle.remove()


def _kind(
    module: nn.Module,
) -> tuple[Literal["layer", "batch_norm", "activation"] | None, ActivationSpec | None]:
    if isinstance(module, LAYERS):
        return "layer", None
    if is_batch_norm(module):
        return "batch_norm", None
    spec = activation_module(module)
    return ("activation", spec) if spec else (None, None)


def survey(model: nn.Module, sample: Any, *, layers: Literal["conv", "all"] = "conv") -> Survey:
    """Run ``model`` (in eval mode) once on ``sample`` and say what it is made of.

    MACs and sizes are those of one image of this sample. ``layers="all"`` counts Linear layers too.
    """
    if isinstance(model, LAYERS):
        raise LeanconvError("the model is a single layer; put it in torch.nn.Sequential and give that.")
    batch = _batch_size(sample)
    counted = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LAYERS) and (layers == "all" or not isinstance(module, nn.Linear))
    }
    hooked = {name for name, module in counted.items() if has_hooks(module)}
    with recording(model) as tape:
        model(sample)

    calls = Counter(event.name for event in tape.events if event.kind in ("layer", "batch_norm"))
    consumers: dict[Key, list[Event]] = defaultdict(list)
    for event in tape.events:
        for key in set(event.inputs):
            consumers[key].append(event)
    owners = _weight_owners(model)

    seen: dict[str, Layer] = {}
    sites: list[Site] = []
    skipped: dict[str, str] = {}
    for event in tape.events:
        if event.kind == "call":
            seen[event.name] = _describe_call(event, batch)
            skipped[event.name] = reasons.FUNCTION
        if event.kind != "layer" or event.name not in counted:
            continue
        module = counted[event.name]
        if event.name in seen:
            # A second call costs again; the layer is refused below.
            first = seen[event.name]
            seen[event.name] = replace(first, macs=first.macs + _describe(event, module, batch).macs)
            continue
        seen[event.name] = _describe(event, module, batch)
        reason = _refusal(module, event.name in hooked, calls[event.name], owners)
        if reason:
            skipped[event.name] = reason
        else:
            sites.append(_site(event, module, consumers, calls, batch, len(sites)))
    for name in counted:
        if name not in seen:
            skipped[name] = reasons.UNUSED
    return Survey(layers=tuple(seen.values()), sites=tuple(sites), skipped=skipped)


def _batch_size(sample: Any) -> int:
    if isinstance(sample, Tensor):
        return max(int(sample.shape[0]), 1)
    return max(len(sample), 1)


def _weight_owners(model: nn.Module) -> Counter[int]:
    """How many module paths lead to each weight."""
    return Counter(
        id(module.weight)
        for _, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, LAYERS) and isinstance(module.weight, nn.Parameter)
    )


def _refusal(module: nn.Module, hooked: bool, calls: int, owners: Counter[int]) -> str | None:
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        return reasons.TRANSPOSED
    if isinstance(module, (nn.Conv1d, nn.Conv3d)):
        return reasons.NOT_2D
    if hooked:
        return reasons.HOOKED
    if type(module) not in (nn.Conv2d, nn.Linear):
        return reasons.CUSTOM
    if calls > 1:
        return reasons.USED_AGAIN
    if owners[id(module.weight)] > 1:
        return reasons.SHARED
    if isinstance(module, nn.Conv2d) and module.groups > 1:
        return reasons.DEPTHWISE if module.groups == module.in_channels else reasons.GROUPED
    return None


def _describe(event: Event, module: nn.Module, batch: int) -> Layer:
    weight = module.weight
    assert isinstance(weight, Tensor)
    bias = module.bias
    parameters = weight.numel() + (bias.numel() if isinstance(bias, Tensor) else 0)
    if isinstance(module, nn.Linear):
        rows = _product(event.out_shape[:-1]) // batch
        return Layer(
            name=event.name,
            type="Linear",
            in_channels=module.in_features,
            out_channels=module.out_features,
            kernel=(1,),
            stride=(1,),
            groups=1,
            out_size=(rows,),
            macs=rows * weight.numel(),
            parameters=parameters,
        )
    conv: Any = module  # one of LAYERS: they share these attributes, not a public base class
    dimensions = len(conv.kernel_size)
    size = event.out_shape[-dimensions:]
    transposed = isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
    # A transposed filter is applied at every input position, an ordinary one at every output position. Detectors
    # run layers on more rows than there are images, so rows count too.
    shape = event.in_shape if transposed else event.out_shape
    positions = _product(shape[-dimensions:]) * _product(shape[: -dimensions - 1])
    return Layer(
        name=event.name,
        type=type(module).__name__,
        in_channels=conv.in_channels,
        out_channels=conv.out_channels,
        kernel=tuple(conv.kernel_size),
        stride=tuple(conv.stride),
        groups=conv.groups,
        out_size=tuple(size),
        macs=positions * weight.numel() // batch,
        parameters=parameters,
    )


def _describe_call(event: Event, batch: int) -> Layer:
    transposed = "transpose" in event.name
    dimensions = len(event.weight_shape) - 2
    shape = event.in_shape if transposed else event.out_shape
    positions = _product(shape[-dimensions:]) * _product(shape[: -dimensions - 1])
    in_channels, out_channels = event.in_shape[-dimensions - 1], event.out_shape[-dimensions - 1]
    return Layer(
        name=event.name,
        type=event.name.partition("#")[0],
        in_channels=in_channels,
        out_channels=out_channels,
        kernel=event.weight_shape[2:],
        stride=(),
        groups=1 if transposed else in_channels // event.weight_shape[1],
        out_size=event.out_shape[-dimensions:],
        macs=positions * _product(event.weight_shape) // batch,
        parameters=0,
    )


def _product(values: tuple[int, ...]) -> int:
    result = 1
    for value in values:
        result *= value
    return result


def _site(
    event: Event,
    module: nn.Module,
    consumers: dict[Key, list[Event]],
    calls: Counter[str],
    batch: int,
    index: int,
) -> Site:
    geometry = Geometry.of(module)
    in_size, out_size = _sizes(event, geometry, batch)
    batch_norm: str | None = None
    activation = ActivationSpec()
    following = _only_consumer(event, consumers)
    if following and following.kind == "batch_norm" and _foldable(following, event, calls):
        batch_norm = following.name
        following = _only_consumer(following, consumers)
    if following and following.kind == "activation" and following.activation:
        activation = following.activation
    return Site(
        name=event.name,
        geometry=geometry,
        in_size=in_size,
        out_size=out_size,
        cost=Cost.of(geometry, in_size, out_size),
        batch_norm=batch_norm,
        activation=activation,
        index=index,
    )


def _sizes(event: Event, geometry: Geometry, batch: int) -> tuple[Pair, Pair]:
    if geometry.kind == "linear":
        rows = _product(event.out_shape[:-1]) // batch
        return (1, rows), (1, rows)
    return (event.in_shape[-2], event.in_shape[-1]), (event.out_shape[-2], event.out_shape[-1])


def _only_consumer(event: Event, consumers: dict[Key, list[Event]]) -> Event | None:
    if len(event.outputs) != 1:
        return None
    found = consumers.get(event.outputs[0], [])
    return found[0] if len(found) == 1 else None


def _foldable(batch_norm: Event, layer: Event, calls: Counter[str]) -> bool:
    """Batch norm acts on axis 1; that is the layer's filters for images and for flat rows."""
    return calls[batch_norm.name] == 1 and len(layer.out_shape) in (2, 4)
