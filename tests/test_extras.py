"""A module whose optional packages are missing says which extra brings them."""

import json
import pkgutil
import tomllib
from pathlib import Path

import pytest

from sagebwd import diagnostics, integrations
from sagebwd.extras import extra
from tests import programs

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
DOORS = [
    module.name
    for package in (integrations, diagnostics)
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
]
# Without what the extras bring: what each module raises.
PROGRAM = """
import importlib, json, sys
for missing in ("accelerate", "diffusers", "matplotlib", "rich", "safetensors", "transformers", "typer"):
    sys.modules[missing] = None
raised = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raised[name] = str(error)
print(json.dumps(raised))
"""


def test_every_door_names_its_extra():
    """Regression: No module named 'transformers', and no more."""
    done = programs.run(PROGRAM, ROOT, *DOORS)
    assert done.returncode == 0, done.stderr
    raised = json.loads(done.stdout)
    assert {name.removeprefix("sagebwd.") for name in raised} >= {
        "integrations.transformers", "integrations.transformers_sharing", "integrations.diffusers",
        "diagnostics.capture", "diagnostics.monitor", "diagnostics.models",
    }  # fmt: skip
    for name, message in raised.items():
        assert any(f"in a clone of sagebwd: pip install '.[{known}]'" in message for known in EXTRAS), (name, message)
    assert "extra 'transformers'" in raised["sagebwd.integrations.transformers"]
    assert "extra 'diffusers'" in raised["sagebwd.integrations.diffusers"]


def test_a_package_that_is_too_old_is_named():
    said = r"cannot import name 'of_tomorrow' from 'json'.*pip install '\.\[lab\]'"
    with pytest.raises(ImportError, match=said), extra("lab"):
        from json import of_tomorrow  # noqa: F401
    with pytest.raises(ValueError, match=r"^as it is$"), extra("lab"):
        raise ValueError("as it is")
