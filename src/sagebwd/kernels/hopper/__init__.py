"""Gluon kernels for Hopper (sm_90a): INT8 wgmma, TMA, warp specialisation. Forward; backward is the portable one."""

from sagebwd.kernels.hopper.host import forward, unsupported

__all__ = ["forward", "unsupported"]
