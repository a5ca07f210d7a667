"""Which layers can really be replaced: a trial on the sample, since a network may do anything with its modules.

It may hold a layer in a plain list, read its attributes, ask for its type, or use a convolution's raw output behind
the back of the batch norm that would be folded away. So the trial puts in place what replacing would, with nothing
approximated yet, and compares the network's answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from leanconv.network.fold import folded, without_norm
from leanconv.network.plain import is_plain
from leanconv.network.recording import map_tensors, tensors
from leanconv.network.replace import Factors, dense_modules, put, set_weights
from leanconv.network.sites import ActivationSpec, Site

# Relative difference of outputs that rounding explains; a wrong replacement is off by far more.
SAME = {torch.float64: 1e-6, torch.float32: 1e-3}
SAME_HALF = 0.1


def replaceable(model: nn.Module, sites: list[Site], sample: Any) -> list[Site]:
    """The sites that can be replaced, with batch norm folded where that is right too.

    One extra run when all is well, up to two a site when it is not.
    """
    reference = _answers(model, sample)
    if not any(answer.is_floating_point() for answer in reference):
        # Nothing to compare: do only what cannot change a value.
        sites = [_unfolded(site) for site in sites]
    if _survives(model, sites, sample, reference):
        return sites
    kept: list[Site] = []
    for site in sites:
        for candidate in [site, _unfolded(site)] if site.batch_norm else [site]:
            if _survives(model, [candidate], sample, reference):
                kept.append(candidate)
                break
    return kept if _survives(model, kept, sample, reference) else []


def _unfolded(site: Site) -> Site:
    """Without its batch norm the response is what goes into the norm, and nothing is known of what follows."""
    return site if site.batch_norm is None else replace(site, batch_norm=None, activation=ActivationSpec(), adds=0)


def _answers(model: nn.Module, sample: Any) -> list[Tensor]:
    """Outputs on a copy of the sample, with the same random numbers every time."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        inputs = map_tensors(lambda tensor: tensor.detach().clone(), sample)
        return [output.detach().clone() for output in tensors(model(inputs))]


def _survives(model: nn.Module, sites: list[Site], sample: Any, reference: list[Tensor]) -> bool:
    seen: set[str] = set()
    try:
        with _trial(model, sites, seen):
            outputs = _answers(model, sample)
    except Exception:
        return False
    return seen == {site.name for site in sites} and _same(outputs, reference)


def _same(outputs: list[Tensor], reference: list[Tensor]) -> bool:
    if [output.shape for output in outputs] != [wanted.shape for wanted in reference]:
        return False
    for output, wanted in zip(outputs, reference, strict=True):
        if not wanted.is_floating_point():
            continue
        difference = torch.linalg.vector_norm((output - wanted).double().nan_to_num())
        size = torch.linalg.vector_norm(wanted.double().nan_to_num())
        if not float(difference) <= SAME.get(wanted.dtype, SAME_HALF) * float(size):
            return False
    return True


@contextmanager
def _trial(model: nn.Module, sites: list[Site], seen: set[str]) -> Iterator[None]:
    """Every site's layer inside a Sequential that notes when it runs, batch norms folded; all put back at the end."""
    before: dict[str, nn.Module] = {}
    try:
        for site in sites:
            layer = model.get_submodule(site.name)
            wrapper = nn.Sequential(_exact(model, site, layer))
            wrapper.train(layer.training)

            def note(module: nn.Module, args: Any, result: Any, name: str = site.name) -> None:
                seen.add(name)

            wrapper.register_forward_hook(note)
            before[site.name] = layer
            put(model, site.name, wrapper)
            if site.batch_norm is not None:
                before[site.batch_norm] = model.get_submodule(site.batch_norm)
                put(model, site.batch_norm, without_norm(before[site.batch_norm]))
        yield
    finally:
        for path, module in before.items():
            put(model, path, module)


def _exact(model: nn.Module, site: Site, layer: nn.Module) -> nn.Module:
    """The layer itself, or where its weight is computed or a batch norm follows, a plain one that does the same."""
    if site.batch_norm is None and is_plain(layer):
        return layer
    old = layer.weight
    assert isinstance(old, Tensor)
    weight, bias = folded(model, site, old.dtype)
    whole = dense_modules(site.geometry).to(old)
    set_weights(whole, Factors((weight,), bias))
    return whole
