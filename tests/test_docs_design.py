"""docs/design.md names places that are there, and every folder of the package."""

import re

import pytest

from tests.documents import ROOT

PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
SUFFIXES = ".py", ".json", ".md"
# What a run writes
WRITTEN = {"runs/", "report.html", "metrics.jsonl", "result.json"}


def section(name):
    return PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def entries(text):
    """The paths of a drawn tree: folders end with a slash, and what is indented deeper lies in them."""
    found, folders = [], []
    for line in re.search(r"```text\n(.*?)```", text, re.DOTALL)[1].splitlines():
        indent, names = len(line) - len(line.lstrip()), re.split(r"  +", line.strip(), maxsplit=1)[0].split(", ")
        folders = [(depth, folder) for depth, folder in folders if depth < indent]
        parent = "".join(folder for _, folder in folders)
        found += [parent + name for name in names]
        if names[-1].endswith("/"):
            folders.append((indent, names[-1]))
    return found


def test_everything_in_the_tree_is_there():
    found = entries(section("The tree"))
    assert len(found) > 60
    assert not [path for path in found if not (ROOT / path).exists()]
    assert not [path for path in found if path.endswith("/") != (ROOT / path).is_dir()]


@pytest.mark.parametrize("flow", ["A call", "A training run of the laboratory"])
def test_places_in_the_flows_are_there(flow):
    drawing = re.search(r"```text\n(.*?)```", section(flow), re.DOTALL)[1]
    named = {x for x in re.findall(r"(?<![\w./])[a-z_0-9]+(?:/[a-z_0-9]+)*(?:\.\w+|/)", drawing) if x not in WRITTEN}
    named = {x for x in named if x.endswith((*SUFFIXES, "/"))}
    assert len(named) >= 6
    assert not [x for x in named if not (ROOT / x).exists() and not (ROOT / "src" / "sagebwd" / x).exists()]
