"""Filters as two factors with nothing between them."""

from __future__ import annotations

from typing import Protocol

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
