"""The inputs a filter sees at chosen output positions."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from leanconv.network.geometry import Geometry, torch_pad


def choose_positions(images: int, positions: int, count: int, seed: tuple[int, int, int]) -> Tensor:
    """``count`` of the ``positions`` of every image: images x count, int64, on the CPU.

    ``seed`` is (run, site, batch): the choice depends on nothing else, so both streams look at the same places
    without storing them. Distinct places where the map is small; where it is large a repeat is rare and harmless.
    """
    if count >= positions:
        return torch.arange(positions).expand(images, positions)
    generator = torch.Generator().manual_seed(_mix(*seed))
    if positions <= 4 * count:
        return torch.rand(images, positions, generator=generator).argsort(dim=1)[:, :count]
    return torch.randint(positions, (images, count), generator=generator)


def _mix(run: int, site: int, batch: int) -> int:
    return (run * 1_000_003 + site * 8_191 + batch * 131_071) % (1 << 62)


def conv_patches(x: Tensor, geometry: Geometry, chosen: Tensor) -> Tensor:
    """Patches of ``x`` (N x C x size) at ``chosen`` (N x p, indices into the output positions): (N p) x (C k).

    Any number of dimensions. Gathering touches p k C numbers an image, where running the layer would touch every
    position.
    """
    out_size = geometry.out_size(tuple(x.shape[2:]))
    before, after = geometry.margins(tuple(x.shape[2:]))
    if any(before) or any(after):
        mode = "constant" if geometry.padding_mode == "zeros" else geometry.padding_mode
        x = F.pad(x, torch_pad(before, after), mode=mode)
    n, c, *size = x.shape
    corner = torch.zeros_like(chosen)  # flat index of the patch's first number
    window = torch.zeros(1, dtype=torch.int64, device=x.device)  # flat offsets inside the patch
    rest = chosen
    for axis in range(len(size)):
        jump = prod(size[axis + 1 :])
        inner = prod(out_size[axis + 1 :])
        corner = corner + torch.div(rest, inner, rounding_mode="floor") * geometry.stride[axis] * jump
        rest = rest % inner
        along = torch.arange(geometry.kernel[axis], device=x.device) * geometry.dilation[axis] * jump
        window = (window[:, None] + along).flatten()
    index = (corner[:, :, None] + window).flatten(1)  # N x (p k)
    found = x.flatten(2).gather(2, index[:, None].expand(n, c, index.shape[1]))
    k = len(window)
    return found.reshape(n, c, chosen.shape[1], k).permute(0, 2, 1, 3).reshape(-1, c * k)


def linear_patches(x: Tensor, chosen: Tensor) -> Tensor:
    """Rows of ``x`` (N x ... x C) at ``chosen`` (N x p): (N p) x C."""
    rows = x.reshape(x.shape[0], -1, x.shape[-1])
    return rows.gather(1, chosen[:, :, None].expand(-1, -1, rows.shape[2])).reshape(-1, rows.shape[2])


def outputs_at(y: Tensor, kind: str, chosen: Tensor) -> Tensor:
    """Outputs of a layer at ``chosen`` (N x p): (N p) x d, from N x d x size (N x ... x d for a Linear)."""
    rows = y.reshape(y.shape[0], -1, y.shape[-1]) if kind == "linear" else y.flatten(2).transpose(1, 2)
    return rows.gather(1, chosen[:, :, None].expand(-1, -1, rows.shape[2])).reshape(-1, rows.shape[2])
