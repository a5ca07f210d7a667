"""Data, networks, machine facts and result files that several benchmarks share."""
