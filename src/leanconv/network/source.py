"""Where a network comes from: how to name it in a saved folder and build it again."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Literal

import torch
from torch import nn

from leanconv import models
from leanconv.errors import LeanconvError, unknown_name
from leanconv.network.layers.modules import blank
from leanconv.network.recognise import has_hooks


@dataclass(frozen=True, kw_only=True)
class Source:
    """``torchvision``, ``timm`` and leanconv's own networks are built by name. ``other`` needs the user's own code:
    ``name`` only says which, since code named in a file never runs."""

    library: Literal["torchvision", "timm", "leanconv", "other"]
    name: str
    classes: int | None = None
    flags: tuple[tuple[str, bool], ...] = ()  # builder arguments; only those of VARIANTS

    def to_json(self) -> dict[str, Any]:
        return {"library": self.library, "name": self.name, "classes": self.classes, "flags": dict(self.flags)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Source:
        flags = tuple((str(key), bool(value)) for key, value in data["flags"].items())
        classes = None if data["classes"] is None else int(data["classes"])
        if data["library"] not in ("torchvision", "timm", "leanconv", "other") or flags not in VARIANTS:
            raise ValueError(f"source {data}")
        return cls(library=data["library"], name=str(data["name"]), classes=classes, flags=flags)


# What torchvision's builders set by themselves for trained weights (Inception and GoogLeNet).
VARIANTS: tuple[tuple[tuple[str, bool], ...], ...] = (
    (),
    (("transform_input", True),),
    (("aux_logits", False), ("transform_input", True)),
    (("aux_logits", False),),
)


def identify(model: nn.Module) -> Source:
    """Where a network comes from: the builder of torchvision or leanconv that makes it, except for its weights."""
    kind = type(model)
    name = f"{kind.__module__}.{kind.__qualname__}"
    # Rebuilding would lose hooks and forwards that were set on an instance.
    if any(has_hooks(module) for module in model.modules()):
        return Source(library="other", name=f"{name} with hooks of its own")
    candidates = list(_candidates(kind, _last_outputs(model)))
    fingerprint = _fingerprint(model) if candidates else []
    for source in candidates:
        if _built(source) == fingerprint:
            return source
    return Source(library="other", name=name)


def _candidates(kind: type[nn.Module], outputs: int | None) -> Iterator[Source]:
    """What could have built a network of this class. The builders' own choices first: most networks are that."""
    if kind.__module__.startswith("torchvision.models."):
        from torchvision.models import get_model_builder, list_models

        family = [name for name in list_models() if get_model_builder(name).__module__ == kind.__module__]
        for flags, classes, name in product(VARIANTS, (None, outputs), family):
            yield Source(library="torchvision", name=name, classes=classes, flags=flags)
    elif kind.__module__.startswith("leanconv.models"):
        for classes, name in product((None, outputs), models.BUILDERS):
            yield Source(library="leanconv", name=name, classes=classes)


def confirmed(model: nn.Module, found: Source, source: Source) -> Source:
    """``found`` by ``identify``; if that is unknown, ``source`` if its network equals ``model`` except for weights."""
    if found.library != "other":
        return found
    if source.library == "other":
        return source
    with torch.random.fork_rng(devices=[]):
        return source if _fingerprint(model) == _fingerprint(build(source)) else found


def build(source: Source, *, pretrained: Any = None) -> nn.Module:
    """A fresh network. ``pretrained`` is what the library takes: torchvision's weights, timm's True."""
    arguments: dict[str, Any] = dict(source.flags)
    if source.classes is not None:
        arguments["num_classes"] = source.classes
    if source.library == "torchvision":
        import torchvision

        try:
            builder: Callable[..., nn.Module] = torchvision.models.get_model_builder(source.name)
        except ValueError:
            raise unknown_name(
                source.name, torchvision.models.list_models(), what="torchvision model", where="MODEL"
            ) from None
        if pretrained is None and "weights_backbone" in inspect.signature(builder).parameters:
            arguments["weights_backbone"] = None  # a detector would fetch them otherwise
        return builder(weights=pretrained, **arguments)
    if source.library == "timm":
        try:
            import timm
        except ImportError:
            raise LeanconvError("timm is not installed; pip install 'leanconv[timm]'.") from None
        if not timm.is_model(source.name):
            raise unknown_name(source.name, timm.list_models(), what="timm model", where="MODEL")
        network: nn.Module = timm.create_model(source.name, pretrained=bool(pretrained), **arguments)
        return network
    if source.library == "leanconv":
        if source.name not in models.BUILDERS:
            raise unknown_name(source.name, models.BUILDERS, what="leanconv model", where="MODEL")
        return models.BUILDERS[source.name](**arguments)
    raise LeanconvError(
        f"this network is {source.name!r}, which leanconv cannot build by name; build it yourself (any weights) and "
        "pass it: leanconv.load(folder, model=...), or --model file.py:callable."
    )


def _last_outputs(model: nn.Module) -> int | None:
    """Outputs of the last Linear layer or convolution."""
    last = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))][-1:]
    return next((layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels for layer in last), None)


@lru_cache(maxsize=256)
def _built(source: Source) -> list[Any] | None:
    """What a builder makes, on the meta device: no memory, no random numbers, and only once a process.

    RegNet's builders compute with tensors and fail there; such a network is 'other' unless the caller knows its name.
    """
    try:
        with blank(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _fingerprint(build(source))
    except Exception:
        return None


def _fingerprint(model: nn.Module) -> list[Any]:
    """Types, paths, shapes and every plain attribute (flags such as transform_input decide the answer too)."""
    plain = (bool, int, float, str, tuple, type(None))
    modules = [
        (path, type(module), {k: v for k, v in vars(module).items() if isinstance(v, plain) and k != "training"})
        for path, module in model.named_modules()
    ]
    tensors = [(key, tuple(value.shape)) for key, value in model.state_dict().items()]
    return [modules, tensors]
