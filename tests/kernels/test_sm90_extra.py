"""Whatever is missing or broken of the extra ``hopper``, other kernels run; `doctor` says what, and what mends it."""

from __future__ import annotations

import _ctypes
import logging
import os
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from sagebwd import environment
from sagebwd.kernels.sm90.forward import compile as sm90
from sagebwd.kernels.sm90.widths import ForwardTile
from tests import programs
from tools import house

ANY_LIBRARY = _ctypes.__file__
KERNEL = "sagebwd.kernels.sm90.forward.kernel"
REINSTALL = "(pip install --force-reinstall nvidia-cutlass-dsl=={nvidia-cutlass-dsl})".format(**sm90.VERSIONS)
# A process that takes its GPU for an H100, and a folder's packages for those installed.
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
sys.modules.pop("nvidia_cutlass_dsl", None)  # which a .pth imports
from types import SimpleNamespace
import torch
import sagebwd
from sagebwd import Recipe, dispatch
from sagebwd.cli import doctor
from sagebwd.arguments import ask_of

assert not {"cutlass", "tvm_ffi"} & set(sys.modules)
dispatch.arch_of = lambda device: 90 if device.type == "cuda" else 0
query = SimpleNamespace(shape=(1, 1, 1, 64), dtype=torch.bfloat16, device=torch.device("cuda", 0))
for _ in range(2):
    choice = dispatch.choose(ask_of(query, query, "auto", None))
    assert choice.recipe == Recipe.named("mixed")
print(choice.name)
# what CuTe's kernel alone takes
recipe = choice.recipe.replace(dv="16bit", dq="16bit", dk="16bit")
try:
    dispatch.choose(ask_of(query, query, recipe, "hopper"))
except NotImplementedError as error:
    print(error)
else:
    print("taken")
print(doctor._forward_of_mixed())
"""


def installed(folder: Path, cutlass: str, tvm_ffi: str = "", runtime: bool = True) -> Path:
    """A folder of packages in their versions, with the given ``__init__.py``."""
    for package, version in sm90.VERSIONS.items():
        information = folder / f"{package.replace('-', '_')}-{version}.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    found = f"class libinfo: find_libtvm_ffi = lambda: {ANY_LIBRARY!r}\n"
    for package, text in (("cutlass", cutlass), ("tvm_ffi", found + tvm_ffi), ("nvidia_cutlass_dsl", "")):
        (folder / package).mkdir()
        (folder / package / "__init__.py").write_text(text)
    if runtime:
        library = folder / "nvidia_cutlass_dsl" / "cu12" / "lib" / "libcute_dsl_runtime.so"
        library.parent.mkdir(parents=True)
        library.symlink_to(ANY_LIBRARY)
    return folder


def asked(folder: Path, cache: Path) -> list[str]:
    """Whose kernel runs ``auto``, what a call is told that CuTe DSL's alone would take, and what `doctor` says."""
    done = programs.run(PROGRAM, cache, str(folder), SAGEBWD_CACHE_DIR=str(cache), CC=sys.executable)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        # the wheel with cutlass.cute is missing, or another package is called cutlass
        ({"cutlass": ""}, "ModuleNotFoundError: No module named 'cutlass.c"),
        ({"cutlass": "raise OSError('libA.so: cannot open it')"}, "OSError: libA.so: cannot open it"),
        ({"cutlass": "raise AttributeError('gone')"}, "AttributeError: gone"),
        ({"cutlass": "", "runtime": False}, "FileNotFoundError: there is no nvidia_cutlass_dsl/cu*/lib/libcute_dsl_"),
        ({"cutlass": "", "tvm_ffi": "raise ImportError('core')"}, "apache-tvm-ffi is installed but broken: ImportErr"),
    ],
    ids=["no cutlass.cute", "no library", "another interface", "no runtime", "no TVM-FFI"],
)
def test_what_is_broken_leaves_the_call_to_other_kernels(parts, reason, tmp_path):
    name, refusal, advice = asked(installed(tmp_path / "packages", **parts), tmp_path)
    assert name == "triton/hopper"
    assert refusal.startswith("impl='hopper' does not support this call: ")
    assert reason in refusal
    assert advice.startswith("forward on the portable kernels, which are slower: ")
    assert advice.count(reason) == 1
    assert "(pip install --force-reinstall " in advice
    assert ("nvidia-cutlass-dsl is installed but broken" in advice and REINSTALL in advice) or "tvm_ffi" in parts


def test_what_is_compiled_runs_without_the_compiler(tmp_path):
    folder = installed(tmp_path / "packages", "raise OSError('libA.so')")
    program = "from sagebwd.kernels.sm90.forward import compile as sm90; print(sm90._objects())"
    program = f"import sys; sys.path.insert(0, sys.argv[1])\n{program}"
    objects = programs.run(program, tmp_path, str(folder), SAGEBWD_CACHE_DIR=str(tmp_path)).stdout.strip()
    Path(objects).mkdir(parents=True)
    (Path(objects) / "forward-64-0.so").touch()
    name, refusal, advice = asked(folder, tmp_path)
    assert name == "hopper/hopper"
    assert refusal == "taken"
    assert advice.startswith("forward in CuTe DSL where it is compiled already: nvidia-cutlass-dsl is installed but")
    assert "OSError: libA.so" in advice


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({"apache-tvm-ffi": None}, "apache-tvm-ffi is not installed (in a clone: pip install '.[hopper]')"),
        ({"nvidia-cutlass-dsl": None}, "nvidia-cutlass-dsl is not installed (in a clone: pip install '.[hopper]')"),
        ({"nvidia-cutlass-dsl": "4.6.3"}, "nvidia-cutlass-dsl is 4.6.3, and these kernels are for "),
        ({"nvidia-cutlass-dsl-libs-base": "4.7"}, "nvidia-cutlass-dsl-libs-base is 4.7, and these kernels are for "),
        ({}, "no C compiler is found"),
    ],
)
def test_versions_are_told_without_an_import(versions, reason, monkeypatch):
    monkeypatch.setattr(sm90, "_version", (sm90.VERSIONS | versions).get)
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    for load in ("_load_runtime", "runtime", "broken_compiler"):
        monkeypatch.setattr(sm90, load, lambda: pytest.fail("imported"))
    assert sm90.unavailable.__wrapped__().startswith(reason)


