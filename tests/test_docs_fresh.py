"""Code of users' pages runs where there is only the package, what it requires and the extra of the page."""

import subprocess
import venv
from functools import cache

import pytest

from tests.documents import ROOT

for needed in ("tools.tables.__main__", "tools.reference"):  # as tests.test_docs
    pytest.importorskip(needed)

from tests.test_docs import BLOCKS, EXTRAS, extras_named, is_missing, required  # noqa: E402
from tools import package  # noqa: E402

pytestmark = pytest.mark.slow
NEEDED_BY_EXTRAS = {"accelerate": "diagnostics"}
"""What a block's mark names, and the extra that brings it."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of each set of extras, a Python that has them and the package's requirements."""

    @cache
    def of(extras):
        folder = tmp_path_factory.mktemp("-".join(extras) or "plain")
        venv.create(folder, symlinks=True)
        (site,) = (folder / "lib").glob("python*/site-packages")
        names = package.closure("torch", "triton", *(name for extra in extras for name in required(extra)))
        package.lend(names, site)
        (site / "sagebwd.pth").write_text(f"{ROOT / 'src'}\n")
        return folder / "bin" / "python"

    return of


def extras_of(document, mark):
    found = extras_named(document) & {"transformers", "diffusers", "trainers"}
    if (need := mark.removeprefix("needs ")) in NEEDED_BY_EXTRAS:
        found.add(NEEDED_BY_EXTRAS[need])
    return tuple(sorted(found))


def users_blocks():
    for place, mark, code in BLOCKS:
        document = place.partition(":")[0]
        if document.startswith(("README", "docs")):
            yield pytest.param(document, mark, code, id=place)


@pytest.mark.parametrize(("document", "mark", "code"), list(users_blocks()))
def test_a_block_runs_with_what_its_page_names(document, mark, code, environment, tmp_path):
    need = mark.removeprefix("needs ")
    if mark and need not in EXTRAS and need not in NEEDED_BY_EXTRAS and is_missing(need):
        pytest.skip(mark)
    python = environment(extras_of(document, mark))
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
