"""README and pages: links lead somewhere, commands parse, code runs. Nothing freezes prose."""

import importlib.util
import re
import shlex
import tomllib
from string import Template

import pytest
import torch
from packaging.requirements import Requirement

from tests import programs
from tests.documents import ROOT, text_of

tables = pytest.importorskip("tools.tables.__main__", reason="prints tables by rich, which is in the extra lab")
reference = pytest.importorskip("tools.reference", reason="reads docstrings by pdoc")

from tools import package  # noqa: E402

PAGES = tables.pages()
DOCUMENTS = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "configs").rglob("*.md")]
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
# Pages that `make docs` writes
BUILT = {reference.FOLDER / f"{name}.md" for name in ("README", *reference.PAGES)}
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def in_dev(path):
    """Whether a page is the developers' history, which says what was run at its commit."""
    return path.is_relative_to(ROOT / "dev")


def anchors(path):
    """The headings of a document as GitHub's links name them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text_of(path)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken(document, text):
    """Links of a text that lead to no file, or to no heading of one."""
    wrong = []
    for link, anchor in LINK.findall(FENCE.sub("", text)):
        target = (document.parent / link) if link else document
        if target.resolve() in BUILT:
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            wrong.append(f"{link}#{anchor}")
    return wrong


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(document):
    text = text_of(document)
    assert not broken(document, text)
    if document.name != "CHANGELOG.md":
        named = re.findall(r"`((?:src|lab|tests|tools|configs|docs|dev|benchmarks)/[\w./-]+)`", text)
        assert not [path for path in named if not in_dev(document) and not (ROOT / path).exists()]


def test_users_pages_are_two_clicks_from_the_readme():
    pages = [page for page in PAGES if not in_dev(page) and "reference" not in page.parts]
    found = met = {ROOT / "README.md"}
    for _ in range(2):
        links = ((page.parent / link).resolve() for page in met for link, _ in LINK.findall(text_of(page)))
        met = {path for path in links if path.suffix == ".md"} - BUILT
        found = found | met
    assert not [str(page) for page in pages if page not in found]


def test_imports_of_the_readme_run(tmp_path):
    imports = re.findall(r"`(from sagebwd[\w.]* import .*?)`", text_of(ROOT / "README.md"))
    assert len(imports) >= 5
    if importlib.util.find_spec("transformers") is None:
        imports = [line for line in imports if "transformers" not in line]
    outcome = programs.run("\n".join(imports), tmp_path)
    assert outcome.returncode == 0, outcome.stderr


# -- Command lines -------------------------------------------------------------------------------------------------

PROGRAMS = {"sagebwd": "sagebwd.cli.main", "lab": "lab.__main__", "benchmarks": "benchmarks.__main__"}
COMMAND = re.compile(
    r"(?:\w+=\S+ )*(?:(?:torchrun|accelerate launch) .*?-m |python -m |(?=sagebwd(?: |$)))([\w.]+)(?: |$)"
)


def started(line):
    """The program that a command line starts, a module or sagebwd, and its words; None of a line that starts none."""
    match = COMMAND.match(line)
    return match and (match[1], shlex.split(line[match.end() :], comments=True))


def shell_lines(text):
    """Lines of a document's blocks of shell."""
    blocks = re.findall(r"^```(?:bash)?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def commands(text):
    """Command lines of a document, in blocks of shell and in its sentences: the program and its words."""
    lines = shell_lines(text)
    lines += [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", FENCE.sub("", text))]
    variables: dict[str, str] = {}
    for line in lines:
        for name, value in re.findall(r"""\b([A-Z])=("[^"]*"|[^\s;]+)""", line):
            variables[name] = Template(value.strip('"')).safe_substitute(variables)
        if command := started(Template(line).safe_substitute(variables)):
            yield command


@pytest.fixture(scope="module")
def apps():
    """The commands of each of `PROGRAMS`, by name."""
    typer = pytest.importorskip("typer")
    found = {name: typer.main.get_command(importlib.import_module(module).app) for name, module in PROGRAMS.items()}
    found["lab"].commands["trace"] = found["sagebwd"].commands["trace"]  # which hands its options over
    return found


def objection(known, program, words):
    """What is wrong of a command line; "" of one that is understood, None of one that names no command.

    Modules have to exist; commands the options that they are given; configs have to be there and have the keys.
    """
    from lab.training.config import Config, load
    from lab.training.continued.config import Continued

    if program not in known:
        there = program in ("pytest", "pip") or importlib.util.find_spec(program)
        return None if there else f"there is no module {program}"
    if not words or words[0].startswith("-"):
        options = [option for parameter in known[program].params for option in (*parameter.opts, "--help")]
        return next((f"{program} has no {word}" for word in words if word not in options), None)
    name, *words = words
    if name not in known[program].commands:
        return f"{program} has no command {name}"
    if not words or words == ["--help"]:
        return None
    try:
        given = known[program].commands[name].make_context(name, list(words)).params
    except Exception as error:
        return None if type(error).__name__ == "MissingParameter" else f"{name}: {error}"
    config = given.get("config")
    if config is not None and (ROOT / config).is_relative_to(ROOT / "configs") and config.stem.islower():
        settings = [setting for setting in given["setting"] or [] if not setting.split("=")[1].isupper()]
        try:
            load(ROOT / config, settings, Continued if name == "continue" else Config)
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if not in_dev(path)], ids=lambda path: str(path.relative_to(ROOT))
)
def test_commands_in_the_documents_are_understood(document, apps):
    wrong = [objection(apps, *command) for command in commands(text_of(document))]
    assert not [said for said in wrong if said]


