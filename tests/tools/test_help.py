"""Every `python -m` of a clone says how it is called."""

import runpy
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("tools", "lab", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--nonsense", 2)])
@pytest.mark.parametrize("module", MODULES)
def test_a_command_says_how_it_is_called(module, argument, code, monkeypatch, capsys):
    """Regression: some took --help for a recipe, a page or a folder to write."""
    pytest.importorskip("triton")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [module, argument])
    monkeypatch.delitem(sys.modules, module, raising=False)
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__")
    finally:
        signal.signal(signal.SIGINT, handler)  # a command's ends the process
    assert ended.value.code == code
    printed = capsys.readouterr()
    assert "usage" in (printed.out + printed.err).lower()
