"""The spatial scheme fitted to data: every site's spatial pair trained to give the original's responses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from leanconv.calibrate.patches import Positions, conv_patches
from leanconv.calibrate.probe import Probe
from leanconv.engine import Engine
from leanconv.errors import LeanconvError
from leanconv.solve import SpatialFactors
from leanconv.solve.spatial_sgd import reconstruct

# Bytes of patches a site is fitted to, at most.
PATCHES = 256 << 20


def reconstructed(engine: Engine, dense: Probe, split: SpatialFactors) -> tuple[SpatialFactors, Tensor]:
    """The factors and bias of a site, from ``split``. ``dense`` is the probe of the original's filters."""
    patches = _patches(engine, dense)
    target = torch.addmm(dense.bias, patches, dense.weight.flatten(1).T)
    x = patches.reshape(len(patches), *dense.weight.shape[1:])
    with torch.enable_grad():
        found = reconstruct(x, target, split, dense.bias, seed=engine.options.seed)
    return found.factors, found.bias


class _Stop(Exception):
    pass


def _patches(engine: Engine, dense: Probe) -> Tensor:
    """Patches the original gives the site, spread over the images: n x (c k)."""
    site, batches = dense.site, engine.batches
    room = PATCHES // (site.geometry.patch * dense.weight.element_size())
    count = max(1, min(engine.options.samples, room))
    positions = Positions(
        per_image=max(1, -(-count // batches.images)),
        images=batches.images,
        seed=engine.options.seed,
        device=engine.device,
    )
    kept: list[Tensor] = []

    def take(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        kept.append(inputs[0])
        raise _Stop

    found: list[Tensor] = []
    handle = engine.original.get_submodule(site.name).register_forward_pre_hook(take)
    try:
        for batch in batches:
            try:
                with torch.no_grad():
                    engine.original(batch.on(engine.device))
            except _Stop:
                x = kept.pop()
                chosen = positions.choose(site.positions, batch.first, len(x), images=len(x) == batch.size)
                found.append(conv_patches(x, site.geometry, chosen).to(dense.weight.dtype))
    finally:
        handle.remove()
    if not found:
        raise LeanconvError(f"layer {site.name!r} did not run on these images; name it in skip.")
    return torch.cat(found)[:count]
