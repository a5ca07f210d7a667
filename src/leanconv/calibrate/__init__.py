"""Pushing images through a network and collecting responses at sampled positions."""
