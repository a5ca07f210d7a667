"""An affine map of low rank, the shape every channel solver's answer has."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, addmm


@dataclass(frozen=True)
class LowRank:
    """``y -> P Q^T y + b`` with P, Q: d x rank and b: d (M = P Q^T in ``method.md``)."""

    p: Tensor
    q: Tensor
    b: Tensor

    def __call__(self, y: Tensor) -> Tensor:
        """Apply to samples ``y`` (n x d). Cost 2 n d rank multiply-adds."""
        return addmm(self.b, y @ self.q, self.p.T)
