"""The spatial scheme fitted to data: every site's spatial pair trained to give the original's responses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from leanconv.calibrate.positions import Positions, conv_patches
from leanconv.calibrate.probes import Probe, Responses
from leanconv.calibrate.samples import Piece
from leanconv.errors import LeanconvError
from leanconv.pipeline.engine import Engine
from leanconv.solve import SpatialFactors
from leanconv.solve.spatial_sgd import reconstruct

# Bytes of patches a site is fitted to, at most.
PATCHES = 256 << 20


def reconstructed(engine: Engine, dense: Probe, split: SpatialFactors) -> tuple[SpatialFactors, Tensor, int]:
    """The factors and bias of a site, from ``split``, and how many patches they were fitted to, in every process.
    ``dense`` probes the original's filters."""
    patches = _patches(engine, dense)
    found: tuple[SpatialFactors, Tensor, int] | None = None
    if engine.team.lead:
        if not patches:
            raise LeanconvError(f"layer {dense.site.name!r} did not run on these images; name it in skip.")
        rows = torch.cat(patches)
        target = torch.addmm(dense.bias, rows, dense.weight.flatten(1).T)
        x = rows.reshape(len(rows), *dense.weight.shape[1:])
        with torch.enable_grad():
            fitted = reconstruct(x, target, split, dense.bias, seed=engine.options.seed)
        found = fitted.factors, fitted.bias, len(rows)
    return engine.team.share(found)


class _Stop(Exception):
    pass


def _patches(engine: Engine, dense: Probe) -> list[Tensor]:
    """Patches the original gives the site, spread over the images of all processes, n x (c k) each; at the lead."""
    site, images = dense.site, engine.batches.images
    room = PATCHES // (site.geometry.patch * dense.weight.element_size())
    count = max(1, min(engine.options.most_samples, room))
    each = -(-images // count)  # every so many-th image, where there are more than patches
    positions = Positions(
        per_image=max(1, count * each // images), images=images, seed=engine.options.seed, device=engine.device
    )
    kept: list[Tensor] = []

    def take(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        kept.append(inputs[0])
        raise _Stop

    found: list[Piece] = []
    handle = engine.original.get_submodule(site.name).register_forward_pre_hook(take)
    try:
        for batch in engine.batches:
            try:
                with torch.no_grad():
                    engine.original(engine.inputs.get(batch))
            except _Stop:
                x = kept.pop()
                chosen = positions.choose(site.positions, batch.first, len(x), images=len(x) == batch.size)
                rows = conv_patches(x, site.geometry, chosen).to(dense.weight.dtype)
                here = torch.arange(batch.first, batch.first + len(x), device=rows.device) % each == 0
                mine = rows.reshape(len(x), -1, rows.shape[1])[here].flatten(0, 1)
                found.append((batch.first, Responses(mine)))
    finally:
        handle.remove()
    return [piece.y for _, piece in engine.team.gather(found)]
