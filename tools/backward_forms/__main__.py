"""Forms of a one-kernel backward in CuTe DSL, to compile, check and time: python -m tools.backward_forms [FORM ...]

Skeletons (docs/log/2026-11-23-sm90-backward.md): one scale for 128 keys, no masks, even numbers of whole blocks.
Without a GPU each is compiled; with one it is also timed at 16K tokens, and dQ, dK and dV of the first head are held
against FP32 and, in brackets, an emulation with the same e4m3 operands. Needs nvidia-cutlass-dsl and apache-tvm-ffi.
"""

from __future__ import annotations

import math
import sys
import time
from itertools import pairwise

import cutlass.cute as cute
import torch

from tools.backward_forms.kernel import Form

TOKENS, WIDTH, E4M3 = 16384, 2048, torch.float8_e4m3fn
_128, _64 = {"D": 128, "N": 64, "k": 4, "v": 4}, {"D": 64, "N": 64, "groups": 3, "planes": True, "half": False}
FORMS = {
    "128": _128,
    "128-apart": {**_128, "apart": 4},
    "128-cluster": {**_128, "cluster": 2},
    "128-rolled": {**_128, "unrolled": False},
    "128-planes": {**_128, "planes": True},
    "64-three": {**_64, "apart": 4},
    "64-three-together": _64,
    "64-three-k": {**_64, "k": 2, "half": True},
    "64-two": {"D": 64, "N": 128, "v": 4, "unrolled": False},
}


def pairs(n: int):
    """The token at each place of an operand whose other one is accumulators as they come."""
    i = torch.arange(n, device="cuda")
    r = i % 16
    return i // 16 * 16 + 8 * (r % 4 // 2) + 2 * (r // 4) + r % 2


def pair_rows(n: int):
    """The same for accumulators stored in pairs of rows r, r + 8."""
    i = torch.arange(n, device="cuda")
    return i // 16 * 16 + i % 16 // 2 + 8 * (i % 2)


def largest_factor(x):
    """The largest power of two that leaves x (H, ...) at most 448, a head."""
    return 2.0 ** torch.floor(torch.log2(448 / x.abs().flatten(1).amax(1)))


