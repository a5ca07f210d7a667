"""A run from its stages down: a network is analyzed, ranks are planned, the plan is applied layer by layer."""
