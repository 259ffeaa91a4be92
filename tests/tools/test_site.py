"""The site has every page once, and its links lead to pages and files of the site. MkDocs itself is not needed."""

import pytest

from tools import site

KNOWN = site.places()


def test_every_page_has_a_place_of_its_own_and_is_in_the_navigation_once():
    trees = site.navigation((site.ROOT / site.INDEX).read_text(encoding="utf-8"), KNOWN)
    listed = [page for sections in trees.values() for pages in sections.values() for page in pages]
    pages = [place for place in KNOWN.values() if place.endswith(".md")]
    assert len(pages) > 30
    assert sorted([*listed, "index.md"]) == sorted(pages)
    assert len(set(KNOWN.values())) == len(KNOWN)
    assert list(trees) == ["Use it", "Laboratory"]


def test_evidence_is_copied_and_linked():
    text = site.relinked("[runs](../../benchmarks/results/x) [it](../../Makefile)".replace("/x", "/"), PAGE, KNOWN)
    assert text == "runs [it](../files/Makefile)"
    named = "`training_h200_2026-11-28_614c2a6.json`"
    file = f"benchmarks/results/{named.strip('`')}"
    assert site.relinked(named, PAGE, KNOWN) == f"[{named}](../files/{file})"
    assert site.relinked("`pyproject.toml` `gone.json`", PAGE, KNOWN) == "`pyproject.toml` `gone.json`"
    assert file in site.copied(KNOWN)
    with pytest.raises(ValueError, match=r"gone\.json is not there"):
        site.relinked("[a](gone.json)", PAGE, KNOWN)


PAGE = "docs/results/speed.md"
