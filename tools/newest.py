"""An environment with the newest Transformers and Diffusers that pyproject.toml accepts, before the tested set.

    .venv/bin/python -m tools.newest .venv-newest    (make test-newest)

It holds these packages, and what they need newer, alone: all others are those of the environment that runs this. It is
made anew each time.
"""

from __future__ import annotations

import argparse
import subprocess
import sysconfig
import tomllib
import venv
from pathlib import Path

EXTRAS = ("transformers", "diffusers")
VERSIONS = 'import diffusers as d, transformers as t; print("Transformers", t.__version__, "Diffusers", d.__version__)'


def make(folder: Path) -> Path:
    """Make it in a folder; returns its Python."""
    venv.create(folder, clear=True, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    tested = sysconfig.get_path("purelib")
    # its own .pth files too, as an editable install is one; behind its own packages
    (own / "tested.pth").write_text(f"import site; site.addsitedir({tested!r})\n", encoding="utf-8")
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [requirement for name in EXTRAS for requirement in project["optional-dependencies"][name]]
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade", *wanted]
    subprocess.run(install, check=True)
    subprocess.run([python, "-c", VERSIONS], check=True)
    return python


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where it is made; what is there goes")
    make(parser.parse_args().folder)
