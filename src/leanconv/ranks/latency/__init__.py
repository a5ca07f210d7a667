"""Ranks by measured time: forms of layers timed where the network will run, and a plan that meets a time."""
