"""Sources of FlashAttention-3, packed at the commit of CUTLASS that they name; builds by compilers that do nothing."""

import ast
import importlib.metadata
import subprocess
import sys
import tarfile

import pytest

from tools import build_flash_attention_3 as tool

COMPILER = """#!/bin/sh
echo "$0 $*" >> {log}
case "$*" in *{broken}*) echo "no such thing" >&2; exit 1;; esac
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""


def repository(path, **files):
    def git(*command):
        name = "-c", "user.name=a", "-c", "user.email=a@b"
        done = subprocess.run(["git", "-C", path, *name, *command], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    path.mkdir()
    git("init", "-q")
    for name, text in files.items():
        file = path / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    git("add", ".")
    git("commit", "-qm", "one")
    return git


@pytest.fixture
def packed(tmp_path):
    """The archive, and the commit that it is of."""
    cutlass = repository(tmp_path / "cutlass", include__cute__a="first")
    pinned = cutlass("rev-parse", "HEAD")
    (tmp_path / "cutlass/include/cute/a").write_text("later")
    cutlass("commit", "-qam", "two")
    sources = {f"hopper__{name}": "" for name in (tool.API, tool.SCHEDULER, tool.INTERFACE)}
    flash = repository(tmp_path / "flash", csrc__other="", **sources)
    flash("update-index", "--add", "--cacheinfo", f"160000,{pinned},csrc/cutlass")
    flash("commit", "-qm", "two")
    archive = tmp_path / "fa3.tar.xz"
    commit = tool.pack(tmp_path / "flash" / ".git", tmp_path / "cutlass", archive)
    assert flash("rev-parse", "HEAD").startswith(commit)
    return archive, commit


@pytest.fixture
def compilers(tmp_path, monkeypatch):
    """nvcc and c++ that write what they were told, and fail at a file of this name."""

    def made(broken="nothing"):
        for path in (tmp_path / "cuda/bin/nvcc", tmp_path / "c++"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(COMPILER.format(log=tmp_path / "log", broken=broken))
            path.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
        monkeypatch.setenv("CXX", str(tmp_path / "c++"))
        return tmp_path / "log"

    return made


def test_an_archive_has_what_a_build_reads(packed):
    archive, commit = packed
    with tarfile.open(archive) as members:
        files = {x.name: members.extractfile(x).read().decode() for x in members if x.isfile()}
    assert set(files) == {"COMMIT", "csrc/cutlass/include/cute/a"} | {
        f"hopper/{name}" for name in (tool.API, tool.SCHEDULER, tool.INTERFACE)
    }
    assert files["csrc/cutlass/include/cute/a"] == "first"
    assert files["COMMIT"].strip() == commit


def test_a_build_is_a_folder_to_import_from(packed, compilers, tmp_path):
    archive, commit = packed
    log, to = compilers(), tmp_path / "built"
    took = tool.build(archive, to, 1)
    kernels = {f"flash_bwd_hdim{width}_bf16_sm90.cu" for width in (64, 128)}
    kernels |= {f"flash_fwd_hdim{width}_bf16{heads}_sm90.cu" for width in (64, 128) for heads in ("", "_packgqa")}
    assert {name.removeprefix("instantiations/") for name, _ in took} == kernels | {tool.SCHEDULER, tool.API}
    assert (to / "flash_attn_3/_C.abi3.so").read_text() == "made\n"
    assert (to / tool.INTERFACE).exists()
    config = ast.literal_eval((to / "flash_attn_config.py").read_text().removeprefix("CONFIG = "))["build_flags"]
    on = {name.removeprefix("FLASHATTENTION_DISABLE_") for name, off in config.items() if not off}
    assert on == {"BACKWARD", "PACKGQA", "CLUSTER", "HDIM64", "HDIM128"}
    (found,) = importlib.metadata.distributions(name="flash-attn-3", path=[str(to)])
    assert found.version == f"3.0.0+{commit}"
    lines = log.read_text().splitlines()
    nvcc = [line for line in lines if "/nvcc " in line]
    assert len(nvcc) == len(kernels) + 1
    assert all("-DFLASHATTENTION_DISABLE_VARLEN" in line and "sm_90a" in line for line in nvcc)
    assert not any("-DFLASHATTENTION_DISABLE_HDIM64 " in line for line in lines)
    assert lines[-1].count(".o ") == len(kernels) + 2  # of the library
    log.unlink()
    tool.build(archive, to, 1, (256,), varlen=True)
    lines = log.read_text().splitlines()
    assert any("flash_bwd_hdim256_bf16_sm90.cu" in line for line in lines)
    assert not any("flash_bwd_hdim64" in line or "DISABLE_VARLEN" in line for line in lines)


def test_what_is_missing_or_fails_is_told(packed, compilers, tmp_path, monkeypatch, capsys):
    archive, _ = packed

    def built(source):
        monkeypatch.setattr(sys, "argv", ["tool", "build", "--source", str(source), "--to", str(tmp_path / "built")])
        with pytest.raises(SystemExit) as stopped:
            tool.main()
        return str(stopped.value)

    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert f"no nvcc in {tmp_path}/bin; set CUDA_HOME" in built(archive)
    compilers("flash_bwd_hdim64")
    failed = built(archive)
    assert "instantiations/flash_bwd_hdim64_bf16_sm90.cu: " in failed
    assert "no such thing" in failed
    assert "has no csrc/cutlass/include/cute" in built(tmp_path / "flash")
    assert not (tmp_path / "built").exists()
    with pytest.raises(ValueError, match=r"git rev-parse .* in .*cuda"):
        tool.pack(tmp_path / "cuda", tmp_path / "cutlass", tmp_path / "other.tar.xz")
