"""Gluon kernels for Hopper (sm_90a): INT8 wgmma, TMA, warp specialisation."""
