"""Gluon kernels for Hopper (sm_90a): INT8 wgmma, TMA, warp specialisation."""

from sagebwd.kernels.gluon.host import backward, forward, has_backward, unsupported

__all__ = ["backward", "forward", "has_backward", "unsupported"]
