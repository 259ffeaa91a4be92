"""A process that imports sagebwd: what it prints, and which environment variables it reads."""

import logging
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lab.training.config import Data
from lab.training.data import _cache_folder
from sagebwd import environment
from tests import programs

ROOT = Path(__file__).parent.parent


def test_without_numpy_nothing_is_printed_that_torch_does_not_print(tmp_path):
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("raise ModuleNotFoundError('No module named numpy')\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src")])}
    torch, both = (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
        for program in ("import torch", "import torch, sagebwd")
    )
    assert (both.stdout, both.stderr) == (torch.stdout, torch.stderr)


SWITCHES = f"""
import os, sys
for name in [name for name in os.environ if name.startswith({environment.PREFIX!r}) and name not in sys.argv]:
    del os.environ[name]
from sagebwd.switches import current
print(current)
"""


def test_switches_are_read_on_import(tmp_path):
    variables = {"SAGEBWD_DETERMINISTIC": "1", "SAGEBWD_DISABLED": "0", "SAGEBWD_BACKWARD_16BIT": ""}
    done = programs.run(SWITCHES, tmp_path, *variables, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "_Switches(disabled=False, backward_16bit=False, deterministic=True)\n"


def test_a_variable_that_nothing_reads_is_warned_of(tmp_path):
    """As SAGEBWD_CACHE, which the folder of token files once had beside SAGEBWD_CACHE_DIR."""
    variables = {"SAGEBWD_CACHE": "/tmp", "SAGEBWD_CACHE_DIR": "/tmp"}
    done = programs.run(SWITCHES, tmp_path, *variables, **variables)
    assert done.returncode == 0
    assert done.stderr.count("is not read by sagebwd") == 1
    assert "SAGEBWD_CACHE is not read by sagebwd; accepted: " in done.stderr


@pytest.mark.parametrize("variable", environment.FLAGS)
def test_a_flag_is_0_or_1(variable, monkeypatch):
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(variable, value)
        environment.check()
        assert environment.is_on(variable) is expected
    monkeypatch.setenv(variable, "yes")
    for refuses in (environment.check, lambda: environment.is_on(variable)):
        with pytest.raises(ValueError, match=f"{variable}='yes' is not understood; accepted: 0 and 1"):
            refuses()


def test_one_folder_for_all_that_is_kept(monkeypatch):
    monkeypatch.delenv("SAGEBWD_CACHE_DIR", raising=False)
    assert environment.cache_folder() == _cache_folder(Data()) == Path.home() / ".cache" / "sagebwd"
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", "~/elsewhere")
    assert environment.cache_folder() == _cache_folder(Data()) == Path.home() / "elsewhere"
    assert _cache_folder(Data(cache="~/given")) == Path.home() / "given"
    tune = pytest.importorskip("sagebwd.kernels.portable.tune")
    assert tune.CACHE.name == "launch.json"


# A user without a home: no variable, and no entry of its number in the system's list.
HOMELESS = """
import os, pwd, tempfile
def getpwuid(number): raise KeyError(number)
pwd.getpwuid = getpwuid
for name in ("HOME", "SAGEBWD_CACHE_DIR"): os.environ.pop(name, None)
tempfile.tempdir = os.getcwd()
"""
HOMELESS_CALL = f"""{HOMELESS}
import torch
from sagebwd import dispatch, environment, sage_attention
from sagebwd.auto import model, timings
from sagebwd.kernels.portable import tune
timings.of_card("NVIDIA H200", "0")
x = torch.randn(1, 1, 4, 8)
sage_attention(x, x, x)
print(environment.cache_folder(), tune.CACHE.parent)
"""


def test_without_a_home_the_folder_is_of_the_process(tmp_path):
    """Regression: RuntimeError on import, and from every call of auto on a GPU."""
    pytest.importorskip("sagebwd.kernels.portable.tune")
    done = programs.run(HOMELESS_CALL, tmp_path)
    assert done.returncode == 0, done.stderr
    folder, other = map(Path, done.stdout.split())
    assert folder == other
    assert folder.parent == tmp_path
    assert done.stderr.count("~/.cache/sagebwd cannot be written (RuntimeError: ") == 1
    assert "set SAGEBWD_CACHE_DIR to one that can be written" in done.stderr


def test_an_unwritable_folder_is_told_once(caplog, tmp_path):
    with caplog.at_level(logging.WARNING, "sagebwd"):
        for n in range(2):  # of a temporary name, which is never the same
            environment.warn_of_unwritable(tmp_path / "nowhere", PermissionError(f"no {n}"))
    (said,) = caplog.messages
    for part in ("nowhere cannot be written (PermissionError: no 0)", "set SAGEBWD_CACHE_DIR to one that can"):
        assert part in said


def test_the_folder_of_a_process_goes_with_it_alone(tmp_path):
    program = """
import os, sys, tempfile
tempfile.tempdir = os.getcwd()
from sagebwd.environment import folder_of_process
folder = folder_of_process(os.getpid())
if os.fork() == 0:
    assert folder_of_process(os.getpid()) != folder
    sys.exit()
os.wait()
print(folder, folder.is_dir())
"""
    done = programs.run(program, tmp_path)
    assert done.returncode == 0, done.stderr
    folder, there = done.stdout.split()
    assert (there, Path(folder).parent) == ("True", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_files_that_many_write_are_whole(tmp_path):
    path, texts = tmp_path / "folder" / "file", [str(n) * 5000 for n in range(4)]
    failed = []

    def write(text):
        try:
            for _ in range(50):
                environment.write_whole(path, text)
        except OSError as error:
            failed.append(error)

    environment.write_whole(path, texts[0])
    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert path.read_text() in texts
    assert not failed
    assert path.read_text() in texts
    assert [x.name for x in path.parent.iterdir()] == ["file"]


def test_the_longest_name_is_one(tmp_path):
    """Regression: the file that is moved to it had a longer one, which the error named."""
    path = tmp_path / ("x" * os.pathconf(tmp_path, "PC_NAME_MAX"))
    environment.write_whole(path, "new")
    assert [x.name for x in tmp_path.iterdir()] == [path.name]


def test_a_file_keeps_its_mode_and_a_new_one_has_that_of_others(tmp_path):
    """Regression: what another library writes, as safetensors, was its owner's alone; a secret file was all's."""

    def own(path):
        path.unlink(missing_ok=True)
        os.close(os.open(path, os.O_CREAT, 0o600))

    (tmp_path / "file").touch()
    environment.write_whole(tmp_path / "new", own)
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "file").stat().st_mode
    (tmp_path / "file").chmod(0o640)
    environment.write_whole(tmp_path / "file", "new")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_link_is_followed_and_a_pipe_is_written_to(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    environment.write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    reader, writer = os.pipe()  # as /dev/stdout is one, which then leads to no path
    (tmp_path / "pipe").symlink_to(f"/dev/fd/{writer}")
    environment.write_whole(tmp_path / "pipe", "new")
    assert os.read(reader, 99) == b"new"
    os.close(reader)
    os.close(writer)


def test_a_protected_file_is_not_replaced(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write all
    with pytest.raises(PermissionError, match=str(tmp_path / "file")):
        environment.write_whole(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def full(path):
        path.write_text("a part")
        raise OSError(28, "No space left on device", str(path))

    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/new'"):
        environment.write_whole(tmp_path / "new", full)
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        environment.write_whole(tmp_path / "file", "text")
    assert [x.name for x in tmp_path.iterdir()] == ["file"]
