"""Measurements of leanconv: README.md says which command answers which question."""
