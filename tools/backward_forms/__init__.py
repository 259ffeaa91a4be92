"""Skeletons of a backward in CuTe DSL."""
