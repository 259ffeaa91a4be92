"""docs/support.md names the versions and cards that the records, CI and the tests are of."""

import json
import re
import tomllib

from tests.documents import ROOT
from tests.kernels import test_compile

PAGE = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")


def test_every_record_is_of_a_version_and_a_card_that_the_page_names():
    found = set()
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        for part in (record, *record.values()) if isinstance(record, dict) else ():
            if isinstance(part, dict) and isinstance(part.get("torch"), str):
                found.add((part["torch"].partition("+")[0], part["triton"], part["gpu"].split()[1]))
    assert found
    row = dict(re.findall(r"^\| (\w+) \| [^|]* \| ([^|]*) \|", PAGE, re.MULTILINE))
    for torch, triton, card in found:
        assert torch in row["torch"]
        assert triton in row["triton"]
        assert f" {card} " in PAGE.partition("## What was tested")[2]


def test_versions_of_ci_and_of_the_package_are_named():
    constraints = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name in ("torch", "triton"):
        assert f" {constraints[name]} in CI" in PAGE
        lowest = next(re.search(r">=([\d.]+)", x)[1] for x in project["dependencies"] if x.startswith(f"{name}>="))
        assert re.search(rf"^\| {name} \| {re.escape(lowest)} to ", PAGE, re.MULTILINE)
    for requirement in project["optional-dependencies"]["hopper"]:
        assert requirement.partition(";")[0].strip().replace("==", " ") in PAGE


def test_every_architecture_that_is_compiled_has_its_row():
    rows = dict(re.findall(r"^\| (\d+\.\d) \| .* \| ([^|]*) \|$", PAGE, re.MULTILINE))
    assert {int(name.replace(".", "")) for name in rows} == set(test_compile.SHARED_BYTES)
    assert {name for name, state in rows.items() if "timed" in state} == {"9.0"}
