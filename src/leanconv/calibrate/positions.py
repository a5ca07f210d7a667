"""The inputs a filter sees at chosen output positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from leanconv.network.layers.geometry import Geometry, Size, torch_pad
from leanconv.network.layers.kinds import KINDS

# Images that share one draw of random numbers: positions are drawn for a page of images at once.
PAGE = 1024


@dataclass(frozen=True)
class Window:
    """Where the patches at some positions lie in an image: ``index`` N x p x k, flat, and which of those numbers are
    ``inside`` it (None: all)."""

    index: Tensor
    inside: Tensor | None

    def part(self, begin: int, end: int) -> Window:
        return Window(self.index[begin:end], None if self.inside is None else self.inside[begin:end])


class Positions:
    """The output positions looked at, of every image at every site: the same for maps of one size, and whatever the
    batches are cut into (but where a layer runs on other rows than images).

    ``per_image`` positions of each map, all of them where there are hardly more. They are drawn once for many of the
    ``images``, kept on ``device``, and so are the places of their patches: 8 bytes for each number of a patch.
    """

    def __init__(self, *, per_image: int, images: int, seed: int, device: torch.device):
        self._per_image, self._images, self._seed, self.device = per_image, images, seed, device
        self._pages: dict[tuple[int, int], Tensor] = {}
        self._windows: dict[tuple[Any, ...], Window] = {}

    def count(self, positions: int) -> int:
        """How many of a map's positions are looked at."""
        return positions if positions <= 1.25 * self._per_image else self._per_image

    def choose(self, positions: int, first: int, rows: int, *, images: bool) -> Chosen:
        """For ``rows`` maps of ``positions``: those of the images from ``first`` on, or, where a layer runs on other
        rows than ``images``, such as a detector's boxes, of the batch that begins there."""
        if self.count(positions) == positions:
            every = torch.arange(positions, device=self.device).expand(rows, positions)
            return Chosen(self, every, None)
        if not images or first + rows > self._images:  # or more images than were announced
            drawn = choose_positions(rows, positions, self._per_image, (self._seed, positions, first))
            return Chosen(self, drawn.to(self.device), None)
        page, begin = divmod(first, PAGE)
        if begin + rows > PAGE:
            parts = [self._page(positions, page + i) for i in range((begin + rows - 1) // PAGE + 1)]
            return Chosen(self, torch.cat(parts)[begin : begin + rows], None)
        found = self._page(positions, page)[begin : begin + rows]
        return Chosen(self, found, (page, begin, positions))

    def _page(self, positions: int, page: int) -> Tensor:
        key = (positions, page)
        if key not in self._pages:
            rows = min(PAGE, self._images - page * PAGE)
            chosen = choose_positions(rows, positions, self._per_image, (self._seed, positions, page))
            self._pages[key] = chosen.to(self.device)
        return self._pages[key]

    def window(self, geometry: Geometry, in_size: Size, place: tuple[int, int, int], rows: int) -> Window:
        """Of the positions ``place`` names."""
        page, begin, positions = place
        key = (_reach(geometry), in_size, page)
        if key not in self._windows:
            self._windows[key] = window_of(geometry, in_size, self._page(positions, page))
        return self._windows[key].part(begin, begin + rows)


@dataclass(frozen=True)
class Chosen:
    """Positions of some maps: ``at`` N x p, indices into the output."""

    positions: Positions
    at: Tensor
    place: tuple[int, int, int] | None  # page, row in it, positions of a map; None where nothing is kept for them

    def window(self, geometry: Geometry, in_size: Size) -> Window:
        """Where their patches are."""
        if self.place is None:
            return window_of(geometry, in_size, self.at)
        return self.positions.window(geometry, in_size, self.place, len(self.at))


def choose_positions(images: int, positions: int, count: int, seed: tuple[int, int, int]) -> Tensor:
    """``count`` of the ``positions`` of every image: images x count, int64, on the CPU.

    ``seed`` is (run, positions, page): the choice depends on nothing else, so both streams look at the same places
    without storing them. Distinct places where the map is small; where it is large a repeat is rare and harmless.
    """
    generator = torch.Generator().manual_seed(_mix(*seed))
    if positions <= 4 * count:
        return torch.rand(images, positions, generator=generator).argsort(dim=1)[:, :count]
    return torch.randint(positions, (images, count), generator=generator)


def _mix(run: int, positions: int, page: int) -> int:
    return (run * 1_000_003 + positions * 8_191 + page * 131_071) % (1 << 62)


def _reach(geometry: Geometry) -> tuple[Any, ...]:
    """All that a window depends on; channels do not matter."""
    g = geometry
    return g.kernel, g.stride, g.padding, g.padding_after, g.dilation, g.padding_mode


def window_of(geometry: Geometry, in_size: Size, at: Tensor) -> Window:
    """The patches of output positions ``at`` (N x p) in a map of ``in_size``."""
    return Window(*KINDS[geometry.kind].window(geometry, in_size, at))


def conv_patches(x: Tensor, geometry: Geometry, chosen: Chosen) -> Tensor:
    """Patches of a layer's input ``x`` at ``chosen`` positions: (N p) x (C k).

    Gathering touches p k C numbers an image, where running the layer would touch every position; zeros around the
    image are put in afterwards, so that the image need not be copied.
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
        found = _rows_at(rows, window.index)
        if window.inside is not None:
            found *= window.inside.reshape(-1, 1)
        return found.reshape(n * p, k, c).transpose(1, 2).reshape(-1, c * k)
    found = rows.transpose(1, 2).gather(2, window.index.reshape(n, 1, p * k).expand(n, c, p * k))
    if window.inside is not None:
        found *= window.inside.reshape(n, 1, p * k)
    return found.reshape(n, c, p, k).permute(0, 2, 1, 3).reshape(-1, c * k)


def _in_rows(rows: Tensor) -> bool:
    """Whether whole ``rows`` (N x positions x C) can be copied, which is many times quicker than single numbers."""
    return rows.is_contiguous() and rows.device.type in ("cpu", "cuda")


def _rows_at(rows: Tensor, at: Tensor) -> Tensor:
    """Those at the positions ``at`` (N x ...) of each of N images, in that order."""
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
