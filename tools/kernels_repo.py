"""A repository for the `kernels` package of Hugging Face, built from this one: `python -m tools.kernels_repo OUT`.

OUT/build/torch-cuda and OUT/build/torch-cpu hold attention, its kernels and flash-attn's signatures as sources, which
is what `kernels` calls a build without an architecture, with the metadata.json that its loader reads. OUT/README.md is
the card. A build is named by the commit, so that several load into one process, beside an installed sagebwd too: its
modules import each other relatively, and its operators have a namespace of their own.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

from sagebwd.hardware import command_output
from sagebwd.version import __version__

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "sagebwd"
NAME = "sagebwd"
VERSION = 1
"""Of the repository's interface, which `kernels` asks for by number."""

# What a backend's build says that it runs on; the kernels are compiled where they run, for 8.0 and later
BACKENDS = {"cuda": {"type": "cuda", "archs": ["8.0+PTX"]}, "cpu": {"type": "cpu"}}
SUFFIXES = (".py", ".json")
LEFT_OUT = ("__main__.py", "cli", "diagnostics", "integrations")
INTEGRATIONS = ("__init__.py", "flash_attn.py", "flash_attn_modules.py", "flash_attn_padding.py")

INIT = '''"""sagebwd {version}: trainable low-bit attention, by its own functions and by flash-attn's signatures."""

from .attention import sage_attention, sage_attention_varlen
from .integrations.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .mask_argument import read_block_mask, read_mask
from .recipe import RECIPES, Recipe
from .switches import switches
from .version import __version__

__all__ = [
    "RECIPES",
    "Recipe",
    "__version__",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "read_block_mask",
    "read_mask",
    "sage_attention",
    "sage_attention_varlen",
    "switches",
]
'''

CARD = """---
library_name: kernels
license: apache-2.0
tags:
- kernels
---

# sagebwd

Trainable low-bit attention: forward and backward on INT8 and 8-bit floating-point tensor cores, of version {version},
commit {commit}. In Triton, for NVIDIA GPUs of compute capability 8.0 and later and, as a slow reference, for CPUs.
`sage_attention` has the signature of `scaled_dot_product_attention`; `flash_attn_func` and the other five have
flash-attn 2.8's.

```python
from kernels import get_local_kernel

sagebwd = get_local_kernel("path/to/this/folder")
out = sagebwd.flash_attn_func(q, k, v, causal=True)  # (batch, tokens, heads, head_dim)
```
"""


def files() -> list[Path]:
    """The files of a build, modules and what they read, relative to the package; its __init__.py is another."""
    found = (path.relative_to(PACKAGE) for suffix in SUFFIXES for path in sorted(PACKAGE.rglob(f"*{suffix}")))
    kept = [path for path in found if path.parts[0] not in LEFT_OUT and path != Path("__init__.py")]
    return kept + [Path("integrations", name) for name in INTEGRATIONS]


def renamed(source: str, module: Path, own: str) -> str:
    """The source of a module as one of the package ``own``: relative imports, its own operators and module names.

    Raises ValueError where the name sagebwd is left in an import, an operator or the name of a module.
    """
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and _names_the_package(node):
            relative = "." * len(module.parts) + node.module.removeprefix(NAME).removeprefix(".")
            line = lines[node.lineno - 1]
            lines[node.lineno - 1] = line.replace(f"from {node.module} import", f"from {relative} import")
    source = re.sub(rf'"{NAME}((?:\.\w+)+|::\w+)"', rf'"{own}\1"', "".join(lines))
    source = re.sub(rf'f"{NAME}((?:\.\w+)*\.{{)', rf'f"{own}\1', source)
    source = source.replace(f'Library("{NAME}"', f'Library("{own}"').replace(f"torch.ops.{NAME}", f"torch.ops.{own}")
    left = [node for node in ast.walk(ast.parse(source)) if _names_the_package(node)]
    if left:
        raise ValueError(f"{module}, line {left[0].lineno}: names {NAME} in a way that is not renamed")
    return source


def _names_the_package(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == NAME for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return not node.level and node.module.partition(".")[0] == NAME
    if isinstance(node, ast.Attribute):
        return node.attr == NAME
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.fullmatch(rf"{NAME}((\.|::)\w+)*\.?", node.value) is not None and node.value != NAME
    return False


def digest(folder: Path) -> dict[str, object]:
    """The hash of each file of a build."""
    files = {
        path.relative_to(folder).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return {"algorithm": "sha256", "files": files}


def build(folder: Path, backend: str, commit: str) -> None:
    """Write the build of a backend into an empty folder."""
    own = f"_{NAME}_{backend}_{commit}"
    for name in files():
        path, text = folder / name, (PACKAGE / name).read_text(encoding="utf-8")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(renamed(text, name, own) if name.suffix == ".py" else text, encoding="utf-8")
    (folder / "__init__.py").write_text(INIT.format(version=__version__), encoding="utf-8")
    metadata = {
        "name": NAME, "id": own, "version": VERSION, "license": "apache-2.0", "python-depends": [],
        "backend": BACKENDS[backend], "digest": digest(folder),
    }  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Write the repository."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder that is not there yet, or empty")
    out = parser.parse_args(arguments).out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        parser.error(f"{out} is there and not an empty folder; name another, or remove it")
    commit = command_output("git", "rev-parse", "--short", "HEAD") or "unknown"
    if command_output("git", "status", "--porcelain"):
        commit += "_dirty"
    for backend in BACKENDS:
        build(out / "build" / f"torch-{backend}", backend, commit)
    (out / "README.md").write_text(CARD.format(version=__version__, commit=commit), encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", out / "LICENSE")
    print(f"{out}: {', '.join(f'build/torch-{backend}' for backend in BACKENDS)}, version {VERSION}, of {commit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
