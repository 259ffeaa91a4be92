"""The reference has every public name, with what its docstring says."""

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


def test_every_public_name_has_its_place_on_a_page(tmp_path):
    texts = {path.stem: path.read_text(encoding="utf-8") for path in reference.write(tmp_path)}
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
    assert not [name for name in wanted if f"[`{name}`](" not in texts["README"]], "tools/reference.py has no place"
    for name in wanted - {"sagebwd.__version__"}:
        assert any(f"\n## {name.rpartition('.')[2]}\n" in text for text in texts.values()), name
