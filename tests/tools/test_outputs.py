"""Programs that run for long: what they are to write is looked at before they begin."""

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "arguments", "told"),
    [
        ("call_sequences", ("--device", "cpu", "--output", "FILE/x"), "FILE is no folder; give another"),
        ("sweep_transformers", ("--table", "FILE/x"), "FILE is no folder; give another"),
        (
            "sweep_transformers",
            ("--rows", "FILE", "--table", "FILE"),
            "--table FILE would be written over --rows FILE",
        ),
    ],
)
def test_what_cannot_be_written_is_said_at_once(module, arguments, told, monkeypatch, capsys, tmp_path):
    path = tmp_path / "file"
    path.write_text("kept")
    arguments, told = [x.replace("FILE", str(path)) for x in arguments], told.replace("FILE", str(path))
    program = importlib.import_module(f"tools.{module}")
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    given = () if module == "sweep_transformers" else (arguments,)
    with pytest.raises(SystemExit, match="2"):
        program.main(*given)
    assert told in capsys.readouterr().err
    assert path.read_text() == "kept"
