"""Where a network comes from: how to name it in a saved folder and build it again."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from leanconv.errors import LeanconvError, unknown_name
from leanconv.network.recognise import has_hooks


@dataclass(frozen=True, kw_only=True)
class Source:
    """``torchvision`` and ``timm`` networks are built by name. ``other`` needs the user's own code: ``name`` only
    says which, since nothing a file names is ever run."""

    library: Literal["torchvision", "timm", "other"]
    name: str
    classes: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {"library": self.library, "name": self.name, "classes": self.classes}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Source:
        return cls(library=data["library"], name=data["name"], classes=data["classes"])


def identify(model: nn.Module) -> Source:
    """The source of a live network: a torchvision builder whose product is the same in every respect but weights."""
    kind = type(model)
    # Hooks and forwards set on an instance would be lost in rebuilding.
    if any(has_hooks(module) for module in model.modules()):
        return Source(library="other", name=f"{kind.__module__}.{kind.__qualname__} with hooks of its own")
    if kind.__module__.startswith("torchvision.models."):
        from torchvision.models import get_model_builder, list_models

        outputs = _last_outputs(model)
        family = [name for name in list_models() if get_model_builder(name).__module__ == kind.__module__]
        for name in family:
            for classes in (None, outputs):
                if _same_shape(model, name, classes):
                    return Source(library="torchvision", name=name, classes=classes)
    return Source(library="other", name=f"{kind.__module__}.{kind.__qualname__}")


def build(source: Source, *, pretrained: Any = None) -> nn.Module:
    """A fresh network. ``pretrained`` is what the library takes: torchvision's weights, timm's True."""
    arguments: dict[str, Any] = {} if source.classes is None else {"num_classes": source.classes}
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
        timm = require_timm()
        if not timm.is_model(source.name):
            raise unknown_name(source.name, timm.list_models(), what="timm model", where="MODEL")
        network: nn.Module = timm.create_model(source.name, pretrained=bool(pretrained), **arguments)
        return network
    raise LeanconvError(
        f"this network is {source.name!r}, which leanconv cannot build by name; build it yourself (any weights) and "
        "pass it: leanconv.load(folder, model=...), or --model file.py:callable."
    )


def require_timm() -> Any:
    try:
        import timm
    except ImportError:
        raise LeanconvError("timm is not installed; pip install 'leanconv[timm]'.") from None
    return timm


def _last_outputs(model: nn.Module) -> int | None:
    outputs = None
    for module in model.modules():
        if isinstance(module, nn.Linear):
            outputs = module.out_features
        elif isinstance(module, nn.Conv2d):
            outputs = module.out_channels
    return outputs


def _same_shape(model: nn.Module, name: str, classes: int | None) -> bool:
    """Compare with the builder's product on the meta device: no memory, no time, no random numbers.

    RegNet's builders compute with tensors and fail there; such a network is 'other' unless the caller knows its name.
    """
    try:
        with torch.device("meta"):
            other = build(Source(library="torchvision", name=name, classes=classes))
    except Exception:
        return False
    return _fingerprint(model) == _fingerprint(other)


def _fingerprint(model: nn.Module) -> list[Any]:
    """Types, paths, shapes and every plain attribute (flags such as transform_input decide the answer too)."""
    plain = (bool, int, float, str, tuple, type(None))
    modules = [
        (path, type(module), {k: v for k, v in vars(module).items() if isinstance(v, plain) and k != "training"})
        for path, module in model.named_modules()
    ]
    tensors = [(key, tuple(value.shape)) for key, value in model.state_dict().items()]
    return [modules, tensors]
