"""Measurements of speed and memory; in the package so that `sagebwd bench` works from a wheel."""
