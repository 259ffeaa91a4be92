"""The documents do not drift from the code."""

import re
from pathlib import Path

import pytest

from sagebwd import Recipe

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_named_in_documents_exist(document):
    named = re.findall(r"`((?:src|tests|configs|docs|benchmarks)/[\w./-]+)`", document.read_text(encoding="utf-8"))
    missing = [path for path in named if not (ROOT / path).exists()]
    assert not missing


def test_recipes_named_in_method_parse():
    text = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    recipes = re.findall(r'"((?:token|paper|full)\([^"]*\))"', text.replace("\n", " "))
    assert recipes
    for recipe in recipes:
        Recipe.parse(recipe)
