"""Ranks by how far errors of every layer move the network's output: what is measured, and the choice by it."""
