"""docs/reference has every public name, and is what the docstrings say."""

import pkgutil

import pytest

pytest.importorskip("pdoc")
from pdoc import doc

import sagebwd
from sagebwd import integrations
from tools import reference

# parts of an integration that users do not call
INSIDE = {
    *(f"transformers_{part}" for part in ("fusion", "masks", "norms", "padding", "settings", "sharing", "torch")),
    "flash_attn_modules",
    "words",
    "ring",
    "ring_agreement",
}


def test_the_committed_pages_are_current(tmp_path):
    written = reference.write(tmp_path)
    assert {path.name for path in reference.FOLDER.iterdir()} == {path.name for path in written}
    stale = [x.name for x in written if x.read_text() != (reference.FOLDER / x.name).read_text(encoding="utf-8")]
    assert not stale, "run `make docs`"


def test_every_public_name_has_its_place():
    index = (reference.FOLDER / "README.md").read_text(encoding="utf-8")
    wanted = {f"sagebwd.{name}" for name in sagebwd.__all__}
    for found in pkgutil.iter_modules(integrations.__path__, f"{integrations.__name__}."):
        if found.name.rpartition(".")[2] in INSIDE:
            continue
        for member in doc.Module.from_name(found.name).members.values():
            if member.kind == "function" and member.taken_from[0] == found.name and not member.name.startswith("_"):
                wanted.add(
                    f"sagebwd.{member.name}" if member.name in sagebwd.__all__ else f"{found.name}.{member.name}"
                )
    assert len(wanted) > 30
    assert not [name for name in wanted if f"[`{name}`](" not in index], "give them a page in tools/reference.py"