# -- Code ----------------------------------------------------------------------------------------------------------


def blocks():
    """Python of the documents: where it stands, what the comment above it (or what it continues) says, the code."""
    found = []
    pattern = re.compile(r"(?:^<!-- *([^\n]*?) *-->\n)?^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    for document in DOCUMENTS:
        text, marked, before = text_of(document), "", ""
        for block in pattern.finditer(text):
            line = text.count("\n", 0, block.start(2))
            mark, code = block.group(1) or "", block.group(2)
            if mark == "continues":
                mark, code = marked, before + code
            found.append((f"{document.relative_to(ROOT)}:{line}", mark, code))
            marked, before = mark, code
    return found


BLOCKS = blocks()
EXTRAS = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]


def required(extra):
    """Names of distributions that an extra brings by itself."""
    for line in EXTRAS[extra]:
        one = Requirement(line)
        if one.name == "sagebwd":
            for part in one.extras:
                yield from required(part)
        elif one.marker is None or one.marker.evaluate():
            yield one.name


def extras_named(document):
    """Extras that a page says to install."""
    groups = re.findall(r"'\.\[([\w,]+)\]'", text_of(ROOT / document))
    return {extra for group in groups for extra in group.split(",")}


BROUGHT = {name for extra in ("transformers", "diffusers", "diagnostics", "trainers") for name in required(extra)}


def imported(code):
    """Distributions of users' extras that a block imports."""
    return package.imported(code.encode()) & BROUGHT


def needed(document):
    """Distributions beside the package's own that a page's blocks need: what extras bring."""
    place = f"{document.relative_to(ROOT)}:"
    found = {name for at, _, code in BLOCKS if at.startswith(place) for name in imported(code)}
    for program, words in filter(None, map(started, shell_lines(text_of(document)))):
        if program.partition(".")[0] in ("lab", "benchmarks"):
            found.update(required("lab"))
        elif program == "sagebwd":
            found.update(required("diagnostics" if words[0] == "trace" else "cli"))
    return found


def test_pages_name_the_extra_of_what_their_blocks_run():
    missing = {}
    for document in DOCUMENTS:
        if document == ROOT / "README.md" or document.is_relative_to(ROOT / "docs"):
            named = {name for extra in extras_named(document) for name in required(extra)}
            missing[document.name] = needed(document) - named
    assert not {name: names for name, names in missing.items() if names}


def is_missing(need):
    """Whether this machine lacks what a block's mark says that it needs; the mark has to be one of these."""
    if need == "a GPU":
        return not torch.cuda.is_available()
    if need in ("a download", "a folder"):  # tests/kernels/test_families.py runs the latter
        return True
    accepted = "a GPU, a download, a folder, or a package's name"
    assert need.isidentifier(), f"'needs {need}' is not understood; accepted: {accepted}"
    return importlib.util.find_spec(need) is None


@pytest.mark.parametrize(("mark", "code"), [block[1:] for block in BLOCKS], ids=[block[0] for block in BLOCKS])
def test_code_in_the_documents_runs_as_printed(mark, code, tmp_path):
    compile(code, "a document", "exec")
    if mark:
        assert mark.startswith("needs "), f"<!-- {mark} -->: accepted are 'needs ...' and 'continues'"
        assert mark != "needs a GPU" or "cuda" in code, "says that it needs a GPU, and names no device"
        if is_missing(mark.removeprefix("needs ")):
            pytest.skip(mark)
    outcome = programs.run(code, tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    for said in re.findall(r"^print\(.*\)\n# (.*)$", code, re.MULTILINE):  # what the page says that a line prints
        assert re.search(".*".join(map(re.escape, said.split("..."))), outcome.stdout), f"{said}: {outcome.stdout}"
