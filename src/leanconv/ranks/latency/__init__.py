"""Ranks chosen by the clock: forms of layers timed where the network will run, and a plan that meets a time."""

from leanconv.ranks.latency.plan import refuse
from leanconv.ranks.latency.run import final_times, timed_plan

__all__ = ["final_times", "refuse", "timed_plan"]
