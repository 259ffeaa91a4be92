"""What a step is said to gain on a card that is not here."""

import pytest

from sagebwd.cli import main as cli
from sagebwd.cli.estimate import estimate
from tests.commands import runner

SIZES = {"hidden": 2048, "layers": 16, "heads": 16, "kv_heads": 8, "head_dim": 128, "tokens": 8192}


def test_attention_gains_more_of_a_step_the_longer_its_sequences():
    gains = [estimate("H200", **SIZES | {"tokens": tokens}).gain("fa4") for tokens in (8192, 32768, 131072)]
    assert 1 < gains[0] < gains[1] < gains[2]


def test_a_step_grows_with_layers_and_with_what_is_beside_them():
    one, two = (estimate("H200", **SIZES | {"layers": layers}) for layers in (16, 32))
    assert two.ours_ms == pytest.approx(2 * one.ours_ms)
    wide = estimate("H200", **SIZES, vocabulary=1 << 20)
    assert wide.rest_ms > one.rest_ms
    assert wide.share("fa4") < one.share("fa4")


def test_a_call_that_auto_hands_over_gains_nothing():
    found = estimate("H200", **SIZES | {"head_dim": 64, "tokens": 256})
    assert found.ours_ms == min(found.others_ms.values())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"gpu": "B200"}, "NVIDIA H200"),
        ({"gpu": "H"}, "NVIDIA H200"),
        ({"head_dim": 100}, "64"),
        ({"layers": 0}, "layers=0"),
        ({"tokens": 0}, "tokens=0"),
        ({"batch": 0}, "batch=0"),
        ({"intermediate": 0}, "intermediate=0"),
        ({"kv_heads": 3}, "kv_heads=3"),
        *(({name: 10**320}, f"{name}=10*0 must be") for name in ("hidden", "layers", "tokens", "vocabulary")),
    ],
)
def test_what_was_not_timed_is_refused(given, told):
    with pytest.raises(ValueError, match=told):
        estimate(**{"gpu": "H200"} | SIZES | given)


def test_the_command(monkeypatch, capsys):
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    code, out, err = runner(cli.main, monkeypatch, capsys)("estimate", *options, "--gpu", "H100")
    assert code == 0, err
    assert "over FlashAttention-4: 1." in out
    code, _, err = runner(cli.main, monkeypatch, capsys)("estimate", *options, "--gpu", "4090")
    assert code == 2
    assert "accepted" in err
