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


def test_what_the_index_lacks_stands_at_the_end():
    known = {"README.md": "index.md", "docs/a.md": "a.md", "dev/log/b.md": "dev/log/b.md"}
    known |= {"docs/reference/c.md": "reference/c.md"}
    trees = site.navigation("# Pages\n\n## Use\n\n- **Begin**: [a](a.md).\n\n## Lab\n\n- **None**: words.\n", known)
    assert trees == {"Use": {"Begin": ["a.md"], "Reference": ["reference/c.md"]}, "Lab": {"Log": ["dev/log/b.md"]}}


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


def test_a_search_leaves_tables_of_numbers_out_and_commands_may_break():
    words, numbers = (
        "<table><tr><td>a mask</td><td>1.2</td></tr></table>",
        "<table><tr><td>1</td><td>2</td></tr></table>",
    )
    assert site.on_page_content("<code>a</code><code>b c d e</code>") == (
        '<code>a</code><code class="command">b c d e</code>'
    )
    html = site.on_page_content(f"<p>x</p>{words}{numbers}")
    assert html == f"<p>x</p>{words}" + numbers.replace("<table>", "<table data-search-exclude>")
