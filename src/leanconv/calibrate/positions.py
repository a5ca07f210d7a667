"""The inputs a filter sees at chosen output positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from leanconv.network.layers.geometry import Geometry, Size, torch_pad
from leanconv.network.layers.kinds import KINDS

# Positions are drawn for so many images at once.
PAGE = 1024


@dataclass(frozen=True)
class Window:
    """Where the patches at some positions lie in an image: ``index`` N x p x k, flat, and which of those are ``inside``
    it (None: all)."""

    index: Tensor
    inside: Tensor | None


class Page:
    """Positions of some images at maps of one size, and where the patches at them lie: 8 bytes for each number of a
    patch, kept for each form of filters."""

    def __init__(self, at: Tensor):
        """``at``: N x p, indices into the output."""
        self.at = at
        self._windows: dict[tuple[Any, ...], Window] = {}

    def window(self, geometry: Geometry, in_size: Size) -> Window:
        g = geometry
        # Channels do not matter.
        key = (g.kernel, g.stride, g.padding, g.padding_after, g.dilation, g.padding_mode, in_size)
        if key not in self._windows:
            self._windows[key] = Window(*KINDS[g.kind].window(g, in_size, self.at))
        return self._windows[key]


@dataclass(frozen=True)
class Chosen:
    """Positions of the maps ``begin`` to ``end`` of a page."""

    page: Page
    begin: int
    end: int

    @property
    def at(self) -> Tensor:
        """N x p, indices into the output."""
        return self.page.at[self.begin : self.end]

    def window(self, geometry: Geometry, in_size: Size) -> Window:
        whole, rows = self.page.window(geometry, in_size), slice(self.begin, self.end)
        return Window(whole.index[rows], None if whole.inside is None else whole.inside[rows])


class Positions:
    """The output positions looked at, of every image at every site: the same for maps of one size, and whatever the
    batches are cut into (except where a layer runs on other rows than images).

    ``per_image`` positions of each map, or all of them where there are hardly more. They are drawn once for many of the
    ``images`` and kept on ``device``.
    """

    def __init__(self, *, per_image: int, images: int, seed: int, device: torch.device):
        self._per_image, self._images, self._seed, self.device = per_image, images, seed, device
        self._pages: dict[tuple[int, int], Page] = {}

    def count(self, positions: int) -> int:
        """How many of a map's positions are looked at."""
        return positions if positions <= 1.25 * self._per_image else self._per_image

    def choose(self, positions: int, first: int, rows: int, *, images: bool) -> Chosen:
        """For ``rows`` maps of ``positions``: those of the images from ``first`` on, or, where a layer runs on other
        rows than ``images``, such as a detector's boxes, of the batch that begins there."""
        if self.count(positions) == positions:
            at = torch.arange(positions, device=self.device).expand(rows, positions)
        elif not images or first + rows > self._images:  # or more images than were announced
            at = self._draw(rows, positions, first)
        else:
            page, begin = divmod(first, PAGE)
            if begin + rows <= PAGE:
                return Chosen(self._page(positions, page), begin, begin + rows)
            pages = [self._page(positions, page + i).at for i in range((begin + rows - 1) // PAGE + 1)]
            at = torch.cat(pages)[begin : begin + rows]
        return Chosen(Page(at), 0, rows)

    def _page(self, positions: int, page: int) -> Page:
        key = (positions, page)
        if key not in self._pages:
            self._pages[key] = Page(self._draw(min(PAGE, self._images - page * PAGE), positions, page))
        return self._pages[key]

    def _draw(self, rows: int, positions: int, page: int) -> Tensor:
        seed = (self._seed, positions, page)
        return choose_positions(rows, positions, self._per_image, seed).to(self.device)


def choose_positions(images: int, positions: int, count: int, seed: tuple[int, int, int]) -> Tensor:
    """``count`` of the ``positions`` of every image: images x count, int64, on the CPU.

    ``seed`` is (run, positions, page): the choice depends on nothing else, so both networks are looked at in the same
    places, which need not be stored. Places are distinct where the map is small; where it is large a repeat is rare and
    harmless.
    """
    run, size, page = seed
    generator = torch.Generator().manual_seed((run * 1_000_003 + size * 8_191 + page * 131_071) % (1 << 62))
    if positions <= 4 * count:
        return torch.rand(images, positions, generator=generator).argsort(dim=1)[:, :count]
    return torch.randint(positions, (images, count), generator=generator)


def conv_patches(x: Tensor, geometry: Geometry, chosen: Chosen) -> Tensor:
    """Patches of a layer's input ``x`` at ``chosen`` positions: (N p) x (C k).

    Gathering reads p k C numbers an image, where running the layer would read all; zeros around the image are put in
    afterwards, so that the image need not be copied.
    """
    kind = KINDS[geometry.kind]
    in_size = kind.map_size(x)
    window = chosen.window(geometry, in_size)
    if geometry.padding_mode != "zeros":
        x = F.pad(x, torch_pad(*geometry.margins(in_size)), mode=geometry.padding_mode)
    n, p, k = window.index.shape
    rows = kind.rows(x)
    c = rows.shape[2]
    if _in_rows(rows):
        patches = _rows_at(rows, window.index)
        if window.inside is not None:
            patches *= window.inside.reshape(-1, 1)
        return patches.reshape(n * p, k, c).transpose(1, 2).reshape(-1, c * k)
    patches = rows.transpose(1, 2).gather(2, window.index.reshape(n, 1, p * k).expand(n, c, p * k))
    if window.inside is not None:
        patches *= window.inside.reshape(n, 1, p * k)
    return patches.reshape(n, c, p, k).permute(0, 2, 1, 3).reshape(-1, c * k)


def _in_rows(rows: Tensor) -> bool:
    """Whether whole ``rows`` (N x positions x C) can be copied, which is many times faster than single numbers."""
    return rows.is_contiguous() and rows.device.type in ("cpu", "cuda")


def _rows_at(rows: Tensor, at: Tensor) -> Tensor:
    """The rows at the positions ``at`` (N x ...) of each of N images, in that order."""
    first = torch.arange(len(rows), device=rows.device) * rows.shape[1]
    return rows.flatten(0, 1).index_select(0, (at.flatten(1) + first[:, None]).flatten())


def outputs_at(y: Tensor, kind: str, chosen: Chosen, *, copy: bool = True) -> Tensor:
    """Outputs of a layer at ``chosen`` positions: (N p) x d, from N x d x size (N x ... x d for a Linear). Without
    ``copy`` they may share the memory of ``y``."""
    rows = KINDS[kind].rows(y)
    if chosen.at.shape[1] < rows.shape[1]:
        if _in_rows(rows):
            return _rows_at(rows, chosen.at)
        rows = rows.gather(1, chosen.at[:, :, None].expand(-1, -1, rows.shape[2]))
    elif copy or not rows.is_contiguous():  # all of them, which are in order
        rows = rows.clone(memory_format=torch.contiguous_format)
    return rows.reshape(-1, rows.shape[2])
