"""Find the layers and sites of a network by observing one run."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from leanconv.errors import LeanconvError
from leanconv.network import reasons
from leanconv.network.activations import ActivationSpec
from leanconv.network.effective_conv import plain_form
from leanconv.network.function_trace import Event, Key, recording, tensors
from leanconv.network.layers.cost import Cost
from leanconv.network.layers.geometry import Geometry
from leanconv.network.layers.kinds import KINDS, LAYERS, kind_of, kind_of_function
from leanconv.network.recognise import has_hooks, has_own_forward
from leanconv.network.sites import Layer, Site, Survey


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
        if isinstance(module, LAYERS) and (layers == "all" or kind_of(module).over_a_map)
    }
    hooked = {name for name, module in counted.items() if has_hooks(module)}
    with recording(model) as tape:
        tape.finish(model(sample))

    calls = Counter(event.name for event in tape.events if event.kind in ("layer", "batch_norm"))
    together = _together(tape.events)
    consumers: dict[Key, list[Event]] = defaultdict(list)
    for event in tape.events:
        for key in set(event.inputs):
            consumers[key].append(event)
    owners = _weight_owners(model)

    seen: dict[str, Layer] = {}
    sites: list[_Found] = []
    skipped: dict[str, str] = {}
    for event in tape.events:
        if event.kind == "call":
            seen[event.name] = _describe_call(event, batch)
            skipped[event.name] = reasons.FUNCTION
        if event.kind != "layer" or event.name not in counted:
            continue
        module = counted[event.name]
        if event.name in seen:  # a second call costs again
            first = seen[event.name]
            seen[event.name] = replace(first, macs=first.macs + _describe(event, module, batch).macs)
            continue
        seen[event.name] = _describe(event, module, batch)
        again = calls[event.name] > 1 and event.name not in together
        reason = _refusal(module, event.name in hooked, again, owners)
        plain = None if reason else plain_form(module, event.in_shape[2:])
        found = None
        if plain:
            parts = [
                _find_site(part, plain.geometry, consumers, calls, batch, len(sites))
                for part in together.get(event.name, [event])
            ]
            found = parts[0] if len(parts) == 1 else _one_site(parts)
        if found:
            sites.append(found)
        else:
            skipped[event.name] = reason or (reasons.USED_AGAIN if plain else reasons.CUSTOM)
    for name in counted:
        if name not in seen:
            skipped[name] = reasons.UNUSED
    first_convolution = next((name for name in seen if name not in counted or kind_of(counted[name]).over_a_map), None)
    return Survey(
        layers=tuple(seen.values()),
        sites=_arrange(sites, tape.events),
        skipped=skipped,
        first=first_convolution,
    )


def _batch_size(sample: Any) -> int:
    if isinstance(sample, dict):
        return max(len(next(tensors(sample))), 1)
    return max(len(sample), 1)


def _weight_owners(model: nn.Module) -> Counter[int]:
    """How many module paths lead to each weight."""
    return Counter(
        id(module.weight)
        for _, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, LAYERS) and isinstance(module.weight, nn.Parameter)
    )


def _together(events: list[Event]) -> dict[str, list[Event]]:
    """Layers that run several times, on inputs that are all there before the first of them: the maps of a pyramid, not
    what came of an earlier run."""
    made = {key: number for number, event in enumerate(events) for key in event.outputs}
    runs: dict[str, list[int]] = defaultdict(list)
    for number, event in enumerate(events):
        if event.kind == "layer":
            runs[event.name].append(number)
    return {
        name: [events[number] for number in numbers]
        for name, numbers in runs.items()
        if len(numbers) > 1
        and all(events[n].inputs and made.get(events[n].inputs[0], -1) < numbers[0] for n in numbers)
    }


def _one_site(parts: list[_Found]) -> _Found | None:
    """Of the calls of one layer; None where they cannot be fitted as one."""
    first = parts[0]
    if any(part.site.adds or part.site.batch_norm for part in parts):
        return None
    same = all(part.site.activation.same_as(first.site.activation) for part in parts)
    site = replace(
        first.site,
        cost=sum((part.site.cost for part in parts[1:]), first.site.cost),
        activation=first.site.activation if same else ActivationSpec(note="different activations follow its calls"),
        feeds=None,
        calls=len(parts),
    )
    return replace(first, site=site)


def _refusal(module: Any, hooked: bool, again: bool, owners: Counter[int]) -> str | None:
    kind = kind_of(module)
    if kind.refusal is not None:
        return kind.refusal
    if has_own_forward(module):
        return reasons.CUSTOM
    if not module.weight.is_floating_point():
        return reasons.NOT_REAL
    if hooked:
        return reasons.HOOKED
    if again:
        return reasons.USED_AGAIN
    if owners[id(module.weight)] > 1:
        return reasons.SHARED
    if kind.over_a_map and module.groups == module.in_channels > 1:
        return reasons.DEPTHWISE
    return None


def _describe(event: Event, module: Any, batch: int) -> Layer:
    """``module``: one of LAYERS. They share attributes, but no public base class."""
    kind = kind_of(module)
    on_map = kind.over_a_map
    stride = module.stride if on_map else 1
    kernel = tuple(module.kernel_size) if on_map else (1,)
    return Layer(
        name=event.name,
        type=type(module).__name__,
        in_channels=module.in_channels if on_map else module.in_features,
        out_channels=module.out_channels if on_map else module.out_features,
        kernel=kernel,
        stride=(stride,) * len(kernel) if isinstance(stride, int) else tuple(stride),
        groups=module.groups if on_map else 1,
        out_size=kind.sizes(event.in_shape, event.out_shape, batch)[1],
        macs=kind.macs(tuple(module.weight.shape), event.in_shape, event.out_shape, batch),
        parameters=module.weight.numel() + (module.bias.numel() if isinstance(module.bias, Tensor) else 0),
    )


def _describe_call(event: Event, batch: int) -> Layer:
    kind = kind_of_function(event.function)
    assert kind is not None
    in_channels, out_channels = (shape[kind.channel_axis(len(shape))] for shape in (event.in_shape, event.out_shape))
    return Layer(
        name=event.name,
        type=event.name.partition("#")[0],
        in_channels=in_channels,
        out_channels=out_channels,
        kernel=event.weight_shape[2:],
        stride=(),
        groups=kind.groups(event.weight_shape, in_channels, out_channels),
        out_size=kind.sizes(event.in_shape, event.out_shape, batch)[1],
        macs=kind.macs(event.weight_shape, event.in_shape, event.out_shape, batch),
        parameters=0,
    )


@dataclass(frozen=True)
class _Found:
    """A site with what decides its place among its neighbours: the key of its input, of its response, and of the
    tensors added to it."""

    site: Site
    input: Key | None
    response: Key
    addends: tuple[Key, ...]


def _find_site(
    event: Event,
    geometry: Geometry,
    consumers: dict[Key, list[Event]],
    calls: Counter[str],
    batch: int,
    index: int,
) -> _Found:
    kind = KINDS[geometry.kind]
    in_size, out_size, repeats = kind.sizes(event.in_shape, event.out_shape, batch)
    # Batch norm and PReLU's slopes act on axis 1, which a Linear layer's filters lie on where its rows are flat.
    filters_on_axis_1 = kind.channel_axis(len(event.out_shape)) == 1
    tail = event
    batch_norm: str | None = None
    following = _only_consumer(event, consumers)
    if following and following.kind == "batch_norm" and filters_on_axis_1 and calls[following.name] == 1:
        batch_norm, tail = following.name, following
        following = _only_consumer(following, consumers)
    addends: list[Key] = []
    last = tail
    while following and following.kind == "add":
        addends += [key for key in following.inputs if key != last.outputs[0]]
        last, following = following, _only_consumer(following, consumers)
    activation = ActivationSpec()
    if following and following.kind == "activation" and following.activation:
        activation = following.activation
    alone = following is not None and following.kind == "layer" and calls[following.name] == 1
    feeds = following.name if following and alone and not addends else None
    slope = activation.parameters.get("slope")
    if not filters_on_axis_1 and isinstance(slope, Tensor) and slope.numel() > 1:
        activation = ActivationSpec(note="the slopes of the PReLU that follows belong to rows, not to its filters")
    site = Site(
        name=event.name,
        geometry=geometry,
        in_size=in_size,
        out_size=out_size,
        cost=Cost.of(geometry, in_size, out_size, repeats),
        batch_norm=batch_norm,
        activation=activation,
        adds=len(addends),
        index=index,
        feeds=feeds,
    )
    return _Found(site, event.inputs[0] if event.inputs else None, tail.outputs[0], tuple(addends))


def _arrange(found: list[_Found], events: list[Event]) -> tuple[Site, ...]:
    """Settle who answers for a sum, and the order to solve in.

    Where several sites are added up, one is fitted with the others as its addends: the deepest, whose own input was
    made last. The others are plain linear sites and come before it.
    """
    made = {key: number for number, event in enumerate(events) for key in event.outputs}
    by_response = {item.response: item for item in found}
    order: list[Site] = []
    waiting: dict[str, list[Site]] = {}  # sites that wait for a later one

    def place(site: Site) -> None:
        order.append(site)
        for other in waiting.pop(site.name, []):
            place(other)

    def depth(item: _Found) -> int:
        return made.get(item.input, -1) if item.input is not None else -1

    for item in found:
        site = item.site
        partners = [by_response[key] for key in item.addends if key in by_response]
        # Equal depth (two convolutions of one tensor added up): the one that runs last answers.
        if any((depth(other), other.site.index) > (depth(item), site.index) for other in partners):
            site = replace(site, adds=0, activation=ActivationSpec())
        else:
            later = [other.site for other in partners if other.site.index > site.index]
            if later:
                waiting.setdefault(max(later, key=lambda other: other.index).name, []).append(site)
                continue
        place(site)
    return tuple(order)


def _only_consumer(event: Event, consumers: dict[Key, list[Event]]) -> Event | None:
    if len(event.outputs) != 1:
        return None
    found = consumers.get(event.outputs[0], [])
    return found[0] if len(found) == 1 else None
