"""Kernels for Hopper (sm_90a) in CuTe DSL."""
