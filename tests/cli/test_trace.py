"""`sagebwd trace`: what it reads and writes, and one line where something of that is wrong."""

import json
import lzma
import os
import stat
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sagebwd.cli import main as cli
from sagebwd.cli import outputs
from sagebwd.diagnostics import capture, models
from sagebwd.diagnostics import trace as study
from tests.commands import runner
from tests.diagnostics.test_capture import build, tokens


@pytest.fixture
def command(monkeypatch, capsys):
    return runner(cli.main, monkeypatch, capsys)


@pytest.fixture
def captured(tmp_path):
    """A file of two layers with four heads of 20 tokens."""
    path = tmp_path / "captured.safetensors"
    capture.save(capture.capture(build(), tokens(1, 20)), path)
    return path


@pytest.fixture
def unmeasured(monkeypatch):
    """Fails where something is read or measured."""

    def begun(*arguments, **options):
        raise AssertionError("something was read before outputs were checked")

    for module, name in ((study, "measure"), (capture, "load"), (models, "load_model")):
        monkeypatch.setattr(module, name, begun)


@pytest.mark.parametrize("option", ["--save", "--output", "--plot"])
@pytest.mark.parametrize("how", ["the same", "a link", "a hard link", "another way to write it"])
def test_what_is_loaded_is_never_written_over(command, captured, unmeasured, option, how, tmp_path):
    before, other = captured.read_bytes(), tmp_path / "other"
    if how == "a link":
        other.symlink_to(captured)
    elif how == "a hard link":
        other.hardlink_to(captured)
    path = {"the same": captured, "another way to write it": tmp_path / "new" / ".." / captured.name}.get(how, other)
    (tmp_path / "new").mkdir()
    code, _, err = command("trace", "--load", captured, option, path, "--heads", "0")
    assert code == 2
    assert f"{option} {path} would be written over --load {captured}; give another file" in err
    assert captured.read_bytes() == before


def test_no_two_outputs_and_nothing_of_a_model_are_one_file(command, tmp_path, unmeasured):
    build().save_pretrained(tmp_path / "model")
    new, text = tmp_path / "new.json", tmp_path / "text.txt"
    text.write_text("a text")
    for arguments, told in (
        (("--save", new, "--output", new), f"--output {new} would be written over --save {new}"),
        (("--output", tmp_path / "model" / "config.json"), "config.json would be written into --model"),
        (("--save", tmp_path / "model" / "part.safetensors"), "part.safetensors would be written into --model"),
        (("--text", text, "--plot", text), "text.txt would be written over --text"),
    ):
        code, _, err = command("trace", "--model", tmp_path / "model", *arguments)
        assert (code, told in err) == (2, True), err


@pytest.mark.parametrize("option", ["--save", "--output", "--plot"])
def test_a_path_that_cannot_be_written_is_said_before_anything_is_read(
    command, captured, unmeasured, option, tmp_path
):
    for path, told in (
        (captured / "x", f"{option}: {captured} is no folder; give another"),
        (captured / "x" / "y", f"{option}: {captured / 'x'} cannot be written (NotADirectoryError: Not a directory)"),
        (tmp_path, f"{option} {tmp_path} is a folder; give a file"),
    ):
        code, _, err = command("trace", "--model", "missing", option, path)
        assert (code, told in err, str(path.parent) in err) == (2, True, True), err


