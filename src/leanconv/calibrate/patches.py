"""The inputs a filter sees at chosen output positions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from leanconv.network.geometry import Geometry


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


def conv_patches(x: Tensor, geometry: Geometry, out_width: int, chosen: Tensor) -> Tensor:
    """Patches of ``x`` (N x C x H x W) at ``chosen`` (N x p, indices into H_out * W_out): (N p) x (C kh kw).

    Gathering touches p kh kw C numbers an image, where running the layer would touch every position.
    """
    margins = geometry.margins()
    if any(margins):
        mode = "constant" if geometry.padding_mode == "zeros" else geometry.padding_mode
        x = F.pad(x, margins, mode=mode)
    n, c, _, width = x.shape
    kh, kw = geometry.kernel
    rows = torch.div(chosen, out_width, rounding_mode="floor") * geometry.stride[0]
    columns = chosen % out_width * geometry.stride[1]
    down = torch.arange(kh, device=x.device) * geometry.dilation[0]
    across = torch.arange(kw, device=x.device) * geometry.dilation[1]
    window = (down[:, None] * width + across).flatten()
    index = ((rows * width + columns)[:, :, None] + window).flatten(1)  # N x (p kh kw)
    found = x.flatten(2).gather(2, index[:, None].expand(n, c, index.shape[1]))
    return found.reshape(n, c, chosen.shape[1], kh * kw).permute(0, 2, 1, 3).reshape(-1, c * kh * kw)


def linear_patches(x: Tensor, chosen: Tensor) -> Tensor:
    """Rows of ``x`` (N x ... x C) at ``chosen`` (N x p): (N p) x C."""
    rows = x.reshape(x.shape[0], -1, x.shape[-1])
    return rows.gather(1, chosen[:, :, None].expand(-1, -1, rows.shape[2])).reshape(-1, rows.shape[2])
