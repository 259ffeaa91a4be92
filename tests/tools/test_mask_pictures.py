"""The pictures of masks are what their functions show, one of each."""

import re

import pytest

from sagebwd import block_masks
from tools import mask_pictures


@pytest.mark.parametrize("name", mask_pictures.PICTURES)
def test_the_committed_picture_is_current(name):
    path = mask_pictures.FOLDER / f"{name}.svg"
    assert path.read_text(encoding="utf-8") == mask_pictures.drawn(name), "run `python -m tools.mask_pictures`"


def test_every_mask_by_name_has_a_picture():
    of_module = {name for name, x in vars(block_masks).items() if getattr(x, "__module__", "") == block_masks.__name__}
    assert {name for name in of_module if not name.startswith("_")} == {*mask_pictures.PICTURES, "from_key_ranges"}


def test_a_picture_colours_what_a_query_sees():
    picture = mask_pictures.drawn("causal_frames")
    shown = re.search(r'class="shown" d="([^"]*)"', picture)[1]
    widths = [int(width) // mask_pictures.CELL for width in re.findall(r"h(\d+)v", shown)]
    assert widths == [4 * (query // 4 + 1) for query in range(24)]
