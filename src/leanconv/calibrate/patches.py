"""The inputs a filter sees at chosen output positions."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from leanconv.network.geometry import Geometry, torch_pad

# Images that share one draw of random numbers: positions are drawn for a page of images at once.
PAGE = 256


class Positions:
    """The output positions looked at, of every image at every site: the same whatever the batches are cut into.

    ``per_image`` positions of each map, all of them where there are hardly more. Kept on ``device``, 8 bytes each.
    """

    def __init__(self, *, per_image: int, seed: int, device: torch.device):
        self._per_image, self._seed, self._device = per_image, seed, device
        self._pages: dict[tuple[int, int, int], Tensor] = {}

    def count(self, positions: int) -> int:
        """How many of a map's positions are looked at."""
        return positions if positions <= 1.25 * self._per_image else self._per_image

    def of_images(self, site: int, positions: int, first: int, count: int) -> Tensor:
        """For images ``first`` to ``first + count``, maps of ``positions``: count x p."""
        if self.count(positions) == positions:
            return torch.arange(positions, device=self._device).expand(count, positions)
        parts = []
        for page in range(first // PAGE, (first + count - 1) // PAGE + 1):
            begin, end = max(first - page * PAGE, 0), min(first + count - page * PAGE, PAGE)
            parts.append(self._page(site, positions, page)[begin:end])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def of_rows(self, site: int, positions: int, batch: int, count: int) -> Tensor:
        """For a layer that runs on other rows than images, such as a detector's boxes: by the batch's number."""
        if self.count(positions) == positions:
            return torch.arange(positions, device=self._device).expand(count, positions)
        return choose_positions(count, positions, self._per_image, (self._seed, site, batch)).to(self._device)

    def _page(self, site: int, positions: int, page: int) -> Tensor:
        key = (site, positions, page)
        if key not in self._pages:
            chosen = choose_positions(PAGE, positions, self._per_image, (self._seed, site, page))
            self._pages[key] = chosen.to(self._device)
        return self._pages[key]


def choose_positions(images: int, positions: int, count: int, seed: tuple[int, int, int]) -> Tensor:
    """``count`` of the ``positions`` of every image: images x count, int64, on the CPU.

    ``seed`` is (run, site, page): the choice depends on nothing else, so both streams look at the same places
    without storing them. Distinct places where the map is small; where it is large a repeat is rare and harmless.
    """
    generator = torch.Generator().manual_seed(_mix(*seed))
    if positions <= 4 * count:
        return torch.rand(images, positions, generator=generator).argsort(dim=1)[:, :count]
    return torch.randint(positions, (images, count), generator=generator)


def _mix(run: int, site: int, page: int) -> int:
    return (run * 1_000_003 + site * 8_191 + page * 131_071) % (1 << 62)


def conv_patches(x: Tensor, geometry: Geometry, chosen: Tensor) -> Tensor:
    """Patches of ``x`` (N x C x size) at ``chosen`` (N x p, indices into the output positions): (N p) x (C k).

    Any number of dimensions. Gathering touches p k C numbers an image, where running the layer would touch every
    position; zeros around the image are put in afterwards, so that the image need not be copied.
    """
    out_size = geometry.out_size(tuple(x.shape[2:]))
    before, after = geometry.margins(tuple(x.shape[2:]))
    padded = any(before) or any(after)
    if padded and geometry.padding_mode != "zeros":
        x = F.pad(x, torch_pad(before, after), mode=geometry.padding_mode)
        padded, before = False, (0,) * len(before)
    n, c, *size = x.shape
    p = chosen.shape[1]
    index = torch.zeros(1, 1, 1, dtype=torch.int64, device=x.device)  # N x p x k, flat, into size
    inside = torch.ones(1, 1, 1, dtype=torch.bool, device=x.device)
    rest = chosen
    for axis, side in enumerate(size):
        inner = prod(out_size[axis + 1 :])
        corner = torch.div(rest, inner, rounding_mode="floor") * geometry.stride[axis] - before[axis]  # N x p
        rest = rest % inner
        along = torch.arange(geometry.kernel[axis], device=x.device) * geometry.dilation[axis]
        at = corner[:, :, None] + along
        if padded:
            inside = (inside[..., None] & ((at >= 0) & (at < side))[:, :, None]).flatten(2)
            at = at.clamp(0, side - 1)
        index = (index[..., None] * side + at[:, :, None]).flatten(2)
    k = index.shape[2]
    found = x.flatten(2).gather(2, index.reshape(n, 1, p * k).expand(n, c, p * k))
    if padded:
        found *= inside.reshape(n, 1, p * k)
    return found.reshape(n, c, p, k).permute(0, 2, 1, 3).reshape(-1, c * k)


def linear_patches(x: Tensor, chosen: Tensor) -> Tensor:
    """Rows of ``x`` (N x ... x C) at ``chosen`` (N x p): (N p) x C."""
    rows = x.reshape(x.shape[0], -1, x.shape[-1])
    return rows.gather(1, chosen[:, :, None].expand(-1, -1, rows.shape[2])).reshape(-1, rows.shape[2])


def outputs_at(y: Tensor, kind: str, chosen: Tensor) -> Tensor:
    """Outputs of a layer at ``chosen`` (N x p): (N p) x d, from N x d x size (N x ... x d for a Linear)."""
    rows = y.reshape(y.shape[0], -1, y.shape[-1]) if kind == "linear" else y.flatten(2).transpose(1, 2)
    if chosen.shape[1] == rows.shape[1]:
        return rows.reshape(-1, rows.shape[2])  # all of them, which are in order
    return rows.gather(1, chosen[:, :, None].expand(-1, -1, rows.shape[2])).reshape(-1, rows.shape[2])