class Data:
    """Operands of ``tokens`` Gaussian tokens, and the first head's gradients in FP32 and emulated."""

    def __init__(self, D: int, tokens: int) -> None:
        H, self.scale = WIDTH // D, D**-0.5
        q, k, v, do = (torch.randn(H, tokens, D, device="cuda") for _ in range(4))
        self.q_scale = (q.abs().amax(-1) / 127 * (1 + 2**-8)).bfloat16().float()  # rounded up
        self.q = (q / self.q_scale[..., None]).round().to(torch.int8)
        blocks = k.view(H, tokens // 128, 128, D)
        k_scale = blocks.abs().amax((2, 3)) / 127
        self.k = (blocks / k_scale[..., None, None]).round().view(H, tokens, D).to(torch.int8)
        q_value = self.q.float() * self.q_scale[..., None]
        k_value = self.k.float() * k_scale.repeat_interleave(128, 1)[..., None]
        self.k_scale = (k_scale * math.log2(math.e) * self.scale).contiguous()
        self.v, do = v.bfloat16(), do.bfloat16().float()
        v = self.v.float()
        torch.backends.cuda.matmul.allow_tf32 = True  # exact products of INT8 and of BF16
        lse, top, delta = (torch.empty(H, tokens, device="cuda") for _ in range(3))
        for h in range(H):
            for rows in torch.arange(tokens, device="cuda").split(2048):
                s = self.scores(h, rows)
                top[h, rows] = s.amax(1)
                lse[h, rows] = torch.logsumexp(s * math.log(2), 1) / math.log(2)
                delta[h, rows] = (torch.exp2(s - lse[h, rows, None]) * (do[h, rows] @ v[h].T)).sum(1)
        # P 2^e is at most 448; dP 2^-b at most 1
        self.add = (torch.floor(math.log2(448) + lse - top - 0.02) - lse).half().float()
        e = self.add + lse
        b = torch.ceil(torch.log2(v.abs().amax(1).norm(dim=-1)[:, None] * do.norm(dim=-1)))
        up, down = 2.0 ** (b - e), 2.0**-b
        self.do, delta = (do * down[..., None]).bfloat16().contiguous(), delta * down
        rest, self.delta = -delta, torch.zeros(H, tokens, 16, device="cuda", dtype=torch.bfloat16)
        for i in range(3):
            self.delta[..., i] = rest.bfloat16()
            rest = rest - self.delta[..., i].float()
        do_e, q_e = do * 2.0 ** -e[..., None], q_value * up[..., None]
        g, gq = largest_factor(do_e), largest_factor(q_e)
        do_t, q_t = ((x * y[:, None, None]).clamp(-448, 448).to(E4M3) for x, y in ((do_e, g), (q_e, gq)))
        self.units = torch.stack([1 / g, self.scale / gq], 1).float().contiguous()
        p = torch.exp2(self.scores(0, slice(None)) + self.add[0, :, None])
        ds = (self.do[0].float() @ v[0].T - delta[0, :, None]) * p
        torch.backends.cuda.matmul.allow_tf32 = False
        spread = up[0, :, None]
        self.exact = (
            ds @ k_value[0] * spread * self.scale, (ds * spread).T @ q_value[0] * self.scale, p.T @ do_e[0]
        )  # fmt: skip
        p, ds = (x.clamp(-448, 448).to(E4M3).float() for x in (p, ds))
        # sums of dQ in FP16 must not overflow
        most = (ds @ k_value[0]).abs().max().item()
        gk = min(largest_factor(k_value[:1])[0].item(), 2.0 ** math.floor(math.log2(8192 / most)))
        k_t = (k_value * gk).clamp(-448, 448).to(E4M3)
        self.dq_unit = up[0, :, None] * self.scale / gk
        self.emulated = (
            ds @ k_t[0].float() * self.dq_unit, ds.T @ q_t[0].float() * self.units[0, 1],
            p.T @ do_t[0].float() * self.units[0, 0],
        )  # fmt: skip
        self.q_t, self.k_t, self.do_t = (
            x.view(torch.uint8)[:, order(tokens)].transpose(1, 2).contiguous()
            for x, order in ((q_t, pairs), (k_t, pair_rows), (do_t, pairs))
        )

    def scores(self, head: int, rows):
        """S in octaves."""
        s = self.q[head, rows].float() @ self.k[head].float().T
        return s * self.q_scale[head, rows, None] * self.k_scale[head].repeat_interleave(128)

    def rows(self, form: Form):
        """Q's scales and what is added to exponents, block by block: FP32 planes, or BF16 and FP16 in pairs."""
        H, steps = len(self.add), self.add.shape[1] // form.N
        scale, add = self.q_scale.view(H, steps, form.N), self.add.view(H, steps, form.N)
        if form.planes:
            return torch.cat([-add, scale], -1).contiguous()
        words = [x.contiguous().view(torch.int32).view(H, steps, -1, 1) for x in (scale.bfloat16(), add.half())]
        return torch.cat(words, -1).view(H, steps, form.N).view(torch.float32)


def dq_of(sums, form: Form, steps: int):
    """The first head's dQ^T (D, tokens) from its sums by register."""
    i, t = torch.arange(form.NQ // 2)[:, None], torch.arange(128)
    row = 16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2)
    column = 8 * (i // 4) + 2 * (t % 4) + i % 2
    parts = torch.zeros(steps, form.parts, 64, form.NQ, device="cuda")
    by_register = sums.view(steps, form.parts, form.NQ // 16, 128, 8).transpose(3, 4).float()
    parts[:, :, row.cuda(), column.cuda()] = by_register.reshape(steps, form.parts, form.NQ // 2, 128)
    return parts.permute(*((1, 2, 0, 3) if form.D == 128 else (2, 0, 1, 3))).reshape(form.D, -1)


def run(form: Form, kernel, kept: dict) -> str:
    """Errors and time."""
    whole = math.lcm(2 * form.N, form.M, 128 * form.cluster)
    tokens = round(TOKENS / whole) * whole
    if (form.D, tokens) not in kept:
        kept.clear()
        kept[form.D, tokens] = Data(form.D, tokens)
    data = kept[form.D, tokens]
    dq = torch.zeros(WIDTH // form.D, tokens * form.D, device="cuda", dtype=torch.float16)
    dk, dv = torch.empty_like(data.v), torch.empty_like(data.v)
    arguments = (
        data.q, data.k, data.v, data.do, data.q_t, data.k_t, data.do_t, data.rows(form), data.delta, data.k_scale,
        data.units, dq, dk, dv, torch.cuda.current_stream().cuda_stream,
    )  # fmt: skip
    kernel(*arguments)
    got = dq_of(dq[0], form, tokens // form.N).T * data.dq_unit, dk[0].float(), dv[0].float()
    errors = [
        " ".join(f"{((a - b).norm() / b.norm()).item():.4f}" for a, b in zip(got, expected))
        for expected in (data.exact, data.emulated)
    ]
    bursts = []
    for _ in range(3):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
        for n, mark in enumerate(marks):
            if n:
                kernel(*arguments)
            mark.record()
        torch.cuda.synchronize()
        bursts.append(sorted(a.elapsed_time(b) for a, b in pairwise(marks))[2])
        time.sleep(0.05)
    ms = sorted(bursts)[1]
    return f"{ms * 1e3:.0f} us, {10 * tokens**2 * WIDTH / ms / 1e9:.0f} TFLOPS; {errors[0]} [{errors[1]}]"


def main(names: list[str]) -> None:
    """Each form named, or all."""
    kept: dict = {}
    for name in names or FORMS:
        form = Form(**FORMS[name])
        begin = time.perf_counter()
        kernel = cute.compile(form, *form.placeholders(), options="--gpu-arch sm_90a --enable-tvm-ffi")
        line = f"{name:18s} compiled in {time.perf_counter() - begin:.1f} s"
        print(line, run(form, kernel, kept) if torch.cuda.is_available() else "", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
