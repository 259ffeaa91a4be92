"""Write the tables of README and pages from results files: `python -m tools.tables` (all), or with names of pages.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. `TABLES` has the function of each NAME, which returns
Markdown and names the files that it reads; a new results file changes nothing until a function names it.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from tools.tables import (
    accuracy,
    causality,
    claims,
    context_parallel,
    gains,
    masks,
    pretraining,
    qk_norm_rope,
    readme,
    saturation,
    sinks,
    speed,
    steps,
    support,
)
from tools.tables.results import ROOT

BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES: dict[str, Callable[[], str]] = {
    "readme-gains": readme.gains,
    "readme-memory": readme.memory,
    "readme-errors": readme.errors_of_smollm2,
    "readme-safety": readme.safety,
    "readme-limits": readme.limits,
    "gpu-tests": readme.gpu_tests,
    "gains": gains.gains,
    "support-recipes": support.recipes,
    "support-forms": support.forms,
    "support-owners": support.owners,
    "speed-by-head-dim": speed.by_head_dim,
    "speed-beside-flash-attention-3": speed.beside_flash_attention_3,
    "speed-bursts": speed.bursts,
    "speed-behind-a-pause": speed.behind_a_pause,
    "speed-energy": speed.energy,
    "speed-over-256": speed.over_256,
    "speed-lengths": speed.lengths,
    "speed-fp8": speed.fp8,
    "speed-masks": speed.masks,
    "speed-packed": speed.packed,
    "masks": masks.masks,
    "speed-auto": speed.auto,
    "steps": steps.steps,
    "steps-of-models": steps.models,
    "estimates": steps.estimates,
    "memory-of-a-call": steps.memory_of_a_call,
    "memory-of-packed": steps.memory_of_packed,
    "longest": steps.longest_sequences,
    "blocks": qk_norm_rope.blocks,
    "fused-steps": qk_norm_rope.steps,
    "ring": context_parallel.ring,
    "errors-by-data": accuracy.by_data,
    "errors-by-sigma": accuracy.by_sigma,
    "errors-trained": accuracy.of_smollm2,
    "errors-of-variants": accuracy.of_variants,
    "errors-of-all-weights": accuracy.gradients_of_all_weights,
    "planted-faults": accuracy.planted_faults,
    "errors-by-sink": accuracy.by_weight_of_the_first_key,
    "errors-by-product": accuracy.by_product,
    "sinks-by-strength": sinks.by_strength,
    "sinks-elsewhere": sinks.elsewhere,
    "saturation": saturation.errors,
    "causality-o": causality.outputs,
    "causality-dq": causality.gradients_of_queries,
    "gaps-of-wrong-kernels": pretraining.of_wrong_kernels,
    "gap-costs": pretraining.costs_of_gaps,
    "paper-claims": claims.claims,
    "gaps-from-scratch": pretraining.from_scratch,
    "gaps-trained-on": pretraining.continued_from_smollm2,
    "losses-of-325m": pretraining.losses_of_325m,
    "fine-tuning": pretraining.fine_tuning,
}


def written(text: str) -> str:
    """A page's text with each of its tables written anew; KeyError of a name that `TABLES` lacks."""
    return BLOCK.sub(lambda block: f"{block[1]}{TABLES[block[2]]()}\n{block[3]}", text)


def pages() -> list[Path]:
    """README and the pages of docs and dev."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "dev").rglob("*.md"))]


def main(arguments: list[str]) -> int:
    """Write the tables of the pages that are named, or of all."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.tables", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", type=Path, help="paths of pages, all unless named")
    chosen = parser.parse_args(arguments).pages
    for path in chosen:
        if not path.is_file():
            parser.error(f"pages: {path} is no file")
    for path in chosen or pages():
        text = path.read_text(encoding="utf-8")
        if (new := written(text)) != text:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
