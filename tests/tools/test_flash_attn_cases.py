"""The tool of flash-attn's cases reads a grid from a file of tests, runs what applies and says what is refused."""

import pytest

from tools import flash_attn_cases

pytestmark = pytest.mark.rounding

TESTS = """
import nothing_that_is_installed

@pytest.mark.parametrize("dtype", ([torch.float16] if is_sm75 else [torch.float16, torch.bfloat16]))
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [32])
# @pytest.mark.parametrize("d", [64])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(33, 47), (60, 30), (4096, 4096)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.17])
@pytest.mark.parametrize("mha_type", ["mha", "mqa", "gqa"])
@pytest.mark.parametrize("kvpacked", [True, False])
def test_flash_attn_varlen_output(seqlen_q, seqlen_k, d):
    raise AssertionError

@pytest.mark.parametrize("dtype", [torch.float16])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("d", [16])
@pytest.mark.parametrize("seqlen", [5, 17])
def test_flash_attn_qkvpacked_bwd_transpose(seqlen, d):
    raise AssertionError

@pytest.mark.parametrize("num_splits", [1, 64 * 2])
def test_flash_attn_kvcache(num_splits):
    raise AssertionError

@pytest.mark.skipif(USE_TRITON_ROCM, reason="theirs")
def test_nothing():
    raise AssertionError
"""


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / flash_attn_cases.FILE).write_text(TESTS)
    return tmp_path


def run(checkout, *arguments):
    return flash_attn_cases.main([str(checkout), "--device", "cpu", "--longest", "64", "--cases", "3", *arguments])


def test_runs_what_applies_and_lists_the_refused(checkout, capsys):
    assert run(checkout) == 0
    said = capsys.readouterr().out
    assert "test_flash_attn_varlen_output: 3 of 288 ran; largest error 0.01" in said
    assert "test_flash_attn_qkvpacked_bwd_transpose: 2 of 2 ran" in said
    assert "refused: dropout_p, in 288 cases" in said
    assert "refused: alibi_slopes, in 2 cases" in said
    assert said.endswith("5 cases ran under token on cpu, 0 wrong\n")


def test_says_what_is_wrong(checkout, capsys, monkeypatch):
    """A mask on the other corner, and a refusal that does not come."""
    monkeypatch.setattr(flash_attn_cases, "band", lambda queries, keys, *rest: keys <= queries[:, None] - queries[0])
    monkeypatch.setattr(flash_attn_cases.flash_attn, "_options", lambda *_: {"return_lse": True, "window": None})
    assert run(checkout) == 1
    said = capsys.readouterr().out
    assert "WRONG o: relative L2" in said
    assert "WRONG dropout_p was not refused: {" in said
