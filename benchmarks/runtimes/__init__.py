"""Exported networks: right, and how fast."""
