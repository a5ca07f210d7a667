"""Choosing the ranks of every site under a budget of multiply-accumulates. Numbers in, a plan out."""

from leanconv.ranks.candidates import Candidate
from leanconv.ranks.manual import by_hand
from leanconv.ranks.merging import Pairs, Problem, active, macs_after
from leanconv.ranks.select import log_energy, select
from leanconv.ranks.spectra import KeptSpectra

__all__ = [
    "Candidate",
    "KeptSpectra",
    "Pairs",
    "Problem",
    "active",
    "by_hand",
    "log_energy",
    "macs_after",
    "select",
]
