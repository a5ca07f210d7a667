"""Detectors: trained and accelerated, timed, and checked."""
