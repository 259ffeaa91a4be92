"""The package as it is imported, and run by `python -m`."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(*arguments, first=()):
    """What Python prints, given folders that come first on its path."""
    path = os.pathsep.join([*map(str, first), str(ROOT / "src")])
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": path}
    )


def test_without_numpy_nothing_is_printed_that_torch_does_not_print(tmp_path):
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise ModuleNotFoundError('No module named numpy')\n")
    torch, both = (run("-c", program, first=[tmp_path]) for program in ("import torch", "import torch, sagebwd"))
    assert (both.stdout, both.stderr) == (torch.stdout, torch.stderr)


def test_python_m_is_the_command_line():
    assert "pretrain" in run("-m", "sagebwd", "--help").stdout
