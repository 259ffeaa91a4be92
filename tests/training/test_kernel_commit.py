"""Whose gradients a run had: which commits do not count for which recipes."""

import subprocess
from pathlib import Path

import pytest

from sagebwd.training import kernel_commit

ROOT = Path(__file__).parents[2]


def test_faulty_kernels_do_not_count_for_what_ran_on_them():
    for commit in kernel_commit.FAULTY:
        for named in (commit, f"{commit}-dirty"):
            for recipe in ("mixed", "mixed(rotate=False)", "token(dv=fp8)"):
                assert f"the kernels of {named} made its dV" in kernel_commit.objection(recipe, named)
            assert kernel_commit.objection("token", named) is None
            assert kernel_commit.objection("sdpa", named) is None
    assert kernel_commit.objection("mixed", kernel_commit.MENDED) is None
    assert "names no commit" in kernel_commit.objection("mixed", None)
    assert kernel_commit.objection("paper", None) is None
    with pytest.raises(ValueError, match="nonsense"):
        kernel_commit.objection("nonsense", "2534d87")


def test_faulty_commits_are_older_than_the_mend():
    def git(*words):
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)

    if git("cat-file", "-e", kernel_commit.MENDED).returncode:
        pytest.skip("the checkout has no history")
    for commit in kernel_commit.FAULTY:
        assert git("merge-base", "--is-ancestor", commit, kernel_commit.MENDED).returncode == 0
    assert git("merge-base", "--is-ancestor", "3726eff", kernel_commit.MENDED).returncode == 1


def test_the_commit_is_what_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("SAGEBWD_COMMIT", "abc1234")
    assert kernel_commit.commit() == "abc1234"
    monkeypatch.delenv("SAGEBWD_COMMIT")
    monkeypatch.chdir(tmp_path)  # the package's checkout counts, and not where one stands
    found = subprocess.run(
        ["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    assert kernel_commit.commit() == (found or None)
