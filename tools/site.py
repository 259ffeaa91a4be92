"""The pages as a site: hooks of MkDocs (`mkdocs.yml`), which `make docs` builds into site/.

The start page is the repository's README, and docs/index.md is the page `pages`. CONTRIBUTING.md, CHANGELOG.md and
READMEs are pages too. A link to any other file of the repository leads to a copy of it on the site, under `files`, and
so does the name of a results file.
The navigation has a tree for each heading of docs/index.md, users' pages and the laboratory's, and pages that it lacks
stand at the end of the last tree, or of the first one those of the reference, so that no page is named here.
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
START, INDEX = "README.md", "docs/index.md"
FOLDERS = "configs", "dev", "benchmarks"
"""That have pages too, beside docs and the root."""
RESULTS = "benchmarks/results/", "docs/results/"
COPIES = "files/"
"""Where files that are no pages lie on the site."""
IMAGES = (".png", ".svg")
BEHIND = ("log/", "CHANGELOG", "results/", "dev/", "configs/")
"""Where pages begin that a search lists behind those that explain: history, and tables of numbers."""
# A fence, code in a line, or a link with its text and target
_PARTS = re.compile(
    r"(?P<code>^```.*?^```$|`[^`\n]+`)|\[(?P<text>(?:`[^`]*`|!\[[^\]]*\]\([^)]*\)|[^\[\]`])*)\]\((?P<target>[^)\s]+)\)",
    re.MULTILINE | re.DOTALL,
)


def places(root: Path = ROOT) -> dict[str, str]:
    """Where each page and picture of the repository stands on the site, by its path."""
    found = [*root.glob("*.md"), *(path for folder in FOLDERS for path in (root / folder).rglob("*.md"))]
    found += [path for path in (root / "docs").rglob("*") if path.suffix in (".md", *IMAGES)]
    paths = sorted(path.relative_to(root).as_posix() for path in found)
    return {path: path.removeprefix("docs/") for path in paths} | {START: "index.md", INDEX: "pages.md"}


def relinked(text: str, path: str, known: dict[str, str]) -> str:
    """A page's Markdown with links as they are on the site; a file that is no page is linked where `copied` puts it.

    Args: text; path, the page's in the repository; known, what `places` returns. Raises ValueError for a link to a
    file that is not there.
    """

    def on_site(match: re.Match[str]) -> str:
        target = match["target"] or "#"
        if match["code"] and (file := evidence(match["code"])):
            return f"[{match[0]}]({posixpath.relpath(COPIES + file, posixpath.dirname(known[path]) or '.')})"
        if target.startswith(("#", "https://", "http://", "mailto:")):
            return match[0]
        file, hash_, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(posixpath.dirname(path), file))
        if not (ROOT / file).exists():
            raise ValueError(f"{path}: {target} is not there")
        if (ROOT / file).is_dir():
            return match["text"]
        link = posixpath.relpath(known.get(file, COPIES + file), posixpath.dirname(known[path]) or ".")
        return f"[{match['text']}]({link}{hash_}{anchor})"

    def pictured(match: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        return f'src="{posixpath.relpath(known[file], posixpath.dirname(known[path]) or ".")}"'

    return re.sub(r'(?<=<img )src="([^"]+)"', pictured, _PARTS.sub(on_site, text))


def evidence(code: str) -> str | None:
    """The results file that code in a sentence names, whole or as one of `RESULTS`; None of other code."""
    name = code.strip("`")
    if not re.fullmatch(r"[\w./-]+\.(json|txt|xz)", name):
        return None
    return next((file for folder in ("", *RESULTS) if (ROOT / (file := folder + name)).is_file()), None)


def copied(known: dict[str, str]) -> list[str]:
    """Files of the repository that pages link to and that are no pages."""
    found = set()
    for path in known:
        if path.endswith(".md"):
            for match in _PARTS.finditer((ROOT / path).read_text(encoding="utf-8")):
                if match["code"] and (file := evidence(match["code"])):
                    found.add(file)
                target = (match["target"] or "#").partition("#")[0]
                file = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
                if target and "://" not in target and file not in known and (ROOT / file).is_file():
                    found.add(file)
    return sorted(found)


Tree = dict[str, dict[str, list[str]]]
"""Pages by tree and section."""


def navigation(text: str, known: dict[str, str]) -> Tree:
    """The pages of the site but the start page, each once.

    Args: text of `INDEX`, whose headings name trees and have an item a section, in bold before its links; known, what
    `places` returns.
    """
    waiting = {file: place for file, place in known.items() if place.endswith(".md") and file != START}
    trees: Tree = {}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, listed = part.partition("\n")
        sections = trees.setdefault(title, {})
        for item in re.split(r"^- ", listed, flags=re.MULTILINE)[1:]:
            name = re.match(r"\*\*(.*?)\*\*", item)
            files = [posixpath.normpath(f"docs/{link}") for link in re.findall(r"\]\(([^)#]+\.md)", item)]
            found = [waiting.pop(file) for file in dict.fromkeys(files) if file in waiting]
            if name is not None and found:
                sections[name[1]] = found
    first = next(iter(trees))
    for place in waiting.values():
        folder = posixpath.basename(posixpath.dirname(place))
        trees[first if folder == "reference" else title].setdefault(folder.capitalize() or "More", []).append(place)
    return trees


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give MkDocs the navigation."""
    trees = navigation((ROOT / INDEX).read_text(encoding="utf-8"), places())
    of = {title: [{name: pages} for name, pages in sections.items()] for title, sections in trees.items()}
    config.nav = [{"Start": "index.md"}, *({title: sections} for title, sections in of.items())]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of `places` in place of all of docs, and those that pages link to."""
    from mkdocs.structure.files import File, Files

    own = [file for file in files if file.src_uri.startswith("assets/")]
    known = places()
    others = {file: COPIES + file for file in copied(known)}
    return Files(
        own + [File.generated(config, to, abs_src_path=str(ROOT / at)) for at, to in (known | others).items()]
    )


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """A page's text with its links."""
    known = places()
    if page.file.src_uri.startswith(BEHIND):
        page.meta["search"] = {"boost": 0.2}
    return relinked(markdown, next(at for at, to in known.items() if to == page.file.src_uri), known)


def on_page_content(html: str, **_: object) -> str:
    """A page's HTML; a search leaves its tables of numbers out, and commands may break, as names may not."""
    html = re.sub(r"<code>(?=[^<]* [^<]* [^<]* )", '<code class="command">', html)
    return re.sub(r"<table>.*?</table>", _unsearched, html, flags=re.DOTALL)


def _unsearched(table: re.Match[str]) -> str:
    cells = re.findall(r"<td[^>]*>\s*(.)", table[0])
    numeric = sum(cell.isdigit() or cell in "+-." for cell in cells)
    return table[0].replace("<table>", "<table data-search-exclude>", 1) if 2 * numeric > len(cells) else table[0]
