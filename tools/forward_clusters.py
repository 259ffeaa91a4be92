"""Forward: clusters of two against one: bits, then loops at full power."""
import os, sys, time, subprocess, dataclasses
T0 = time.time()
def say(*x): print(f"[{time.time()-T0:5.1f}]", *x, flush=True)
CHECKS = [dict(D=128, lengths=(1000, 1000)), dict(D=128, lengths=(1000, 1300), causal=True), dict(D=128, lengths=(1300, 700), causal=True), dict(D=64, lengths=(1000, 1000), causal=True),
  dict(D=64, lengths=(577, 900), window=(100, 30)), dict(D=128, lengths=(130, 900), window=(64, 0)), dict(D=64, lengths=(2048, 2048)), dict(D=128, packed=((100, 300), (300, 100), (1, 77), (40, 0), (513, 513)), causal=True),
  dict(D=64, packed=((1, 1), (130, 257), (300, 64), (0, 40), (700, 128)), window=(64, 16)), dict(D=128, lengths=(300, 500), masked=True, causal=True)]
SHAPES = [(128, 16384, False), (128, 16384, True), (64, 16384, False), (64, 16384, True), (128, 4096, True), (64, 4096, True), (128, 4096, False)]
def tiles(n):
    from sagebwd.kernels.sm90.config import TILES
    return {d: dataclasses.replace(t, cluster=n) for d, t in TILES.items()}
def variants():
    from sagebwd.kernels.sm90.config import Variant
    out = set()
    for n in (1, 2):
        for c in CHECKS:
            w = c.get("window")
            out.add(Variant(c["D"], "bfloat16", tiles(n)[c["D"]], lower=bool(w) and w[0] >= 0, upper=c.get("causal", False) or (bool(w) and w[1] >= 0), varlen="packed" in c, key_mask=c.get("masked", False), row_max=True))
        for D in (64, 128):
            for u in (False, True): out.add(Variant(D, "bfloat16", tiles(n)[D], upper=u, row_max=True))
    return sorted(out, key=repr)
def build(i, k):
    from sagebwd.kernels.sm90 import compile as c
    for v in variants()[i::k]:
        p = c.object_path(v)
        if not p.exists(): c.build(v, p)
def main():
    K = 14
    jobs = [subprocess.Popen([sys.executable, os.path.abspath(__file__), "build", str(i), str(K)], stderr=subprocess.PIPE, text=True) for i in range(K)]
    import torch
    from sagebwd.call import Call
    from sagebwd.recipe import Recipe
    from sagebwd.benchmarks.attention import Shape, baselines
    from sagebwd.kernels.operands.lane_codes import launch_codes
    from sagebwd.kernels.sm90 import launch
    from sagebwd.kernels.sm90.config import SCALE_BLOCK
    for j in jobs:
        e = j.communicate()[1]
        if j.returncode: say("BUILD", e[-800:])
    say("built")
    def forward(n, call, codes, v):
        launch.TILES.update(tiles(n))
        return launch.launch_forward(call, codes, v, with_row_max=True)
    for c in CHECKS:
        g = torch.Generator("cuda").manual_seed(0)
        D, H, Hk = c["D"], 4, 2
        def r(*s): return torch.randn(*s, device="cuda", generator=g).bfloat16()
        mask = None
        if "packed" in c:
            nq, nk = zip(*c["packed"]); q, k, v = r(sum(nq), H, D), r(sum(nk), Hk, D), r(sum(nk), Hk, D)
            cu = [torch.tensor([0, *x], device="cuda").cumsum(0).int() for x in (nq, nk)]
            longest = max(nq), max(nk)
        else:
            nq, nk = c["lengths"]; q, k, v = r(2, H, nq, D), r(2, Hk, nk, D), r(2, Hk, nk, D); cu = [None, None]; longest = nq, nk
            if c.get("masked"): mask = torch.rand(2, nk, device="cuda", generator=g) > .4
        w = c.get("window") or (-1, -1)
        call = Call.of(q, k, mask, *cu, *longest, c.get("causal", False), *w, D ** -0.5, Recipe.named("mixed"))
        codes = launch_codes(q, k, call.queries, call.keys, mask, SCALE_BLOCK)
        if mask is not None: v = v * mask[:, None, :, None]
        a, b = forward(1, call, codes, v), forward(2, call, codes, v)
        torch.cuda.synchronize()
        say("check", c, ["same" if torch.equal(x, y) else f"DIFFER {((x.float()-y.float()).abs().nan_to_num(9)).max().item():.3g} nan {x.isnan().sum().item()} {y.isnan().sum().item()}" for x, y in zip(a, b)])
    def loop(run, ms=110):
        run(); torch.cuda.synchronize(); a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record(); run(); run(); b.record(); b.synchronize(); n = max(4, int(2 * ms / a.elapsed_time(b)))
        for _ in range(n): run()
        a.record()
        for _ in range(n): run()
        b.record(); b.synchronize()
        return a.elapsed_time(b) / n
    for D, N, causal in SHAPES:
        sh = Shape(D, 2048 // D, 2048 // D, max(1, 16384 // N), N, causal)
        q, k, v, do = (x.detach() for x in sh.inputs("cuda", torch.bfloat16))
        call = Call.of(q, k, None, None, None, N, N, causal, -1, -1, D ** -0.5, Recipe.named("mixed"))
        codes = launch_codes(q, k, call.queries, call.keys, None, SCALE_BLOCK)
        runs = {"one": lambda: forward(1, call, codes, v), "two": lambda: forward(2, call, codes, v)}
        if N == 16384:
            fa = baselines(sh, "cuda").get("fa4")
            if fa: runs["fa4"] = lambda: fa(q, k, v)
        t = {n: [] for n in runs}
        for _ in range(2):
            for n, f in runs.items(): t[n].append(loop(f))
        fl = sh.flops("fwd") / 1e9
        say(sh, {n: f"{fl/min(x):.0f} ({' '.join(f'{fl/y:.0f}' for y in x)})" for n, x in t.items()})
if __name__ == "__main__":
    build(int(sys.argv[2]), int(sys.argv[3])) if len(sys.argv) > 1 else main()
