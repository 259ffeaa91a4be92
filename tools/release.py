"""A release into dist/: `python -m tools.release [--tag v0.1.0]` (`make release`) builds, checks and writes the notes.

The wheel and the sdist are those that `python -m tools.package` looks into and runs, and `twine check` reads their
metadata as an index does. dist/NOTES.md is the version's part of the changelog. With a tag, as in
.github/workflows/release.yml, the tag has to be the version's and the changelog to have its date.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path

from sagebwd.version import __version__
from tools import package

DIST = package.ROOT / "dist"
NOTES = "NOTES.md"


def notes(changelog: str, version: str) -> tuple[str, str]:
    """The date of a version ("unreleased" before it has one) and its part of the changelog.

    Raises ValueError where the changelog lacks the version.
    """
    found = re.search(
        rf"^## \[{re.escape(version)}\] - (\S+)\n(.*?)(?=^## \[|\Z)", changelog, re.DOTALL | re.MULTILINE
    )
    if found is None:
        raise ValueError(f"CHANGELOG.md has no heading '## [{version}] - DATE'")
    return found[1], found[2].strip() + "\n"


def check_tag(tag: str, version: str, date: str) -> None:
    """Raises ValueError unless a tag is the version's and the changelog has its date."""
    if tag != f"v{version}":
        raise ValueError(f"tag {tag} is not v{version}, the version of src/sagebwd/version.py")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", date):
        raise ValueError(f"CHANGELOG.md calls {version} {date!r}; give it its date, as 2026-11-30")


def main() -> None:
    """Build, check, and write dist/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", help="the tag that is being released, as v0.1.0")
    tag = parser.parse_args().tag
    try:
        date, text = notes((package.ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), __version__)
        if tag:
            check_tag(tag, __version__, date)
    except ValueError as error:
        sys.exit(f"release: {error}")
    shutil.rmtree(DIST, ignore_errors=True)
    wheel, sdist = package.build(DIST)
    package.check_contents(wheel, sdist)
    with tempfile.TemporaryDirectory() as folder:
        package.check_installed(wheel, Path(folder) / "clean")
    package.run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    (DIST / NOTES).write_text(text, encoding="utf-8")
    print(f"release: {wheel.name}, {sdist.name} and {NOTES} of {__version__} ({date}) in {DIST}")


if __name__ == "__main__":
    main()
