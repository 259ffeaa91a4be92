"""The error study: ablations of `token` one at a time, error against length, and the bias of rounding dS.

``python -m lab.studies.study ablations | lengths | roundings`` measure, write JSON and print Markdown tables;
``show FILE`` prints those of a file. Products are emulated in FP32 from inputs drawn in BF16, so that an error is the
recipe's alone (a 16-bit product adds none), and compared with FP64 on the same inputs; relative L2 throughout.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lab.studies import gaussian, variants
from lab.studies.ablations import ABLATIONS, BASES, Ablation
from lab.studies.study_tables import markdown, tell, write
from lab.studies.variants import Variant
from sagebwd.diagnostics.plots import save
from sagebwd.masks.band import Band
from sagebwd.recipe import Recipe
from sagebwd.reference.metrics import relative_l2

TENSORS = gaussian.TENSORS
_GAUSSIAN = {
    "sigma 1": ("plain", 1.0),
    "sigma 3": ("plain", 3.0),
    "one-hot": ("plain", 10.0),
    "bias": ("bias-and-sink", 1.0),
}
KINDS = (*_GAUSSIAN, "outliers", "sink", "zero rows", "large token")
LENGTHS = (512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Sample:
    """One head: q, k, v and do, (B, 1, N, D) FP32, and what full precision makes of them."""

    kind: str
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    scale: float
    band: Band
    exact: dict[str, Tensor]

    @classmethod
    def of(cls, kind: str, tensors: Iterable[Tensor], band: Band, scale: float | None = None) -> Sample:
        """The sample with its full-precision results; scale, 1 / sqrt(D) for None."""
        tensors = tuple(x.float() for x in tensors)
        scale = tensors[0].shape[-1] ** -0.5 if scale is None else scale
        return cls(kind, tensors, scale, band, outputs(tuple(x.double() for x in tensors), "full", scale, band))

    def run(self, ablation: Ablation) -> dict[str, Tensor]:
        """O, dQ, dK and dV under an ablation."""
        return outputs(self.tensors, ablation.recipe, self.scale, self.band, **ablation.variant)

    def errors(self, ablation: Ablation) -> dict[str, float]:
        """Relative L2 of O, dQ, dK and dV under an ablation."""
        actual = self.run(ablation)
        return {name: relative_l2(actual[name], self.exact[name]) for name in TENSORS}


def outputs(
    tensors: tuple[Tensor, ...], recipe: str, scale: float, band: Band, **variant: object
) -> dict[str, Tensor]:
    """O, dQ, dK and dV of q, k, v and do under a recipe; variant, of `lab.studies.variants.Variant`."""
    q, k, v, do = tensors
    return Variant(q, k, v, Recipe.parse(recipe), scale, band, **variant).outputs(do)


def draw(kind: str, tokens: int, head_dim: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, K, V and dO of one head of one of `KINDS`, (1, 1, tokens, head_dim), drawn in BF16.

    "sigma s" and "one-hot" (sigma 10) are `gaussian`'s plain inputs and "bias" its bias-and-sink at sigma 1;
    "outliers" is "bias" with a channel of K and one of V eight times as large; "sink" has flat scores but for the
    first key, which every query sees with a logit of 5; "zero rows" are zero in the first 64 tokens of all four;
    "large token" has a token of V and one of dO 32 times as large. Raises ValueError for another kind.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not known; accepted: {', '.join(KINDS)}")
    base, sigma = _GAUSSIAN.get(kind, ("bias-and-sink" if kind == "outliers" else "plain", 1.0))
    q, k, v, do = (x.float() for x in gaussian.draw(base, sigma, tokens, head_dim, seed))
    if kind == "outliers":
        k[..., 3] *= 8
        v[..., 5] *= 8
    elif kind == "sink":
        common = 2 * torch.randn(1, 1, 1, head_dim, generator=torch.Generator().manual_seed(seed + 1000))
        q, k = 0.3 * q + common, 0.3 * k
        k[:, :, :1] = 5 * head_dim**0.5 * common / common.square().sum(-1, keepdim=True)
    elif kind == "zero rows":
        for x in (q, k, v, do):
            x[:, :, : min(64, tokens // 2)] = 0
    elif kind == "large token":
        v[:, :, tokens // 3] *= 32
        do[:, :, tokens // 2] *= 32
    return tuple(x.bfloat16() for x in (q, k, v, do))


def captured(name: str, path: str | Path) -> list[Sample]:
    """Every head in a file of `sagebwd trace --save`, as samples of a kind called ``name``."""
    from sagebwd.diagnostics import capture

    return [
        Sample.of(name, call.head(head), Band.of(call.is_causal, *(call.window or (-1, -1))), call.scale)
        for call in capture.load(path)
        for head in call.heads
    ]


def chosen(names: Sequence[str] | None) -> tuple[Ablation, ...]:
    """The ablations of these names; all for None. Raises ValueError for one that is not there."""
    if names is None:
        return ABLATIONS
    known = {str(ablation): ablation for ablation in ABLATIONS}
    for name in names:
        if name not in known:
            raise ValueError(f"--ablation {name!r} is not known; accepted: {'; '.join(known)}")
    return tuple(known[name] for name in names)


def measure_ablations(samples: Iterable[Sample], ablations: Sequence[Ablation]) -> list[dict[str, object]]:
    """A row for each kind and ablation: errors[tensor], one number a sample."""
    rows: dict[tuple[str, str], dict] = {}
    for step, sample in enumerate(samples, 1):
        tell(f"{sample.kind}, {len(ablations)} ablations", step)
        for ablation in ablations:
            empty = {"kind": sample.kind, "ablation": str(ablation), "errors": {name: [] for name in TENSORS}}
            row = rows.setdefault((sample.kind, str(ablation)), empty)
            for name, error in sample.errors(ablation).items():
                row["errors"][name].append(_short(error))
    return list(rows.values())


def measure_lengths(
    kinds: Sequence[str], lengths: Sequence[int], head_dim: int, seeds: int
) -> list[dict[str, object]]:
    """A row for each kind, length, mask and base recipe; up to ``seeds`` draws, fewer beyond 4096 tokens."""
    rows = []
    for kind in kinds:
        for tokens in lengths:
            for is_causal in (False, True):
                band, draws = Band.of(is_causal), range(max(1, min(seeds, seeds * 4096 // tokens)))
                samples = (Sample.of(kind, draw(kind, tokens, head_dim, seed), band) for seed in draws)
                measured = measure_ablations(samples, BASES)
                rows += [{"tokens": tokens, "is_causal": is_causal, **row} for row in measured]
    return rows


def measure_roundings(
    kinds: Sequence[str], tokens: int, head_dim: int, repeats: int, extra: Iterable[Sample] = ()
) -> list[dict[str, object]]:
    """Noise and bias of rounding dS (dQ, dK) and P (dV) to nearest and stochastically, all else being `token`'s.

    Compared with the same products from dS and P as they are. ``error``: of one rounding; ``error_of_mean``: of the
    mean of ``repeats`` of them on one input; ``gain``: <rounded, unrounded> / <unrounded, unrounded> - 1 of each of
    ``repeats`` inputs, which is negative where rounding loses a part of the gradient. Samples in ``extra`` have no
    draws to take a gain from but themselves.
    """
    rows = []
    sources = {kind: [Sample.of(kind, draw(kind, tokens, head_dim, seed), Band()) for seed in range(repeats)]
               for kind in kinds}  # fmt: skip
    for sample in extra:
        sources.setdefault(sample.kind, []).append(sample)
    for kind, samples in sources.items():
        targets = [sample.run(Ablation("token", variant={"psi": variants.exact})) for sample in samples]
        for name in ("nearest", "stochastic"):
            psi = variants.nearest
            if name == "stochastic":
                psi = partial(variants.stochastic, generator=torch.Generator().manual_seed(0))
            ablation = Ablation("token", variant={"psi": psi})
            row: dict[str, object] = {"kind": kind, "rounding": name, "error": {}, "error_of_mean": {}, "gain": {}}
            first = [samples[0].run(ablation) for _ in range(repeats if name == "stochastic" else 1)]
            each = [sample.run(ablation) for sample in samples]
            for tensor in ("dq", "dk", "dv"):
                mean = torch.stack([run[tensor] for run in first]).mean(0)
                row["error"][tensor] = _short(relative_l2(first[0][tensor], targets[0][tensor]))
                row["error_of_mean"][tensor] = _short(relative_l2(mean, targets[0][tensor]))
                row["gain"][tensor] = [_short(_gain(run[tensor], to[tensor])) for run, to in zip(each, targets)]
            rows.append(row)
    return rows


def _gain(actual: Tensor, target: Tensor) -> float:
    a, b = actual.double().flatten(), target.double().flatten()
    return ((a - b) @ b / (b @ b)).item()


def _short(x: float) -> float:
    return float(f"{x:.5g}")


def plot_lengths(rows: Sequence[dict], path: Path) -> None:
    """Draw error against tokens: a panel for each kind and mask, a colour for each recipe, dQ, dK and O."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys((row["kind"], row["is_causal"]) for row in rows))
    recipes = list(dict.fromkeys(row["ablation"] for row in rows))
    figure, axes = plt.subplots(
        1, len(panels), figsize=(3.6 * len(panels), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (kind, is_causal) in zip(axes[0], panels):
        for index, recipe in enumerate(recipes):
            lines = [r for r in rows if (r["kind"], r["is_causal"], r["ablation"]) == (kind, is_causal, recipe)]
            for tensor, label, style in (("dq", "dQ", "-"), ("dk", "dK", "--"), ("o", "O", ":")):
                values = [statistics.mean(row["errors"][tensor]) for row in lines]
                tokens = [row["tokens"] for row in lines]
                axis.plot(tokens, values, style, color=f"C{index}", marker=".", label=f"{recipe}, {label}")
        axis.set_title(f"{kind}, {'causal' if is_causal else 'no mask'}", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("tokens")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("relative L2 to FP64")
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize=8, ncol=len(recipes), loc="outside lower center")
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m lab.studies.study", description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=("ablations", "lengths", "roundings", "show"))
    parser.add_argument("file", nargs="?", type=Path, help="the JSON to write, or with show to read")
    parser.add_argument("--kind", action="append", help=f"one of {', '.join(KINDS)}; repeat [default: all, lengths 2]")
    parser.add_argument(
        "--ablation", action="append", help="ablations: measure these alone, by name; repeat [default: all]"
    )
    parser.add_argument("--load", action="append", default=[], help="NAME=FILE of `sagebwd trace --save`; repeat")
    parser.add_argument("--tokens", type=int, action="append", help="tokens; lengths takes several")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=4, help="draws, 0 for what is loaded alone; roundings: repeats")
    parser.add_argument("--causal", action="store_true", help="ablations: mask the future of synthetic kinds")
    parser.add_argument("--plot", type=Path, help="lengths: also draw a .png file")
    given = parser.parse_args(arguments)
    if given.part == "show":
        if given.file is None or not given.file.is_file():
            parser.error(f"show: there is no file {given.file}")
        content = json.loads(given.file.read_text(encoding="utf-8"))
    else:
        try:
            content = _measure(given)
        except ValueError as error:
            parser.error(str(error))
        if given.file is not None:
            write(given.file, content)
    if given.plot is not None and content["part"] == "lengths":
        plot_lengths(content["rows"], given.plot)
    print(markdown(content))


def _measure(given: argparse.Namespace) -> dict[str, object]:
    default = ("sigma 1", "bias") if given.part == "lengths" else KINDS
    kinds = given.kind or list(default)
    extra: list[Sample] = []
    for text in given.load:
        name, equals, path = text.partition("=")
        if not equals:
            raise ValueError(f"--load {text!r}: expected NAME=FILE")
        extra += captured(name, path)
    content = {"part": given.part, "torch": torch.__version__, "head_dim": given.head_dim, "seeds": given.seeds}
    if given.part == "lengths":
        rows = measure_lengths(kinds, given.tokens or LENGTHS, given.head_dim, given.seeds)
    else:
        tokens = (given.tokens or [512 if given.part == "roundings" else 2048])[0]
        content |= {"tokens": tokens, "is_causal": given.causal}
        if given.part == "ablations":
            draws = ((kind, seed) for kind in kinds for seed in range(given.seeds))
            band = Band.of(given.causal)
            samples = (Sample.of(kind, draw(kind, tokens, given.head_dim, s), band) for kind, s in draws)
            rows = measure_ablations(_chain(samples, extra), BASES + chosen(given.ablation))
        else:
            rows = measure_roundings(kinds, tokens, given.head_dim, given.seeds, extra)
    return content | {"rows": rows}


def _chain(*parts: Iterable[Sample]) -> Iterable[Sample]:
    for part in parts:
        yield from part


if __name__ == "__main__":
    main()
