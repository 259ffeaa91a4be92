"""The table of docs/limits.md: what a saturated softmax does to low precision."""

from lab.studies import saturation
from tools.tables.results import STUDIES, load


def errors() -> str:
    """Errors by scale and standard deviation."""
    return saturation.markdown(load(STUDIES / "saturation.json"))
