"""What a step of a known model gains: the table of docs/questions.md, by `sagebwd estimate`."""

from lab.studies.study_tables import table
from sagebwd.cli.estimate import Estimate, estimate
from tools.tables.cells import length

GPU, OVER = "H200", "fa4"
LENGTHS = (4096, 8192, 16384, 32768)
MODELS = {
    "1.1B, as Llama 3.2": {"hidden": 2048, "layers": 16, "heads": 16, "intermediate": 8192, "vocabulary": 32000},
    "8B, as Llama 3": {"hidden": 4096, "layers": 32, "heads": 32},
    "70B, as Llama 3": {"hidden": 8192, "layers": 80, "heads": 64},
}
"""With 8 heads of keys, of 128 channels."""


def of(name: str, tokens: int) -> Estimate:
    """The estimate of a model whose name in `MODELS` begins so."""
    (sizes,) = (sizes for model, sizes in MODELS.items() if model.startswith(name))
    return estimate(GPU, kv_heads=8, head_dim=128, tokens=tokens, **sizes)


def gains() -> str:
    """A row a model: attention's share of a step and the speed by length."""
    rows = []
    for name in MODELS:
        found = [of(name, tokens) for tokens in LENGTHS]
        rows.append([name, *(f"{one.share(OVER):.0%}, {one.gain(OVER):.2f}" for one in found)])
    return table(["model", *map(length, LENGTHS)], rows)
