"""Choosing the ranks of every site under a budget of multiply-accumulates. Numbers in, a plan out."""

from leanconv.ranks.by_hand import by_hand
from leanconv.ranks.candidates import Candidate, Choice, Plan
from leanconv.ranks.select import reachable, select

__all__ = ["Candidate", "Choice", "Plan", "by_hand", "reachable", "select"]
