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


@pytest.mark.parametrize("path", [path for path in KNOWN if path.endswith(".md")])
def test_links_of_a_page_lead_to_pages_of_the_site(path):
    text = site.relinked((site.ROOT / path).read_text(encoding="utf-8"), path, KNOWN)
    prose = re.sub(r"^```.*?^```$|`[^`\n]+`", "", text, flags=re.MULTILINE | re.DOTALL)
    folder = posixpath.dirname(KNOWN[path])
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if not target.startswith(("#", "https://", "http://")):
            assert posixpath.normpath(posixpath.join(folder, target.partition("#")[0])) in KNOWN.values(), target