def test_without_matplotlib_a_plot_is_refused_before_anything_is_read(command, unmeasured, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = command("trace", "--model", "missing", "--plot", tmp_path / "plot.png")
    assert (code, "matplotlib" in err, "extra 'diagnostics' brings it" in err) == (2, True, True), err


def test_a_text_that_is_not_there_is_told_before_a_model_is_loaded(command, unmeasured, tmp_path):
    for path, told in ((tmp_path, "a folder"), (tmp_path / "text.txt", "there is no such file")):
        code, _, err = command("trace", "--model", "any", "--text", path)
        assert (code, f"text='{path}': {told}; give a file" in err) == (2, True), err


def test_what_is_protected_is_not_replaced(monkeypatch, tmp_path):
    path = tmp_path / "kept.json"
    path.write_text("kept")
    monkeypatch.setattr(os, "access", lambda given, mode: False)  # root may write all
    with pytest.raises(ValueError, match=r"kept.json cannot be written: it is write-protected"):
        outputs.check_files({"--output": path})


def test_a_pipe_is_written_to(command, captured, tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    code, _, err = command(
        "trace", "--load", captured, "--heads", "0", "--layers", "0", "--recipe", "full", "--output", path
    )
    assert (code, err.count("Error")) == (0, 0), err
    assert json.loads(os.read(reader, 1 << 16))["source"] == captured.name
    assert stat.S_ISFIFO(path.stat().st_mode)
    os.close(reader)


def test_files_are_whole_before_a_table_is_printed(command, captured, tmp_path, monkeypatch):
    output, save, plot = (tmp_path / "new" / name for name in ("o.json.xz", "s.safetensors", "p.png"))

    def gone(*arguments, **options):
        raise BrokenPipeError

    monkeypatch.setattr(cli.cli_trace, "console", SimpleNamespace(print=gone))
    arguments = "--output", output, "--save", save, "--plot", plot, "--heads", "1", "--recipe", "full"
    command("trace", "--load", captured, *arguments)
    assert {row["head"] for row in json.loads(lzma.decompress(output.read_bytes()))["rows"]} == {1}
    assert [call.heads for call in capture.load(save)] == [(1,), (1,)]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in output.parent.iterdir()) == sorted(x.name for x in (output, save, plot))


def test_what_is_cut_off_leaves_the_file_of_before(captured, monkeypatch):
    before = captured.read_bytes()

    def full(tensors, path, metadata):
        path.write_bytes(b"a part")
        raise capture.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(capture, "save_file", full)
    with pytest.raises(OSError, match=r"No space left on device .*captured\.safetensors"):
        capture.save(capture.load(captured), captured)
    assert captured.read_bytes() == before
    assert list(captured.parent.iterdir()) == [captured]


@pytest.mark.parametrize("layers", [None, "[]", "not JSON", "{}", '[{"layer": 0}]', "[1]", "null"])
def test_a_captured_file_that_does_not_say_its_layers(command, tmp_path, layers):
    path = tmp_path / "x.safetensors"
    described = {} if layers is None else {"layers": layers}
    save_file({"x": torch.zeros(1)}, path, {"format": "sagebwd.capture.1"} | described)
    code, _, err = command("trace", "--load", path)
    assert code == 2
    assert f"{path}: it does not say which layers it holds" in err


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("heads", [0]), ("heads", 5), ("heads", ["0"] * 4), ("group", 0), ("scale", "1"), ("scale", float("nan")),
        ("kv_heads", [0]), ("window", "all"), ("window", [1]),
    ],
)  # fmt: skip
def test_a_captured_file_whose_tensors_are_of_other_heads(command, captured, setting, value):
    with safe_open(captured, "pt") as file:
        metadata = file.metadata()
    tensors = {name: x.clone() for name, x in load_file(captured).items()}  # which it maps
    layers = json.loads(metadata["layers"])
    layers[1][setting] = value
    save_file(tensors, captured, metadata | {"layers": json.dumps(layers)})
    code, _, err = command("trace", "--load", captured, "--layers", "0", "--recipe", "full")
    assert (code, err.count("sagebwd:")) == (0, 0)
    code, _, err = command("trace", "--load", captured)
    assert code == 2
    assert f"{captured}: tensors of layer 1 are not those of the heads that it names" in err


@pytest.mark.parametrize(
    ("damaged", "content"), [("model.safetensors", b"no weights"), ("config.json", b"{"), ("tokenizer.json", b"{")]
)
def test_a_model_that_is_damaged_is_named(command, tmp_path, damaged, content):
    build().save_pretrained(tmp_path)
    (tmp_path / damaged).write_bytes(content)
    code, _, err = command("trace", "--model", tmp_path)
    assert code == 2
    assert f"model='{tmp_path}': it cannot be loaded (" in err


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.txt", b"", "it is empty"),
        ("x.txt.xz", b"no archive", "broken or cut-off archive (Input format not supported"),
        ("x.txt.xz", lzma.compress(b"text" * 99)[:-20], "broken or cut-off archive (Compressed file ended"),
        ("x.txt", b"\xff\xfe", "not UTF-8 (byte 0xff); convert it with: iconv"),
    ],
    ids=["empty", "no archive", "cut off", "other bytes"],
)
def test_a_text_that_cannot_be_read_is_named(command, monkeypatch, tmp_path, name, content, told):
    monkeypatch.setattr(models, "load_model", lambda path, device: None)
    (tmp_path / name).write_bytes(content)
    code, _, err = command("trace", "--model", "any", "--text", tmp_path / name)
    assert code == 2
    assert f"text='{tmp_path / name}': {told}" in err


def test_a_path_is_printed_as_it_is(command, captured, tmp_path):
    """Regression: what stands in brackets was taken for a style: left out, or an error once all was measured."""
    loaded, output = tmp_path / "[bold] in.safetensors", tmp_path / "out[" / "b].json"
    loaded.write_bytes(captured.read_bytes())
    code, out, err = command("trace", "--load", loaded, "--output", output, "--layers", "0", "--heads", "0")
    assert code == 0, err
    assert "[bold] in.safetensors" in out
    assert f"wrote {output}" in out
