"""Names that the package does not have, of which it says where they are."""

import re
from pathlib import Path

import pytest

import sagebwd


def test_register_names_the_modules_that_have_it():
    with pytest.raises(AttributeError, match="no attribute 'register'; import it from one of") as caught:
        sagebwd.register()
    folder = Path(sagebwd.__file__).parent / "integrations"
    having = {path.stem for path in folder.glob("*.py") if "\ndef register(" in path.read_text(encoding="utf-8")}
    assert set(re.findall(r"sagebwd\.integrations\.(\w+)", str(caught.value))) == having


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="module 'sagebwd' has no attribute 'no_such_name'"):
        sagebwd.no_such_name()
    assert not hasattr(sagebwd, "register")
