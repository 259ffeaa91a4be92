"""Tables of docs/causality.md: what causal outputs and gradients of queries depend on."""

from lab.studies import causality
from tools.tables.results import STUDIES, load


def tables() -> list[str]:
    """That of O and that of dQ."""
    return causality.markdown(load(STUDIES / "causality.json")).split("\n\n")


def outputs() -> str:
    """What an output depends on."""
    return tables()[0]


def gradients_of_queries() -> str:
    """What a query's gradient depends on."""
    return tables()[1]
