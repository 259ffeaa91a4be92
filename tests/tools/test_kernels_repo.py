"""The repository for the package `kernels`: what its loader needs, its sources apart from an installed sagebwd."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import kernels_repo

ROOT = Path(__file__).parents[2]
FOLDER = "sagebwd-kernels"  # as the page names it
PAGE = ROOT / "docs" / "integrations" / "kernels.md"
LOADED = f"""
import importlib, importlib.util, json, sys
from pathlib import Path
import torch

folder = Path("{FOLDER}/build/torch-cpu")
own = json.loads((folder / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(own, folder / "__init__.py")  # as the loader of `kernels` does
kernel = sys.modules[own] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
assert not [name for name in sys.modules if name.partition(".")[0] == "sagebwd"]
tokens = torch.randn(1, 40, 2, 16, requires_grad=True)
out = kernel.flash_attn_func(tokens, tokens, tokens, causal=True)
out.sum().backward()
for path in folder.rglob("*.py"):
    if "sm90" not in path.parts:  # whose compiler is an extra
        name = ".".join((own, *path.relative_to(folder).with_suffix("").parts))
        importlib.import_module(name.removesuffix(".__init__"))
assert sys.modules[f"{{own}}.auto.model"].of_card("NVIDIA H200", "of no version")
assert sys.modules[f"{{own}}.dispatch"].runtime().program is sys.modules[f"{{own}}.kernels.host.program"]
assert not [name for name in sys.modules if name.partition(".")[0] == "sagebwd"]

from sagebwd.integrations.flash_attn import flash_attn_func
assert torch.equal(flash_attn_func(tokens, tokens, tokens, causal=True), out)
assert getattr(torch.ops, own).attention.default is not torch.ops.sagebwd.attention.default
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the repository is."""
    folder = tmp_path_factory.mktemp("kernels")
    assert kernels_repo.main([str(folder / FOLDER)]) == 0
    return folder


def run(code, folder):
    outcome = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False, timeout=300,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1",
        },
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stderr


def test_metadata_and_digests(folder):
    files = set(kernels_repo.files())
    assert Path("kernels", "sm90", "backward", "kernel.py") in files
    assert Path("auto", "model.json") in files, "what auto asks on a GPU"
    assert not any("training" in path.parts for path in files)
    for backend in ("cuda", "cpu"):
        build = folder / FOLDER / "build" / f"torch-{backend}"
        metadata = json.loads((build / "metadata.json").read_text())
        assert metadata["id"].isidentifier()
        assert metadata["backend"]["type"] == backend
        assert {Path(name) for name in metadata["digest"]["files"]} == files | {Path("__init__.py")}
    assert (folder / FOLDER / "README.md").read_text().startswith("---\nlibrary_name: kernels\n")


def test_loads_beside_an_installed_sagebwd(folder):
    run(LOADED, folder)


def test_does_not_write_over_a_folder(folder, capsys):
    with pytest.raises(SystemExit):
        kernels_repo.main([str(folder)])
    assert "is there and not an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from sagebwd import dispatch, ops\n", "from ... import dispatch, ops\n"),
        ("    from sagebwd.call import Ask\n", None),
        ("def f():\n    from sagebwd.call import Ask\n", "def f():\n    from ...call import Ask\n"),
        ('"""from sagebwd.call import Ask"""\n', '"""from sagebwd.call import Ask"""\n'),
        ('f("sagebwd.reference.emulator")\n', 'f("own.reference.emulator")\n'),
        ('f(f"sagebwd.{name}", f"sagebwd.kernels.{name}")\n', 'f(f"own.{name}", f"own.kernels.{name}")\n'),
        ('f(f"sagebwd: {name}", "sagebwd")\n', 'f(f"sagebwd: {name}", "sagebwd")\n'),
        ('L("sagebwd::attention")\ntorch.ops.sagebwd.x\n', 'L("own::attention")\ntorch.ops.own.x\n'),
        ("import sagebwd.call\n", None),
        ("f('sagebwd.reference.emulator')\n", None),
        ("f(f'sagebwd.{name}')\n", None),
    ],
)
def test_names_are_renamed_or_refused(source, expected):
    if expected is None:
        with pytest.raises((ValueError, SyntaxError)):
            kernels_repo.renamed(source, Path("kernels", "host", "x.py"), "own")
    else:
        assert kernels_repo.renamed(source, Path("kernels", "host", "x.py"), "own") == expected


DIGESTS = f"""
from pathlib import Path
from kernels._rust import Digest, DigestAlgorithm, Metadata
for build in Path("{FOLDER}/build").iterdir():
    metadata = Metadata.read_from_file(build / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, build))
"""


@pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="needs kernels")
@pytest.mark.parametrize("index", [0, 1], ids=["loader", "transformers"])
def test_the_page_loads_it(folder, index):
    if index:
        checks = pytest.importorskip("transformers.utils.import_utils")
        if not checks.is_kernels_available():
            pytest.skip(f"this Transformers wants kernels {checks.KERNELS_MIN_VERSION} or later")
    code = re.findall(r"<!-- needs a build -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[
        index
    ]
    if index:
        code += (
            "import sys, torch\n"
            "model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()\n"
            "assert [name for name in sys.modules if name.startswith('_sagebwd_cpu_')]\n"
        )
    run(DIGESTS + code, folder)
