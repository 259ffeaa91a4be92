"""The picture of the products and their precisions is what the recipes are."""

from tools import precisions


def test_the_committed_picture_is_current():
    assert precisions.PICTURE.read_text(encoding="utf-8") == precisions.drawn(), "run `python -m tools.precisions`"
