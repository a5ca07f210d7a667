"""Measuring a network on data."""
