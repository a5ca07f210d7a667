"""Which layers can really be replaced: a network may hold a layer in a plain list, or read its attributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from leanconv.network.replace import put


def replaceable(model: nn.Module, names: Iterable[str], sample: Any) -> set[str]:
    """Those of ``names`` that, with a Sequential standing at their path, are still run by ``model(sample)``.

    One run when all is well; a run a layer when the network does not survive the trial.
    """
    names = list(names)
    try:
        return _reached(model, names, sample)
    except Exception:
        return {name for name in names if _survives(model, name, sample)}


def _survives(model: nn.Module, name: str, sample: Any) -> bool:
    try:
        return name in _reached(model, [name], sample)
    except Exception:
        return False


def _reached(model: nn.Module, names: list[str], sample: Any) -> set[str]:
    seen: set[str] = set()
    with _wrapped(model, names, seen), torch.no_grad():
        model(sample)
    return seen


@contextmanager
def _wrapped(model: nn.Module, names: list[str], seen: set[str]) -> Iterator[None]:
    """Every named layer inside a Sequential that notes when it runs; all put back at the end."""
    layers = {name: model.get_submodule(name) for name in names}
    try:
        for name, layer in layers.items():
            wrapper = nn.Sequential(layer)
            wrapper.train(layer.training)

            def note(module: nn.Module, args: Any, result: Any, name: str = name) -> None:
                seen.add(name)

            wrapper.register_forward_hook(note)
            put(model, name, wrapper)
        yield
    finally:
        for name, layer in layers.items():
            put(model, name, layer)
