"""Code of users' pages runs where there is only the package, what it requires and the extra of the page."""

import subprocess
import venv
from functools import cache

import pytest

from tests.documents import ROOT

for needed in ("tools.tables.__main__", "tools.reference"):  # as tests.test_docs
    pytest.importorskip(needed)

from tests.test_docs import BLOCKS, extras_named, imported, is_missing, required  # noqa: E402
from tools import package  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of each extra, a Python that has it and the package's requirements; of None, these alone."""

    @cache
    def of(extra):
        folder = tmp_path_factory.mktemp(extra or "plain")
        venv.create(folder, symlinks=True)
        (site,) = (folder / "lib").glob("python*/site-packages")
        names = package.closure("torch", "triton", *(required(extra) if extra else ()))
        package.lend(names, site)
        (site / "sagebwd.pth").write_text(f"{ROOT / 'src'}\n")
        return folder / "bin" / "python"

    return of


def extra_of(document, code):
    """Of the extras that a page names, the smallest that brings what a block imports; None of one that needs none."""
    sizes = {
        extra: len(set(required(extra))) for extra in extras_named(document) if imported(code) <= set(required(extra))
    }
    return min(sizes, key=sizes.get) if imported(code) else None


def users_blocks():
    for place, mark, code in BLOCKS:
        document = place.partition(":")[0]
        if document.startswith(("README", "docs")):
            yield pytest.param(document, mark, code, id=place)


@pytest.mark.parametrize(("document", "mark", "code"), list(users_blocks()))
def test_a_block_runs_with_what_its_page_names(document, mark, code, environment, tmp_path):
    if mark and is_missing(mark.removeprefix("needs ")):
        pytest.skip(mark)
    python = environment(extra_of(document, code))
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
