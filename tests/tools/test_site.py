"""The site has every page once, and its links lead to pages of the site. MkDocs itself is not needed."""

import posixpath
import re

import pytest

from tools import site

KNOWN = site.places()


def test_every_page_has_a_place_of_its_own_and_is_in_the_navigation_once():
    sections = site.navigation((site.ROOT / site.CLAIMS).read_text(encoding="utf-8"), KNOWN)
    listed = [page for pages in sections.values() for page in pages]
    pages = [place for place in KNOWN.values() if place.endswith(".md")]
    assert len(pages) > 30
    assert sorted(listed) == sorted(pages)
    assert len(set(KNOWN.values())) == len(KNOWN)
    assert next(iter(sections)) == "Start"


def test_pages_that_the_list_lacks_are_found_by_their_folder():
    known = {"README.md": "index.md", "docs/a.md": "a.md", "docs/log/b.md": "log/b.md", "docs/c.md": "c.md"}
    text = "# Claims\n\n## All pages\n\n- **Begin**: [a](a.md), [gone](gone.md#x).\n- no name [c](c.md)\n\n## More\n"
    assert site.navigation(text, known) == {
        "Start": ["index.md"],
        "Begin": ["a.md"],
        "Log": ["log/b.md"],
        "More": ["c.md"],
    }
    assert site.navigation("", known) == {"Start": ["index.md"], "More": ["a.md", "c.md"], "Log": ["log/b.md"]}


@pytest.mark.parametrize("path", [path for path in KNOWN if path.endswith(".md")])
def test_links_of_a_page_lead_to_pages_of_the_site(path):
    text = site.relinked((site.ROOT / path).read_text(encoding="utf-8"), path, KNOWN)
    prose = re.sub(r"^```.*?^```$|`[^`\n]+`", "", text, flags=re.MULTILINE | re.DOTALL)
    folder = posixpath.dirname(KNOWN[path])
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not target.startswith(("#", "https://", "http://")):
            assert posixpath.normpath(posixpath.join(folder, target.partition("#")[0])) in KNOWN.values(), target


def test_links_are_rewritten_and_code_is_not():
    known = {"README.md": "index.md", "docs/index.md": "claims.md", "docs/log/x.md": "log/x.md"}
    text = "[start](../../README.md#use) [all](../index.md) `[a](b)` [data](../../pyproject.toml)\n```\n[c](d)\n```"
    assert site.relinked(text, "docs/log/x.md", known) == (
        "[start](../index.md#use) [all](../claims.md) `[a](b)` data (`pyproject.toml`)\n```\n[c](d)\n```"
    )
    assert site.relinked("[`x`](log/x.md)", "docs/index.md", known) == "[`x`](log/x.md)"
    with pytest.raises(ValueError, match=r"docs/index\.md: none\.md is not there"):
        site.relinked("[x](none.md)", "docs/index.md", known)
