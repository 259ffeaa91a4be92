"""Numbers in tables of the documents are those of the results files that their sections name.

A number of three decimals or digits and more is looked for in the files. That shows something only where the files are
not so full of numbers that any would be found: a section counts if most numbers that differ a little are not. Every
other section that names a file has a test of its own, cell by cell, or a command that prints it.
"""

import bisect
import json
import lzma
import math
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PRODUCTS = ("o", "dq", "dk", "dv")
OWN_TESTS = {
    "accuracy.md: Four kinds of data side by side":
        "test_docs_results.py::test_errors_side_by_side_are_those_of_the_files",
    "speed.md: `mixed` against FlashAttention-4": "test_docs_results.py::test_tflops_in_speed_are_those_of_the_file",
    "masks.md: Speed under block masks": "test_docs_results.py::test_the_table_of_block_masks_is_the_files",
    "auto.md: To time a machine": "tools/test_fit_auto.py::test_the_page_has_what_is_held_out",
    "auto.md: One H100": "test_docs_results.py::test_speeds_of_auto_are_those_of_the_file",
    "auto.md: One H200": "test_docs_results.py::test_speeds_of_auto_are_those_of_the_file",
    "speed-h100.md: Speed on an H100": "test_docs_results.py::test_speeds_of_widths_are_those_of_the_file",
    "speed.md: Widths": "test_docs_results.py::test_speeds_of_widths_are_those_of_the_file",
    "speed-token.md: `token` on the portable kernels by length":
        "test_docs_results.py::test_speeds_of_token_by_length_are_those_of_the_file",
    "speed-token.md: `token` and `paper` on the portable kernels": "test_docs_numbers.py::test_mean_speeds_of_token",
    "steps.md: The 325M model": "test_docs_numbers.py::test_tables_of_steps",
    "steps.md: A block of a video model": "test_docs_numbers.py::test_tables_of_steps",
    "steps-memory.md: Activation checkpointing": "test_docs_numbers.py::test_tables_of_steps",
    "steps-memory.md: Memory and the longest sequence": "test_docs_numbers.py::test_tables_of_steps",
    "trained-variants.md: Rotation and Q-smoothing": "test_docs_numbers.py::test_variants_on_a_trained_model",
    "trained-variants.md: Gradients of all weights": "test_docs_numbers.py::test_gradients_of_a_trained_model",
    "trained-variants.md: What makes the gradient's error": "test_docs_numbers.py::test_gradients_of_a_trained_model",
    "trained-variants.md: Gradients of all weights by the kernels":
        "test_docs_numbers.py::test_gradients_of_a_trained_model_by_the_kernels",
    "sinks.md: What happens": "test_docs_numbers.py::test_errors_by_the_strength_of_a_sink",
    "pretraining.md: A trained model, trained on":
        "test_docs_training.py::test_gaps_of_a_model_trained_on_are_those_of_the_files",
    "continued.md: By step, at 1e-4": "test_docs_training.py::test_gaps_by_step_are_those_of_the_files",
    "continued.md: By step, at 1e-3": "test_docs_training.py::test_gaps_by_step_are_those_of_the_files",
    "packed.md: Packed sequences": "test_docs_packed.py::test_speeds_of_packed_sequences_are_those_of_the_file",
    "passes.md: A budget of launches by bytes": "test_docs_packed.py::test_the_budget_of_launches_is_the_files",
    "pretraining-widths.md: Other head_dims, trained":
        "test_docs_training.py::test_gaps_at_other_widths_are_those_of_the_files",
    "pretraining-runs.md: Gaps": "test_docs_results.py::test_gaps_of_runs_are_those_of_the_files",
    "pretraining-runs.md: 325M weights at 2.1M tokens a step":
        "test_docs_results.py::test_losses_of_the_325m_model_are_those_of_the_files",
    "context_parallel.md: Measured": "test_docs_processes.py::test_times_of_the_ring_are_those_of_the_file",
    "training.md: Several GPUs": "test_docs_processes.py::test_weak_scaling_is_that_of_the_files",
    "pretraining-runs.md: Fine-tuning": "test_docs_numbers.py::test_accuracies_of_fine_tuning",
}  # fmt: skip
# Tables that no file holds: what prints them is named on the page.
BY_COMMAND = {
    "index.md: Every claim, and where it comes from": "the pages that it names",
    "accuracy-kinds.md: Accuracy by kind of data": "python -m tests.test_floors tables",
    "error-study-models.md: The instrument": "sagebwd trace",
    "sinks.md: What helps": "python -m lab.studies.sinks",
}