def test_a_kernel_that_cannot_be_compiled_any_more_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr(sm90, "object_path", lambda variant: tmp_path / "missing.so")
    monkeypatch.setattr(sm90, "broken_compiler", lambda: "nvidia-cutlass-dsl is installed but broken")
    with pytest.raises(NotImplementedError, match="nvidia-cutlass-dsl is installed but broken; recipe='token' needs"):
        sm90.forward_kernel.__wrapped__(None)


def test_a_compiler_that_is_not_there_is_no_linker(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    assert sm90._linker() is None
    monkeypatch.setenv("CC", sys.executable)
    assert sm90._linker() == sys.executable


def test_versions_are_those_of_the_extra():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    pinned = dict(re.findall(r"([\w-]+)==([\w.]+);", " ".join(project["optional-dependencies"]["hopper"])))
    assert pinned == sm90.VERSIONS


@pytest.fixture
def compiler(monkeypatch):
    """A compiler and a linker that take no time; what was built."""
    built = []

    def build(variant, path):
        path.write_text("a kernel")
        built.append(path)

    monkeypatch.setattr(sm90, "broken_compiler", lambda: None)
    monkeypatch.setattr(sm90, "_load_runtime", lambda: None)
    monkeypatch.setattr(sm90, "Function", lambda path, entry: path)
    monkeypatch.setattr(sm90, "build", build)
    return built


@pytest.mark.parametrize("nowhere", ["/proc/1/nowhere", "file/nowhere"])
def test_where_kernels_cannot_be_kept_a_process_has_its_own(nowhere, compiler, monkeypatch, tmp_path, caplog):
    """Regression: FileNotFoundError from every call of `mixed` and `auto`."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path / nowhere))
    monkeypatch.setattr(environment, "_unwritable", set())
    assert not sm90._has_compiled()
    with caplog.at_level(logging.WARNING, "sagebwd"):
        one, other = (sm90.forward_kernel.__wrapped__(variant_of(n)) for n in (64, 128))
    assert [one, other] == compiler
    assert one.parent == other.parent == environment.folder_of_process(os.getpid())
    (said,) = caplog.messages
    for part in (f"{sm90._objects()} cannot be written (", "SAGEBWD_CACHE_DIR"):
        assert part in said


def test_a_folder_that_can_be_written_keeps_kernels(compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path))
    path = sm90.forward_kernel.__wrapped__(variant_of(64))
    assert path == sm90.object_path(variant_of(64))
    assert path.is_relative_to(tmp_path)
    assert sm90._has_compiled()
    assert sm90.forward_kernel.__wrapped__(variant_of(64)) == path
    assert compiler == [path]
    assert os.listdir(path.parent) == [path.name]


def test_a_linker_that_fails_says_why(monkeypatch, tmp_path):
    """Regression: CalledProcessError, without what the linker had said."""
    linker = tmp_path / "linker"
    linker.write_text("#!/bin/sh\necho 'cannot find -lfoo' >&2\nexit 3\n")
    linker.chmod(0o755)
    monkeypatch.setenv("CC", str(linker))
    with pytest.raises(RuntimeError, match=r"linker -shared -o .* ended with 3: cannot find -lfoo\. CC names"):
        sm90._link(tmp_path / "made.o", tmp_path / "linked.so")


@pytest.fixture
def copied(monkeypatch, tmp_path):
    """The package's sources, which a test may change."""
    root = tmp_path / "sagebwd"
    shutil.copytree(sm90.ROOT, root, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sm90, "ROOT", root)
    return root


def test_what_is_compiled_in_decides_what_is_loaded(copied):
    """Regression: constants of widths.py and mask.py changed, and kernels with the old ones were loaded."""
    before = sm90._source.__wrapped__()
    for name in ("kernels/sm90/widths.py", "masks/mask.py", "kernels/sm90/forward/softmax.py"):
        path = copied / name
        path.write_text(path.read_text() + "TILE = 256\n")
        after = sm90._source.__wrapped__()
        assert after != before
        before = after


def test_whatever_the_kernel_comes_to_import_counts():
    names = [KERNEL]
    for name in names:
        assert house.MODULES[name] in sm90.sources(), f"{name} is compiled in: its folder belongs in FOLDERS"
        names += [x for x in house.imports(name, late=False) if x in house.MODULES and x not in names]
    assert len(names) > len(list(house.MODULES[KERNEL].parent.glob("*.py"))) - 3


def variant_of(head_dim):
    return sm90.Variant(head_dim, head_dim, "bfloat16", ForwardTile(2, 128, 2))
