"""The pictures of masks are what their functions show, one of each."""

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