def sections():
    """Those with a table that name a results file or a folder of runs: by page and heading, the text and the paths."""
    found = {}
    for page in PAGES:
        if page.is_relative_to(ROOT / "docs" / "log"):
            continue
        for text in re.split(r"^##? ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            paths = set()
            for name in re.findall(r"(?:docs|benchmarks)/results/[\w./-]*\w", text):
                path = ROOT / name
                path = path / "comparison.json" if path.is_dir() else path
                if path.is_file() and path.suffix in (".json", ".txt", ".xz"):
                    paths.add(path)
            if paths and numbers_of(text):
                found[f"{page.name}: {text.splitlines()[0]}"] = text, sorted(paths)
    return found


def numbers_of(text):
    """Numbers of a text's tables, with three decimals or three digits or more."""
    lines = [line for line in re.findall(r"^\|.*\|$", text, re.MULTILINE) if not re.match(r"^\|[ :|-]+$", line)]
    found = [number for line in lines for number in re.findall(r"(?<![\w.])[-+]?\d*\.\d+(?![\w.])", line)]
    return [x for x in found if decimals(x) >= 3 or len(re.sub(r"\D", "", x).lstrip("0")) >= 3]


def decimals(number):
    return len(number.split(".")[1])


def leaves(content):
    """Every number in JSON."""
    if isinstance(content, (dict, list)):
        for value in content.values() if isinstance(content, dict) else content:
            yield from leaves(value)
    elif isinstance(content, (int, float)) and not isinstance(content, bool):
        yield float(content)


def held(path):
    """Every number in a results file."""
    content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    text = content.decode("utf-8")
    if path.suffix == ".txt":
        return [float(number) for number in re.findall(r"[-+]?\d*\.?\d+(?:e[-+]?\d+)?", text)]
    return leaves(
        [json.loads(line) for line in text.splitlines()] if path.name.endswith("jsonl.xz") else json.loads(text)
    )


SECTIONS = sections()


def test_a_section_is_looked_up_or_has_its_own_test():
    assert len(SECTIONS) >= 20
    assert set(OWN_TESTS) <= set(SECTIONS) | {"pretraining-runs.md: 325M weights at 2.1M tokens a step"}
    assert set(BY_COMMAND) <= set(SECTIONS)
    for place in OWN_TESTS.values():
        name, _, test = place.partition("::")
        assert f"def {test}(" in (ROOT / "tests" / name).read_text(encoding="utf-8"), place


@pytest.mark.parametrize("section", [name for name in SECTIONS if name not in OWN_TESTS | BY_COMMAND])
def test_numbers_of_a_table_are_in_the_files_that_its_section_names(section):
    text, paths = SECTIONS[section]
    known = sorted({abs(value) for path in paths for value in held(path)})

    def is_held(number, moved=0):
        step = 10.0 ** -decimals(number)
        value = abs(float(number)) + moved * step
        place = bisect.bisect_left(known, value - 0.501 * step)
        return place < len(known) and known[place] <= value + 0.501 * step

    numbers = numbers_of(text)
    assert not [number for number in numbers if not is_held(number)]
    others = [is_held(number, moved) for number in numbers for moved in (3, 7, 11)]
    assert sum(others) <= 0.35 * len(others), "its files hold nearly any number: give it a test of its own"


def rows_of(page, heading):
    """Cells of the lines of a section's tables."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    text = text[text.index(f"## {heading}\n") :].split("\n## ")[0]
    lines = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    return [re.split(r" ?\| ?", line) for line in lines if not line.startswith("---")]


def spelt(values, digits=4):
    return " / ".join(f"{value:.{digits}f}" for value in values)


@pytest.mark.parametrize(("page", "name"), [
    ("steps", "training_h200_2026-11-23_0c6affd"),
    ("steps", "training_h200_2026-11-23_00b09c6_video"),
    ("steps-memory", "training_h200_2026-11-23_00b09c6_checkpoint"),
    ("steps-memory", "training_h200_2026-11-23_00b09c6_graphs"),
    ("steps-memory", "largest-context_h200_2026-11-23_00b09c6"),
])  # fmt: skip
def test_tables_of_steps(page, name):
    """As the command prints them; the pages leave out a table of memory, no more."""
    pytest.importorskip("rich")
    from lab.steps.tables import markdown

    text = (RESULTS / f"{page}.md").read_text(encoding="utf-8")
    printed = [x for x in markdown([ROOT / "benchmarks" / "results" / f"{name}.json"]).split("\n\n") if x[0] == "|"]
    missing = [table for table in printed if table.strip() not in text]
    assert len(printed) - len(missing) >= 1
    assert all("kept GiB" in table for table in missing)
    assert not missing or name.endswith("graphs")


def test_mean_speeds_of_token():
    rows = json.loads((ROOT / "benchmarks/results/attention_h200_2026-11-21_963bc02.json").read_text())["rows"]
    lines = rows_of("results/speed-token.md", "`token` and `paper` on the portable kernels")[1:]
    assert [cells[0].partition("(")[0].strip("`") for cells in lines] == ["token", "paper"]
    for name, *cells in lines:
        recipe = name.strip("`").partition("(")[0]
        expected = []
        for head_dim in (64, 128):
            for peer in ("fa2_ms", "cudnn_ms"):
                means = []
                for direction in ("fwd", "bwd", "fwd+bwd"):
                    own = [
                        row[peer] / row["ms"]
                        for row in rows
                        if (row["impl"], row["recipe"], row["head_dim"], row["direction"])
                        == ("triton", recipe, head_dim, direction)
                        and 2048 <= row["tokens"] <= 32768
                        and row["heads"] == row["kv_heads"] == 2048 // head_dim
                    ]
                    means.append(statistics.geometric_mean(own))
                expected.append(means)
        found = [[float(x) for x in cell.replace("*", "").split(" / ")] for cell in cells]
        assert found == [[pytest.approx(x, abs=0.0051) for x in means] for means in expected]


def test_variants_on_a_trained_model():
    rows = json.loads((RESULTS / "trained_heads_smollm2.json").read_text())["rows"]
    lines = rows_of("results/trained-variants.md", "Rotation and Q-smoothing")[1:]
    assert len(lines) == len(rows[0]["errors"])
    for name, cell in lines:
        own = [row["errors"][name.strip("`")] for row in rows]
        assert cell == spelt(math.sqrt(statistics.mean(one[x] ** 2 for one in own)) for x in PRODUCTS)


@pytest.mark.parametrize(
    ("section", "file"),
    [("Gradients of all weights", "smollm2"), ("What makes the gradient's error", "bounds")],
)
def test_gradients_of_a_trained_model(section, file):
    rows = json.loads((RESULTS / f"trained_gradients_{file}.json").read_text())["rows"]

    def mean(values, sign=""):
        return f"{statistics.mean(values):{sign}.4f} ± {statistics.stdev(values) / math.sqrt(len(values)):.4f}"

    lines = rows_of("results/trained-variants.md", section)[1:]
    assert len(lines) == len(rows[0]["recipes"])
    for name, *cells in lines:
        own = [row["recipes"][name.strip("`")] for row in rows]
        parts = [[one[f"{x}_proj"]["error"] for one in own] for x in "qkvo"]
        assert cells == [
            mean([one["loss"] for one in own], "+"),
            mean([one["all"]["slope"] for one in own], "+"),
            mean([one["all"]["error"] for one in own]),
            ", ".join(f"{statistics.mean(values):.4f}" for values in parts),
        ]


def test_gradients_of_a_trained_model_by_the_kernels():
    lines = iter(rows_of("results/trained-variants.md", "Gradients of all weights by the kernels")[1:])
    for name in ("start", "lr-0.001-250", "lr-0.001-500"):
        rows = json.loads((RESULTS / f"trained_gradients_h200_{name}.json").read_text())["rows"]
        sound = [row for row in rows if row["recipes"]["bf16"]["all"]["error"] < 0.05]
        for recipe in rows[0]["recipes"]:
            slopes, of_sound = ([row["recipes"][recipe]["all"]["slope"] for row in some] for some in (rows, sound))
            errors = [row["recipes"][recipe]["all"]["error"] for row in rows]
            means = [
                f"{statistics.mean(x):+.4f} ± {statistics.stdev(x) / math.sqrt(len(x)):.4f}"
                for x in (slopes, of_sound)
            ]
            assert next(lines)[1:] == [
                f"{len(rows)}, {len(sound)}", f"`{recipe}`", *means, f"{statistics.median(slopes):+.4f}",
                f"{statistics.mean(errors):.4f}, {statistics.median(errors):.4f}",
            ]  # fmt: skip
    assert not list(lines)


def test_errors_by_the_strength_of_a_sink():
    rows = json.loads((RESULTS / "sinks_64.json").read_text())["rows"]
    first = {(row["logits"], row["recipe"]): row for row in rows if row["kind"] == "first"}
    lines = rows_of("sinks.md", "What happens")
    recipes = [re.search(r"`(.*?)`", cell).group(1) for cell in lines[0][1:]]
    assert recipes == ["paper", "token(first_key=int8)", "token", "mixed"]
    assert len(lines) == 8
    for strength, *cells in lines[1:]:
        logits, weight = re.fullmatch(r"(\d+) \(([\d.]+)\)", strength).groups()
        for recipe, cell in zip(recipes, cells, strict=True):
            row = first[int(logits), recipe]
            assert float(weight) == pytest.approx(row["weight"], abs=0.0051)
            assert [float(x) for x in cell.split(" / ")] == pytest.approx([row[x] for x in PRODUCTS[:3]], abs=5.1e-5)


def test_errors_of_sinks_elsewhere():
    rows = json.loads((RESULTS / "sinks_64.json").read_text())["rows"]
    of_kind = {}
    for row in rows:
        if row["logits"] == 12:
            of_kind.setdefault(row["kind"], {})[row["recipe"]] = [row[x] for x in PRODUCTS[:3]]
    lines = rows_of("sinks.md", "Sinks elsewhere")[1:]
    assert len(lines) == len(of_kind)
    for _, *cells in lines:
        found = [[float(x) for x in cell.split(" / ")] for cell in cells]
        assert [
            kind
            for kind, own in of_kind.items()
            if found == [pytest.approx(own[name], abs=5.1e-5) for name in ("paper", "token", "mixed")]
        ]


def test_accuracies_of_fine_tuning():
    lines = {cells[0].strip("`"): cells[1:] for cells in rows_of("results/pretraining-runs.md", "Fine-tuning")[1:]}
    for column, task in ((0, "neighbours"), (2, "subject")):
        for row in json.loads((RESULTS / "finetune" / task / "comparison.json").read_text())["outcomes"]:
            accuracy, difference = lines[row["variant"]][column : column + 2]
            assert accuracy
            assert accuracy.startswith(f"{row['mean']:.4f}".removeprefix("0"))
            if row["deviation"] is not None:
                assert accuracy.split(" ± ")[1].startswith(f"{row['deviation']:.4f}".removeprefix("0"))
            if row["variant"] != "full precision":
                assert difference.startswith(f"{row['difference']:+.4f}".replace("0.", ".", 1))
