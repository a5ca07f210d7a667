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
from leanconv.network.layers.geometry import Cost, Geometry
from leanconv.network.layers.kinds import KINDS, LAYERS, kind_of, kind_of_function
from leanconv.network.recognise import has_hooks, has_own_forward
from leanconv.network.sites import Layer, Site, Survey


def survey(model: nn.Module, sample: Any, *, layers: Literal["conv", "all"] = "conv") -> Survey:
    """Run ``model`` (in eval mode) once on ``sample`` and list its layers and sites.

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
    with recording(model) as recorded:
        recorded.finish(model(sample))
    record = _Record(recorded.events, batch)
    owners = _weight_owners(model)

    described: dict[str, Layer] = {}
    sites: list[_Candidate] = []
    skipped: dict[str, str] = {}
    for position, event in enumerate(record.events):
        if event.kind == "call":
            described[event.name] = _describe_call(event, batch)
            skipped[event.name] = reasons.FUNCTION
        if event.kind != "layer" or event.name not in counted or event.name in described:
            continue
        module, calls = counted[event.name], record.calls[event.name]
        described[event.name] = _describe(calls, module, batch)
        # The maps of a pyramid: every input exists before the first call, none is the output of an earlier one.
        parallel = all(call.inputs and record.made_at.get(call.inputs[0], -1) < position for call in calls)
        again = len(calls) > 1 and not parallel
        reason = _refusal(module, event.name in hooked, again, owners)
        plain = None if reason else plain_form(module, event.in_shape[2:])
        candidate = None
        if plain:
            candidate = _merge_calls([_candidate(record, call, plain.geometry, len(sites)) for call in calls])
        if candidate:
            sites.append(candidate)
        else:
            skipped[event.name] = reason or (reasons.USED_AGAIN if plain else reasons.CUSTOM)
    skipped |= {name: reasons.UNUSED for name in counted if name not in described}
    convolutions = (name for name in described if name not in counted or kind_of(counted[name]).over_a_map)
    return Survey(
        layers=tuple(described.values()),
        sites=_arrange(sites, record.made_at),
        skipped=skipped,
        first=next(convolutions, None),
    )


class _Record:
    """The ``events`` of the run, by what they made and used. ``calls``: of layers and batch norms, by path."""

    def __init__(self, events: list[Event], batch: int) -> None:
        self.events, self.batch = events, batch
        self.made_at = {key: position for position, event in enumerate(events) for key in event.outputs}
        self.calls: dict[str, list[Event]] = defaultdict(list)
        self._consumers: dict[Key, list[Event]] = defaultdict(list)
        for event in events:
            if event.kind in ("layer", "batch_norm"):
                self.calls[event.name].append(event)
            for key in set(event.inputs):
                self._consumers[key].append(event)

    def only_consumer(self, event: Event) -> Event | None:
        """The event that uses the one output of ``event``; None if there are several outputs or uses."""
        uses = self._consumers.get(event.outputs[0], []) if len(event.outputs) == 1 else []
        return uses[0] if len(uses) == 1 else None


def _batch_size(sample: Any) -> int:
    images = next(tensors(sample)) if isinstance(sample, dict) else sample
    return max(len(images), 1)


def _weight_owners(model: nn.Module) -> Counter[int]:
    """How many module paths lead to each weight."""
    return Counter(
        id(module.weight)
        for _, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, LAYERS) and isinstance(module.weight, nn.Parameter)
    )


def _merge_calls(calls: list[_Candidate]) -> _Candidate | None:
    """One site of all calls of a layer; None where they cannot be fitted together."""
    first = calls[0]
    if len(calls) == 1:
        return first
    if any(call.site.adds or call.site.batch_norm for call in calls):
        return None
    same = all(call.site.activation.same_as(first.site.activation) for call in calls)
    site = replace(
        first.site,
        cost=sum((call.site.cost for call in calls[1:]), first.site.cost),
        activation=first.site.activation if same else ActivationSpec(note="different activations follow its calls"),
        feeds=None,
        calls=len(calls),
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


def _describe(calls: list[Event], module: Any, batch: int) -> Layer:
    """``module``: one of LAYERS. They share attributes, but no public base class. Every call costs again."""
    first, weight_shape = calls[0], tuple(module.weight.shape)
    kind = kind_of(module)
    on_map = kind.over_a_map
    return Layer(
        name=first.name,
        type=type(module).__name__,
        in_channels=module.in_channels if on_map else module.in_features,
        out_channels=module.out_channels if on_map else module.out_features,
        kernel=tuple(module.kernel_size) if on_map else (1,),
        stride=kind.each(module.stride) if on_map else (1,),
        groups=module.groups if on_map else 1,
        out_size=kind.sizes(first.in_shape, first.out_shape, batch)[1],
        macs=sum(kind.macs(weight_shape, call.in_shape, call.out_shape, batch) for call in calls),
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
class _Candidate:
    """A site and what decides when it is solved: the keys of its input, of its response, and of the tensors added to
    the response."""

    site: Site
    input: Key | None
    response: Key
    addends: tuple[Key, ...]


def _candidate(record: _Record, event: Event, geometry: Geometry, index: int) -> _Candidate:
    """From one call of a layer. ``index``: of the layer in the order of execution."""
    kind = KINDS[geometry.kind]
    in_size, out_size, repeats = kind.sizes(event.in_shape, event.out_shape, record.batch)
    # Batch norm and PReLU's slopes act on axis 1. That is the axis of a Linear layer's filters only for flat rows.
    filters_on_axis_1 = kind.channel_axis(len(event.out_shape)) == 1
    tail, following = event, record.only_consumer(event)
    batch_norm: str | None = None
    if following and following.kind == "batch_norm" and filters_on_axis_1 and len(record.calls[following.name]) == 1:
        batch_norm, tail, following = following.name, following, record.only_consumer(following)
    addends: list[Key] = []
    last = tail
    while following and following.kind == "add":
        addends += [key for key in following.inputs if key != last.outputs[0]]
        last, following = following, record.only_consumer(following)
    activation = (following and following.activation) or ActivationSpec()
    alone = following is not None and following.kind == "layer" and len(record.calls[following.name]) == 1
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
    return _Candidate(site, event.inputs[0] if event.inputs else None, tail.outputs[0], tuple(addends))


def _arrange(candidates: list[_Candidate], made_at: dict[Key, int]) -> tuple[Site, ...]:
    """Choose the site that is fitted to each sum, and the order to solve in.

    Where several sites are added up, one is fitted with the others as its addends: the deepest, whose own input was
    made last. The others are fitted linearly, without addends, and are solved before it.
    """
    by_response = {item.response: item for item in candidates}
    order: list[Site] = []
    waiting: dict[str, list[Site]] = {}  # by the name of the later site they wait for

    def append(site: Site) -> None:
        order.append(site)
        for other in waiting.pop(site.name, []):
            append(other)

    def depth(item: _Candidate) -> int:
        return made_at.get(item.input, -1) if item.input is not None else -1

    for item in candidates:
        site = item.site
        partners = [by_response[key] for key in item.addends if key in by_response]
        # Equal depth (two convolutions of one tensor added up): the one that runs last is fitted to the sum.
        if any((depth(other), other.site.index) > (depth(item), site.index) for other in partners):
            site = replace(site, adds=0, activation=ActivationSpec())
        else:
            later = [other.site for other in partners if other.site.index > site.index]
            if later:
                waiting.setdefault(max(later, key=lambda other: other.index).name, []).append(site)
                continue
        append(site)
    return tuple(order)
