"""Choosing the ranks of every site under a budget of multiply-accumulates. Numbers in, a plan out."""

from leanconv.ranks.candidates import Candidate
from leanconv.ranks.manual import by_hand
from leanconv.ranks.merging import Pairs, active, macs_after, reachable, select_merged
from leanconv.ranks.select import log_energy, select
from leanconv.ranks.spectra import KeptSpectra

__all__ = [
    "Candidate",
    "KeptSpectra",
    "Pairs",
    "active",
    "by_hand",
    "log_energy",
    "macs_after",
    "reachable",
    "select",
    "select_merged",
]
