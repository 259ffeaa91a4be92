"""The documents do not drift from the code."""

import ast
import importlib.util
import re
import shlex
from pathlib import Path
from string import Template

import pytest
import torch

from sagebwd import Recipe
from tests import programs

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").rglob("*.md")]
RESULTS = [ROOT / "docs" / "results", ROOT / "benchmarks" / "results"]
EXPERIMENT = {"comparison.json", "comparison.md", "curves.png", "runs.jsonl.xz"}  # what a folder of runs holds


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_named_in_documents_exist(document):
    text = document.read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|lab|tests|tools|configs|docs|benchmarks)/[\w./-]+)`", text)
    missing = [path for path in named if not (ROOT / path).exists()]
    assert not missing


def test_every_results_file_is_cited_and_every_cited_one_exists():
    """By its path or, where a page links to it, its name; of an experiment's own files the folder is enough."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    cited = set(re.findall(r"(?:docs|benchmarks)/results/[\w./-]*[\w]", text))
    cited |= {
        str((document.parent / link).resolve().relative_to(ROOT))
        for document in DOCUMENTS
        for link in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    }
    files = [path.relative_to(ROOT) for folder in RESULTS for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 50
    uncited = [
        str(path)
        for path in files
        if str(path) not in cited and not (path.name in EXPERIMENT and str(path.parent) in cited)
    ]
    assert not uncited, "cite them in a document, or delete them"
    assert not [path for path in cited if not (ROOT / path).exists()], "cited, and not there"
    assert not [str(path) for path in files if " " in str(path)], "no spaces in names"


def test_pages_are_short():
    """But the log's and the reference's, which is written from docstrings: 150 lines; the README, read first, 110."""
    lengths = {path.relative_to(ROOT): len(path.read_text(encoding="utf-8").splitlines()) for path in DOCUMENTS}
    exempt = {path for path in lengths if path.parts[:2] in (("docs", "log"), ("docs", "reference"))}
    exempt.add(Path("CHANGELOG.md"))
    assert not {str(path): lines for path, lines in lengths.items() if path not in exempt and lines > 150}
    assert lengths[Path("README.md")] <= 110


def test_the_readme_installs_and_calls_before_it_explains():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert next(number for number, line in enumerate(lines, 1) if "pip install" in line) < 25
    assert lines.index("```python") + 1 < 45


def test_imports_in_the_tables_of_the_readme_run(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(.*?)\]\(.*?\) \| (.*) \|$", text, re.MULTILINE)
    assert [name for name, _ in rows] == ["SDPA", "flash-attn", "Transformers", "FlexAttention", "SageAttention"]
    found = {name: re.findall(r"`(from .*? import .*?)`", cells) for name, cells in rows}
    assert all(found.values())
    optional = importlib.util.find_spec("transformers") is None
    imports = [line for name, own in found.items() for line in own if name != "Transformers" or not optional]
    outcome = programs.run("\n".join(imports), tmp_path)
    assert outcome.returncode == 0, outcome.stderr


def test_every_page_is_two_clicks_from_the_readme():
    """But the log's, which its own index lists."""
    found = met = {ROOT / "README.md"}
    for _ in range(2):
        links = (
            (page.parent / link).resolve()
            for page in met
            for link in re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        )
        met = set(links)
        found = found | met
    log = ROOT / "docs" / "log"
    assert {str(page) for page in DOCUMENTS if page not in found and not page.is_relative_to(log)} == set()
    pages = {path for path in log.glob("*.md") if path.name != "README.md"}
    text = (log / "README.md").read_text(encoding="utf-8")
    assert not [path.name for path in pages if f"({path.name})" not in text]


def test_contributing_has_a_line_for_every_tool():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    names = [path.stem for path in (ROOT / "tools").glob("[!_]*.py")]
    names += [path.parent.name for path in (ROOT / "tools").glob("*/__main__.py")]
    assert len(names) >= 9
    assert not [name for name in names if f"| `python -m tools.{name}" not in text and f"tools/{name}.py" not in text]


