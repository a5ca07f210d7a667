"""The space that contains all responses of a layer, for any image."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class ResponseSpace:
    """Of filters W (d x m): all responses are W p + constant.

    With fewer inputs than filters, m < d, that is a space of m dimensions: y = B x + constant with ``basis`` B
    (d x m, orthonormal) and coordinates x = B^T y. Solving for x is solving for y, with matrices of m x m and d x m
    instead of d x d (and, with few samples, pseudo-samples for m unknowns a row instead of d: ``Moments.regular``).
    Without a basis the coordinates are y itself.

    ``prior`` is the scatter of x, up to scale, in response to white noise: W W^T, or B^T W W^T B. It is used where the
    images show nothing. Float64.

    ``inputs`` (n x m): the inputs of the filters ``basis`` B = W, in place of coordinates, for m of any size. Maps then
    have the rank asked for, with any filters of these inputs and not only with mixtures of the d filters.

    ``share``: filters are also fitted to pseudo-samples with that scatter, whose response is their target; as a share
    of the samples' mean variance.
    """

    prior: Tensor
    basis: Tensor | None
    inputs: Tensor | None = None
    share: float = 0.0

    @classmethod
    def of(cls, filters: Tensor) -> ResponseSpace:
        """Cost O(d m min(d, m))."""
        w = filters.to(torch.float64)
        if w.shape[1] >= w.shape[0]:
            return cls(w @ w.T, None)
        basis, triangle = torch.linalg.qr(w)
        return cls(triangle @ triangle.T, basis)

    @classmethod
    def behind(cls, inputs: Tensor, filters: Tensor, before: Tensor) -> ResponseSpace:
        """Of ``filters`` (d x r x kernel of k places) on ``inputs`` (n x (r k)): what r filters ``before`` give at each
        of the places."""
        scatter = before.flatten(1).to(torch.float64)
        places = torch.eye(filters[0, 0].numel(), dtype=torch.float64, device=filters.device)
        return cls(torch.kron(scatter @ scatter.T, places), filters.flatten(1).to(torch.float64), inputs)

    @classmethod
    def anywhere(cls, y: Tensor) -> ResponseSpace:
        """Of responses ``y`` (n x d) to unknown filters."""
        return cls(torch.eye(y.shape[1], dtype=torch.float64, device=y.device), None)

    def at(self, rows: Tensor) -> ResponseSpace:
        """The same for these samples alone."""
        return self if self.inputs is None else replace(self, inputs=self.inputs[rows])

    def coordinates(self, y: Tensor) -> Tensor:
        """n x d -> n x m, in the dtype of ``y``."""
        if self.inputs is not None:
            return self.inputs
        return y if self.basis is None else y @ self.basis.to(y.dtype)
