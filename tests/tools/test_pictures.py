"""The committed pictures are those that their tools draw, and each mask has one."""

from importlib import import_module

import pytest

from sagebwd import block_masks
from tools import mask_pictures


@pytest.mark.parametrize("name", ["speed_picture", "precisions"])
def test_the_committed_picture_is_current(name):
    if name == "speed_picture":
        pytest.importorskip("rich", reason="tables are printed by rich, which is in the extra lab")
    tool = import_module(f"tools.{name}")
    assert tool.PICTURE.read_text(encoding="utf-8") == tool.drawn(), f"run `python -m tools.{name}`"


@pytest.mark.parametrize("name", mask_pictures.PICTURES)
def test_the_picture_of_a_mask_is_current(name):
    path = mask_pictures.FOLDER / f"{name}.svg"
    assert path.read_text(encoding="utf-8") == mask_pictures.drawn(name), "run `python -m tools.mask_pictures`"


def test_every_mask_by_name_has_a_picture():
    of_module = {name for name, x in vars(block_masks).items() if getattr(x, "__module__", "") == block_masks.__name__}
    assert {name for name in of_module if not name.startswith("_")} == {*mask_pictures.PICTURES, "from_key_ranges"}