def test_recipes_named_in_the_method_parse():
    pages = [ROOT / "docs" / f"{name}.md" for name in ("method", "gradients-e4m3", "causality")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    recipes = re.findall(r'"((?:token|paper|full)\([^"]*\))"', text.replace("\n", " "))
    assert recipes
    for recipe in recipes:
        Recipe.parse(recipe)


def messages_in_source():
    """Every text of the sources as a pattern, in which a value that is filled in matches anything."""
    patterns = []
    for path in [*(ROOT / "src" / "sagebwd").rglob("*.py"), *(ROOT / "lab").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if not all(isinstance(part, ast.FormattedValue | ast.Constant) for part in parts):
                continue
            fixed = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            if sum(len(text) for text in fixed if isinstance(text, str)) >= 20:
                patterns.append("".join(".+" if text is None else re.escape(str(text)) for text in fixed))
    return patterns


def test_messages_quoted_in_troubleshooting_are_in_the_source():
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("troubleshooting*.md"))]
    assert len(pages) == 3
    text = "\n".join(pages)
    quoted = [" ".join(block.split()) for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL)]
    assert len(quoted) >= 15
    patterns = re.compile("|".join(f"(?:{pattern})" for pattern in messages_in_source()))
    assert not [message for message in quoted if not patterns.fullmatch(message)]


def test_every_command_has_its_row():
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(?:python -m )?(\w+) ([\w-]+)", text, re.MULTILINE)
    assert set(rows) == {(program, name) for program, app in apps().items() for name in app.commands}


def test_links_between_documents_lead_somewhere():
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8")):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


def anchors(document):
    """The headings of a document as GitHub's links name them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_links_to_sections_lead_to_a_heading():
    for document in DOCUMENTS:
        for link, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text(encoding="utf-8")):
            assert anchor in anchors(document.parent / link if link else document), f"{document.name}: {link}#{anchor}"


PROGRAMS = ("sagebwd", "lab", "benchmarks")
COMMAND = re.compile(
    r"(?:\w+=\S+ )*(?:(?:torchrun|accelerate launch) .*?-m |python -m |(?=sagebwd(?: |$)))([\w.]+)(?: |$)"
)


def started(line):
    """The program that a command line starts, a module or sagebwd, and its words; None of a line that starts none."""
    match = COMMAND.match(line)
    return match and (match[1], shlex.split(line[match.end() :], comments=True))


def commands():
    """Command lines of the documents but the log, in blocks of shell and in the text: where, program and words."""
    found = []
    for document in DOCUMENTS:
        if document.is_relative_to(ROOT / "docs" / "log"):  # what was run at its commit
            continue
        text = document.read_text(encoding="utf-8")
        blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        lines += [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
        variables: dict[str, str] = {}
        for line in lines:
            for name, value in re.findall(r"""\b([A-Z])=("[^"]*"|[^\s;]+)""", line):
                variables[name] = Template(value.strip('"')).safe_substitute(variables)
            if command := started(Template(line).safe_substitute(variables)):
                found.append((str(document.relative_to(ROOT)), *command))
    return found


def apps():
    """The commands of each of `PROGRAMS`, by name."""
    typer = pytest.importorskip("typer")
    modules = (importlib.import_module(name) for name in ("sagebwd.cli.main", "lab.__main__", "benchmarks.__main__"))
    found = {name: typer.main.get_command(module.app) for name, module in zip(PROGRAMS, modules)}
    found["lab"].commands["trace"] = found["sagebwd"].commands["trace"]  # which hands its options over
    return found


def objection(known, program, words):
    """What is wrong of a command line; "" of one that is understood, None of one that names no command.

    Modules have to exist; commands the options that they are given; configs have to be there and have the keys.
    """
    from lab.training.config import Config, load
    from lab.training.continued.config import Continued
    from lab.training.finetune_config import Finetuning

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
            load(ROOT / config, settings, {"finetune": Finetuning, "continue": Continued}.get(name, Config))
        except ValueError as error:
            return str(error)
    return ""


