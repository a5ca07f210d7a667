"""Filters as two factors in a row: what every split can do, and Jaderberg's, of k x k filters into k x 1 and 1 x k by
filter reconstruction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from leanconv.solve.metric import Metric
from leanconv.solve.moments import Products, chunks
from leanconv.solve.sample_size import thinned


class TwoStep(Protocol):
    """``first`` (r x c x a x b), then ``second`` (d x r x ...): together they are d filters of c x kh x kw."""

    @property
    def first(self) -> Tensor: ...

    @property
    def second(self) -> Tensor: ...

    def product(self) -> Tensor:
        """The d x c x kh x kw filters the two are equal to."""
        ...

    def seen(self, patches: Tensor) -> Tensor:
        """What ``second`` sees of ``patches`` (n x c x kh x kw) once ``first`` has filtered them: n x (r k)."""
        ...


class FilterBasis(Protocol):
    """A filter matrix decomposed once, to be split at any rank."""

    @property
    def values(self) -> Tensor:
        """Energies of its directions, falling."""
        ...

    def split(self, rank: int) -> TwoStep: ...


@dataclass(frozen=True)
class SpatialFactors:
    """``first``, vertical: rank x c x kh x 1. ``second``, horizontal: d x rank x 1 x kw."""

    first: Tensor
    second: Tensor

    def product(self) -> Tensor:
        """The d x c x kh x kw filters the pair is equal to."""
        return torch.einsum("rci,drj->dcij", self.first[..., 0], self.second[:, :, 0])

    def seen(self, patches: Tensor) -> Tensor:
        """What the horizontal filters see of ``patches`` (n x c x kh x kw): n x (rank kw)."""
        return torch.einsum("ncij,rci->nrj", patches, self.first[..., 0]).flatten(1)


@dataclass(frozen=True)
class SpatialBasis:
    """The filter matrix of a layer (c kh x d kw), its left singular vectors and squared singular values."""

    matrix: Tensor
    vectors: Tensor
    values: Tensor
    shape: tuple[int, int, int, int]
    dtype: torch.dtype

    def split(self, rank: int) -> SpatialFactors:
        """Truncate to ``rank``. Singular values are shared evenly, so both factors survive half precision."""
        d, c, kh, kw = self.shape
        u = self.vectors[:, :rank]
        rest = u.T @ self.matrix
        balance = rest.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
        vertical = (u * balance).T.reshape(rank, c, kh, 1)
        horizontal = (rest / balance[:, None]).reshape(rank, d, kw).permute(1, 0, 2)[:, :, None]
        return SpatialFactors(vertical.to(self.dtype), horizontal.contiguous().to(self.dtype))


def spatial_basis(weight: Tensor) -> SpatialBasis:
    """Decompose ``weight`` (d x c x kh x kw). Cost O((c kh)^2 (c kh + d kw)).

    Left singular vectors come from the smaller Gram matrix in float64: the truncation U U^T A is what is needed,
    it is exact at full rank, and the eigenproblem is several times cheaper than the SVD.
    """
    d, c, kh, kw = weight.shape
    matrix = weight.to(torch.float64).permute(1, 2, 0, 3).reshape(c * kh, d * kw)
    if c * kh <= d * kw:
        values, vectors = torch.linalg.eigh(matrix @ matrix.T)
        values, vectors = values.flip(0), vectors.flip(1)
    else:
        values, right = torch.linalg.eigh(matrix.T @ matrix)
        values = values.flip(0)
        # A V = U S; QR instead of dividing by S keeps the columns of vanishing singular values orthonormal.
        vectors, _ = torch.linalg.qr(matrix @ right.flip(1))
    return SpatialBasis(matrix, vectors, values.clamp_min(0.0), (d, c, kh, kw), weight.dtype)


# White noise beside the columns that were seen, as a share of their mean variance: it decides where they show nothing.
WHITE = 0.1
# Columns that are looked at; four times as many as they have numbers where that is more.
COLUMNS = 8192


@dataclass(frozen=True)
class SeenBasis:
    """L^-T U (c kh x r) and U^T L^T A (r x d x kw) of ``spatial_basis_as_seen``."""

    values: Tensor
    vertical: Tensor
    horizontal: Tensor
    kernel: tuple[int, int]
    dtype: torch.dtype

    def split(self, rank: int) -> SpatialFactors:
        """Truncate to ``rank``. Both factors have the same size, so both survive half precision."""
        vertical, horizontal = self.vertical[:, :rank].T, self.horizontal[:rank]
        sizes = horizontal.flatten(1).norm(dim=1) / vertical.norm(dim=1)
        balance = sizes.clamp_min(torch.finfo(torch.float64).tiny).sqrt()
        first = (vertical * balance[:, None]).reshape(rank, -1, self.kernel[0], 1)
        second = (horizontal / balance[:, None, None]).transpose(0, 1)[:, :, None]
        return SpatialFactors(first.to(self.dtype), second.contiguous().to(self.dtype))


def spatial_basis_as_seen(weight: Tensor, patches: Tensor, metric: Metric | None = None) -> SeenBasis | None:
    """Decompose ``weight`` (d x c x kh x kw) so that a split changes the responses to ``patches`` (n x (c kh kw))
    least, in a ``metric`` if one is given; None where the patches never vary.

    An SVD of the filters treats all patches as equally likely. In pictures neighbours are alike, and most of what it
    keeps never occurs. Let the columns of a patch, c kh numbers each, have the scatter C = L L^T, and let two columns
    u and w go together as R_uw, R = K K^T: the scatter of a patch is taken for their product. With the filters as A
    (c kh x d x kw) and T the metric's root, the error of the responses is

        | L^T (A - A~) (T^T, K) |^2,    least for L^T A~ = U U^T L^T A,

    U the leading left singular vectors of L^T A (T^T, K). Vertical filters are U^T L^-1, horizontal ones U^T L^T A.
    Cost: n kw (c kh)^2 multiply-adds, in float32 on a CPU, and O((c kh)^2 (c kh + d kw)).
    """
    d, c, kh, kw = weight.shape
    patches = patches[thinned(len(patches), min(len(patches), max(COLUMNS, 4 * c * kh) // kw)).to(patches.device)]
    columns = (patches - patches.mean(0)).reshape(-1, c * kh, kw).permute(2, 0, 1).contiguous()  # kw x n x (c kh)
    products = Products(c * kh, c * kh, columns, quick=True)
    for rows in chunks(columns.shape[1], columns.device):
        for part in columns[:, rows].to(products.dtype):
            products.add(part, part)
    scatter = products.total()
    variance = scatter.diagonal().mean()
    if not bool(variance > 0):
        return None
    scatter.diagonal().add_(WHITE * variance)
    together = (columns.flatten(1) @ columns.flatten(1).T).to(torch.float64)
    together = together / together.diagonal().mean()
    together.diagonal().add_(WHITE)
    lower = torch.linalg.cholesky(scatter)
    seen = (lower.T @ weight.to(torch.float64).permute(1, 2, 0, 3).reshape(c * kh, d * kw)).reshape(c * kh, d, kw)
    felt = seen @ torch.linalg.cholesky(together)
    if metric is not None:
        felt = metric.root @ felt
    values, u = torch.linalg.eigh(felt.flatten(1) @ felt.flatten(1).T)
    u = u.flip(1)[:, : min(c * kh, d * kw)]
    vertical = torch.linalg.solve_triangular(lower.T, u, upper=True)
    horizontal = (u.T @ seen.flatten(1)).reshape(-1, d, kw)
    return SeenBasis(values.flip(0).clamp_min(0.0)[: u.shape[1]], vertical, horizontal, (kh, kw), weight.dtype)
