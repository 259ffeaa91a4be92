"""The pages as a site: hooks of MkDocs (`mkdocs.yml`), which `make docs` builds into site/.

The start page is the repository's README. docs/index.md, with every claim, is the page `claims`. CONTRIBUTING.md,
CHANGELOG.md and the READMEs of configs are pages too. A link to any other file of the repository, such as a results
file, becomes its path. The navigation is the list "All pages" of docs/index.md, and pages that it lacks by folder, so
that no page is named here.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
START, CLAIMS = "README.md", "docs/index.md"
IMAGES = (".png", ".svg")
HISTORY = ("log/", "CHANGELOG")
# A fence, code in a line, or a link with its text and target
_PARTS = re.compile(
    r"(?P<code>^```.*?^```$|`[^`\n]+`)|\[(?P<text>(?:`[^`]*`|!\[[^\]]*\]\([^)]*\)|[^\[\]`])*)\]\((?P<target>[^)\s]+)\)",
    re.MULTILINE | re.DOTALL,
)


def places(root: Path = ROOT) -> dict[str, str]:
    """Where each page and picture of the repository stands on the site, by its path."""
    found = [*root.glob("*.md"), *(root / "configs").rglob("*.md")]
    found += [path for path in (root / "docs").rglob("*") if path.suffix in (".md", *IMAGES)]
    paths = sorted(path.relative_to(root).as_posix() for path in found)
    return {path: path.removeprefix("docs/") for path in paths} | {START: "index.md", CLAIMS: "claims.md"}


def relinked(text: str, path: str, known: dict[str, str]) -> str:
    """A page's Markdown with links as they are on the site.

    Args: text; path, the page's in the repository; known, what `places` returns. Raises ValueError for a link to a
    file that is not there.
    """

    def on_site(match: re.Match[str]) -> str:
        target = match["target"]
        if match["code"] or target.startswith(("#", "https://", "http://", "mailto:")):
            return match[0]
        file, hash_, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(path), file))
        if file in known:
            link = posixpath.relpath(known[file], posixpath.dirname(known[path]) or ".")
            return f"[{match['text']}]({link}{hash_}{anchor})"
        if not (ROOT / file).exists():
            raise ValueError(f"{path}: {target} is not there")
        return f"`{file}`" if file in match["text"] else f"{match['text']} (`{file}`)"

    return _PARTS.sub(on_site, text)


def navigation(text: str, known: dict[str, str]) -> dict[str, list[str]]:
    """The pages of the site by the name of their section, each page once.

    Args: text of `CLAIMS`, whose list under "All pages" has an item a section, in bold before its links; known, what
    `places` returns.
    """
    pages = [place for place in known.values() if place.endswith(".md")]
    at = {file: place for file, place in known.items() if place in pages}
    sections: dict[str, list[str]] = {"Start": ["index.md"]}
    listed = text.partition("\n## All pages\n")[2].partition("\n## ")[0]
    for item in re.split(r"^- ", listed, flags=re.MULTILINE)[1:]:
        name = re.match(r"\*\*(.*?)\*\*", item)
        files = [posixpath.normpath(f"docs/{link}") for link in re.findall(r"\]\(([^)#]+\.md)", item)]
        found = dict.fromkeys(at[file] for file in files if file in at)
        if name is not None:
            sections[name[1]] = list(found)
    met: set[str] = set()
    for name, found in sections.items():
        sections[name] = [place for place in found if place not in met]
        met.update(found)
    for place in pages:
        if place not in met:
            folder = posixpath.dirname(place)
            sections.setdefault(folder.capitalize() or "More", []).append(place)
    return {name: found for name, found in sections.items() if found}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give MkDocs the navigation."""
    sections = navigation((ROOT / CLAIMS).read_text(encoding="utf-8"), places())
    config.nav = [{name: found[0] if name == "Start" else found} for name, found in sections.items()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of `places` in place of all of docs."""
    from mkdocs.structure.files import File, Files

    own = [file for file in files if file.src_uri.startswith("assets/")]
    return Files(own + [File.generated(config, to, abs_src_path=str(ROOT / at)) for at, to in places().items()])


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """A page's text with its links."""
    known = places()
    if page.file.src_uri.startswith(HISTORY):
        page.meta["search"] = {"boost": 0.2}  # behind the pages that hold today
    return relinked(markdown, next(at for at, to in known.items() if to == page.file.src_uri), known)