def test_commands_in_the_documents_are_understood():
    known, tried = apps(), dict.fromkeys(PROGRAMS, 0)
    for where, program, words in commands():
        wrong = objection(known, program, words)
        assert not wrong, f"{where}: {wrong}"
        if wrong is not None:
            tried[program] += 1
    assert tried["lab"] >= 30
    assert tried["benchmarks"] >= 10
    assert tried["sagebwd"] >= 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("sagebwd doctor --measured", "No such option"),
        ("sagebwd --versions", "has no --versions"),
        ("sagebwd bench --recipe token", "sagebwd has no command bench"),
        ("python -m sagebwd_cli x", "there is no module sagebwd_cli"),
        ("python -m benchmarks attention --recipes token", "No such option"),
        ("python -m lab train --config configs/demo.yaml", "lab has no command train"),
        ("python -m lab compare --config configs/none.yaml", "there is no such file"),
        ("python -m lab compare --config configs/demo.yaml --set model.widht=3", "did you mean model.width"),
        ("torchrun --nproc-per-node 8 -m lab pretrain --confg configs/demo.yaml", "No such option"),
        ("CUDA_VISIBLE_DEVICES=0 accelerate launch --num_processes 8 -m lab compare --onyl x", "No such option"),
    ],
)
def test_wrong_commands_are_seen(line, told):
    assert told in objection(apps(), *started(line))


def blocks():
    """Python of the documents: where it stands, what the comment above it says of it (or nothing), the code."""
    found = []
    pattern = re.compile(r"(?:^<!-- *(.*?) *-->\n)?^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    for document in DOCUMENTS:
        text, before = document.read_text(encoding="utf-8"), ""
        for block in pattern.finditer(text):
            line = text.count("\n", 0, block.start(2))
            mark, code = block.group(1) or "", block.group(2)
            if mark == "continues":
                mark, code = "", before + code
            found.append((f"{document.relative_to(ROOT)}:{line}", mark, code))
            before = code
    return found


BLOCKS = blocks()


def is_missing(need):
    """Whether this machine lacks what a block's mark says that it needs; the mark has to be one of these."""
    if need == "a GPU":
        return not torch.cuda.is_available()
    if need in ("a download", "a build"):  # tests/tools/test_kernels_repo.py runs the latter
        return True
    accepted = "a GPU, a download, a build, or a package's name"
    assert need.isidentifier(), f"'needs {need}' is not understood; accepted: {accepted}"
    return importlib.util.find_spec(need) is None


@pytest.mark.parametrize(("mark", "code"), [block[1:] for block in BLOCKS], ids=[block[0] for block in BLOCKS])
def test_code_in_the_documents_runs_as_printed(mark, code, tmp_path):
    if mark:
        assert mark.startswith("needs "), f"<!-- {mark} -->: accepted are 'needs ...' and 'continues'"
        assert mark != "needs a GPU" or "cuda" in code, "says that it needs a GPU, and names no device"
        if is_missing(mark.removeprefix("needs ")):
            pytest.skip(mark)
    outcome = programs.run(code, tmp_path)
    assert outcome.returncode == 0, outcome.stderr


def test_code_that_fails_is_seen(tmp_path):
    for code, returncode, told in (("import sys; sys.exit(3)", 3, ""), ("1 / 0", 1, "ZeroDivisionError"), ("", 0, "")):
        outcome = programs.run(code, tmp_path)
        assert outcome.returncode == returncode
        assert told in outcome.stderr


def test_most_code_in_the_documents_needs_nothing():
    assert len(BLOCKS) >= 8
    assert sum(bool(mark) for _, mark, _ in BLOCKS) <= len(BLOCKS) / 3
