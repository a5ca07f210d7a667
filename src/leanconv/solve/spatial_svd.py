"""Filters as two factors in a row: what every split can do, and Jaderberg's, of k x k filters into k x 1 and 1 x k by
filter reconstruction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


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
