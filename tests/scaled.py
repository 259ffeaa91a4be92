"""Attention that is wrong by a factor, in its output or in one gradient."""

import torch


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def scaled(attention, o=1.0, dq=1.0, dk=1.0, dv=1.0):
    """An attention of q, k, v whose output and gradients are ``o`` times as large, and each gradient its own."""

    def wrong(q, k, v):
        return o * attention(*(_Backward.apply(x, factor) for x, factor in zip((q, k, v), (dq, dk, dv))))

    return wrong
