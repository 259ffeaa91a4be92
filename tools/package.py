"""What a person installs: builds the wheel and the sdist, looks into them, and runs the wheel in a clean environment.

`make package` runs it, in CI too; without a network. The environment sees Python, torch, triton and what those two
require, and nothing else, so pip has to find every requirement of the wheel among them; then those of the `cli` extra.
"""

import argparse
import ast
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

from sagebwd.version import __version__

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "sagebwd"
COMMAND = "sagebwd_command.py"
"""The one module beside the package."""
OUTSIDE = ("lab", "benchmarks")
"""Packages of a clone: training runs, studies and measurements of speed, which nobody installs."""
NOT_NEEDED = ("transformers", "diffusers", "typer", "rich", "yaml", "matplotlib", "datasets", "accelerate", "numpy")

PROGRAM = f"""
import sys
import torch
from sagebwd import __file__ as place, sage_attention
inputs = [torch.randn(1, 2, 50, 32, requires_grad=True) for _ in range(3)]
sage_attention(*inputs, is_causal=True).sum().backward()
assert all(x.grad.abs().sum() > 0 for x in inputs)
assert place.startswith(sys.prefix), place
loaded = [name for name in {NOT_NEEDED} if name in sys.modules]
assert not loaded, loaded
import importlib.util
found = [name for name in {OUTSIDE} if importlib.util.find_spec(name)]
assert not found, found
"""


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel and the sdist; the wheel is made from what the sdist holds."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def check_contents(wheel: Path, sdist: Path) -> None:
    """Wheel and sdist hold the package, its metadata, and nothing else."""
    sources = {f"sagebwd/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*") if path.is_file()}
    sources = {name for name in sources if "__pycache__" not in name} | {COMMAND}
    kinds = ".py", "py.typed", ".txt", ".json", ".cu", ".cuh"
    odd = [name for name in sources if not name.endswith(kinds) or "/test" in name]
    expect(not odd, f"not a part of a package: {odd}")
    expect("sagebwd/py.typed" in sources, "no py.typed")
    information = f"sagebwd-{__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = Parser().parsestr(archive.read(f"{information}/METADATA").decode())
        strangers = of_the_clone({name: archive.read(name) for name in names if name.endswith(".py")})
    expect(not strangers, f"wheel: of the laboratory and the benchmarks are {strangers}")
    beside = {name for name in names if not name.startswith(f"{information}/")}
    expect(beside == sources, f"wheel and src differ: {sorted(beside ^ sources)}")
    expect(f"{information}/licenses/LICENSE" in names, "wheel: no LICENSE")
    expect(wheel.name.endswith("-py3-none-any.whl"), wheel.name)
    expect(metadata["Version"] == __version__, f"wheel: version {metadata['Version']}")
    for minor in (11, 12, 13):
        expect(f"Programming Language :: Python :: 3.{minor}" in metadata.get_all("Classifier"), f"no 3.{minor}")
    required = {Requirement(line).name for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    expect(required == {"torch", "triton"}, f"required: {required}")
    with tarfile.open(sdist) as archive:
        held = {name.split("/", 1)[1] for name in archive.getnames()}
    others = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO", ".gitignore"}
    expected = others | {f"src/{name}" for name in sources}
    expect(held == expected, f"sdist: {sorted(held ^ expected)}")


def of_the_clone(modules: dict[str, bytes]) -> list[str]:
    """Those of a wheel's modules, file names and their sources, that are of `OUTSIDE` or import it.

    A module is of `OUTSIDE` where a folder on its path has that name, or one of those modules has the same source.
    """
    sources = {path.read_bytes() for name in OUTSIDE for path in (ROOT / name).rglob("*.py")}
    return sorted(
        name
        for name, source in modules.items()
        if set(Path(name).parts[:-1]) & set(OUTSIDE) or source in sources or set(OUTSIDE) & imported(source)
    )


def imported(source: bytes) -> set[str]:
    """The first names of all that a module imports, in its functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def closure(*names: str) -> set[str]:
    """Distributions that are installed here and that these require, with the extras asked for, themselves included."""
    found: set[tuple[str, str]] = set()
    waiting = [(name, "") for name in names]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(requirement.name, wanted) for wanted in ("", *requirement.extras)]
    return {name for name, _ in found}


def lend(names: set[str], site: Path) -> None:
    """Link installed distributions into another environment, each file's topmost folder as a whole."""
    for name in names:
        files = importlib.metadata.files(name) or []
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            target = Path(str(importlib.metadata.distribution(name).locate_file(top)))
            if not (site / top).exists():
                (site / top).symlink_to(target)


def check_installed(wheel: Path, folder: Path) -> None:
    """The wheel installs in a clean environment, runs there, and says which extra a command needs."""
    venv.create(folder, with_pip=True, symlinks=True)
    python, command = folder / "bin" / "python", folder / "bin" / "sagebwd"
    (site,) = (folder / "lib").glob("python*/site-packages")
    lend(closure("torch", "triton"), site)
    install = (python, "-m", "pip", "install", "--quiet", "--no-index", "--disable-pip-version-check")
    run(*install, wheel)
    run(python, "-W", "ignore", "-c", PROGRAM)
    expect("pip install '.[cli]'" in run(command, "--help", code=1), "no hint at the extra that is missing")
    lend(closure("typer", "rich"), site)
    run(*install, f"{wheel}[cli]")
    shown = run(command, "--help")
    expect(all(name in shown for name in ("doctor", "trace")), shown)
    expect(run(command, "--version").strip() == __version__, "--version")
    told = run(command, "doctor", "--device", "cpu", code=1)
    expect("self-test PASS" in told and __version__ in told, told)


def run(*command: object, code: int = 0) -> str:
    """What a command prints in an empty folder; stops everything where its exit code is another."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRITON"))}
    with tempfile.TemporaryDirectory() as empty:  # python -m finds modules where it runs first
        outcome = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, check=False, cwd=empty,
            env=environment | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    expect(outcome.returncode == code, f"{command}: exit code {outcome.returncode}\n{outcome.stdout}{outcome.stderr}")
    return outcome.stdout + outcome.stderr


def expect(holds: bool, otherwise: str) -> None:
    """Stop with a message unless a condition holds."""
    if not holds:
        sys.exit(f"package: {otherwise}")


def main() -> None:
    """Build, look, install and run."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        wheel, sdist = build(Path(folder) / "dist")
        check_contents(wheel, sdist)
        check_installed(wheel, Path(folder) / "clean")
        print(f"package: {wheel.name} and {sdist.name} hold what they should and run in a clean environment, "
              f"{time.perf_counter() - start:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()
