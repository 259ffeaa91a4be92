"""The error study: variants are what they say, the command prints what it writes, the page what the command prints."""

import json

import pytest
import torch

from lab.studies import ablations, study, variants
from lab.studies.ablations import Ablation
from lab.studies.study_tables import markdown, ratios
from sagebwd.diagnostics import capture
from sagebwd.masks.band import Band
from sagebwd.recipe import Recipe
from sagebwd.reference.emulator import Emulator
from sagebwd.reference.metrics import relative_l2
from sagebwd.reference.quantize import quantize
from tests.diagnostics.test_trace import random_call

pytestmark = pytest.mark.rounding


def sample(kind="sigma 3", tokens=200, is_causal=False, seed=0):
    return study.Sample.of(kind, study.draw(kind, tokens, 32, seed), Band.of(is_causal))


def tiles():
    return torch.randn(2, 3, 64, 2, 128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dims", [(-1,), (-3,), (-3, -1)])
def test_roundings(dims):
    x = tiles()
    codes, scale = quantize(x, dims)
    assert torch.equal(variants.nearest(x, dims), codes * scale)
    assert torch.equal(variants.percentile(x, dims, 1.0), codes * scale)
    assert relative_l2(variants.percentile(x, dims, 0.9), x) > 2 * relative_l2(codes * scale, x)
    assert relative_l2(variants.least_squares(x, dims), x) <= relative_l2(codes * scale, x)
    assert torch.equal(variants.percentile(x * 0, dims, 0.9), x * 0)


def test_clipping_keeps_the_limit_and_takes_the_best():
    x = torch.cat([torch.linspace(-1, 1, 10001), torch.tensor([1.02])])
    clipped = variants.clipped(x, (-1,), torch.tensor([1.0]))
    assert clipped.max() == 1
    assert (clipped - x)[:-1].abs().max() <= 0.5 / 127 + 1e-6
    many = torch.cat([torch.full((10000,), 0.35), torch.tensor([1.0])])
    assert relative_l2(variants.least_squares(many, (-1,)), many) < relative_l2(variants.nearest(many, (-1,)), many)


def test_stochastic_rounding_is_exact_in_the_mean_and_repeatable():
    x = tiles()[:1, :1]
    once = variants.stochastic(x, (-1,), torch.Generator().manual_seed(1))
    assert torch.equal(once, variants.stochastic(x, (-1,), torch.Generator().manual_seed(1)))
    generator = torch.Generator().manual_seed(2)
    mean = torch.stack([variants.stochastic(x, (-1,), generator) for _ in range(400)]).mean(0)
    assert relative_l2(mean, x) < 0.07 * relative_l2(once, x)
    assert relative_l2(once, x) == pytest.approx(2**0.5 * relative_l2(variants.nearest(x, (-1,)), x), rel=0.05)


def test_two_terms_hold_fourteen_bits():
    x = tiles().flatten(-2)
    first, second = variants.two_terms(x)
    assert relative_l2(first, x) > 50 * relative_l2(first + second, x)


@pytest.mark.parametrize("is_causal", [False, True])
def test_without_a_change_a_variant_is_the_recipe(is_causal):
    one = sample(is_causal=is_causal)
    q, k, v, do = one.tensors
    emulator = Emulator(q, k, v, Recipe.named("token"), one.scale, one.band)
    o, lse, _ = emulator.forward()
    expected = dict(zip(study.TENSORS, (o, *emulator.backward(do, o, lse))))
    actual = one.run(Ablation("token"))
    assert all(torch.equal(actual[name], expected[name]) for name in study.TENSORS)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rotate", [False, True])
def test_two_terms_of_s_are_as_good_as_16_bit(is_causal, rotate):
    one, recipe = sample(is_causal=is_causal), f"token(rotate={rotate})"
    base = one.errors(Ablation(recipe))
    sixteen_bit = one.errors(Ablation(f"token(rotate={rotate}, s=16bit)"))
    both = one.errors(Ablation(recipe, variant={"s_terms": "qk"}))
    assert both == pytest.approx(sixteen_bit, rel=0.02)
    for half in ("q", "k"):
        assert both["dq"] < one.errors(Ablation(recipe, variant={"s_terms": half}))["dq"] < base["dq"]


@pytest.mark.parametrize("is_causal", [False, True])
def test_each_variant_changes_what_it_should(is_causal):
    one = sample(is_causal=is_causal)
    rebuilt = one.run(Ablation("token(o=16bit)", variant={"delta": "rebuilt"}))
    from_output = one.run(Ablation("token(o=16bit)"))
    assert relative_l2(rebuilt["dq"], from_output["dq"]) < 1e-4  # rows of P sum to one: both deltas are one number
    for scale in ("token", "sequence"):
        exact = one.run(Ablation("token", variant={"do_scale": scale, "psi": variants.exact}))
        best = one.run(Ablation("token(dv=16bit)"))
        assert 0.003 < relative_l2(exact["dv"], best["dv"]) < 0.02  # dO's codes alone
        scaled, plain = one.run(Ablation("token", variant={"do_scale": scale})), one.run(Ablation("token"))
        assert all(torch.equal(scaled[name], plain[name]) for name in ("o", "dq", "dk"))


def test_a_large_token_of_do_is_kept_apart_by_a_scale_a_token():
    one = sample("large token")
    errors = [one.errors(Ablation("token", variant=v))["dv"] for v in ({}, {"do_scale": "token"})]
    assert errors[1] < 0.7 * errors[0]


def test_a_token_without_gradient_does_not_coarsen_the_others():
    q, k, v, do = study.draw("sigma 1", 128, 32, 0)
    do = do * 1e-4
    do[:, :, -1] = 0
    one = study.Sample.of("last token unused", (q, k, v, do), Band())
    errors = [one.errors(Ablation("token", variant=v))["dv"] for v in ({}, {"do_scale": "token"})]
    assert errors[1] < 1.1 * errors[0]


def test_captured_heads_are_samples(tmp_path):
    path = tmp_path / "captured.safetensors"
    capture.save([random_call(tokens=70, is_causal=True, window=(20, 0))], path)
    samples = study.captured("trained", path)
    assert len(samples) == 4
    assert samples[0].tensors[0].shape == (2, 1, 70, 32)
    assert samples[0].band == Band(-20, 0)
    assert 0 < samples[3].errors(Ablation("token"))["dq"] < 0.2


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(study, "ABLATIONS", (*ablations.SWITCHES[:2], ablations.VARIANTS[0]))
    capture.save([random_call(tokens=70, heads=1, kv_heads=1, is_causal=True)], tmp_path / "c.safetensors")
    common = ["--kind", "bias", "--head-dim", "32", "--seeds", "2"]
    for part, more in (
        ("ablations", ["--tokens", "64", "--load", f"trained={tmp_path / 'c.safetensors'}"]),
        ("lengths", ["--tokens", "64", "--tokens", "96", "--plot", str(tmp_path / "plot.png")]),
        ("roundings", ["--tokens", "64"]),
    ):
        path = tmp_path / f"{part}.json"
        study.main([part, str(path), *common, *more])
        printed = capsys.readouterr().out
        content = json.loads(path.read_text(encoding="utf-8"))
        assert content["part"] == part
        assert printed.strip() == markdown(content)
        study.main(["show", str(path)])
        assert capsys.readouterr().out == printed
    assert (tmp_path / "plot.png").stat().st_size > 5000
    rows = json.loads((tmp_path / "ablations.json").read_text(encoding="utf-8"))["rows"]
    assert {row["kind"]: len(row["errors"]["o"]) for row in rows} == {"bias": 2, "trained": 1}
    assert ratios(rows, "o")["token"]["bias"] == [1, 1]
    assert min(ratios(rows, "o")["token(smooth_v=False)"]["bias"]) > 1.5


def test_nearest_rounding_has_its_bias_measured():
    rows = study.measure_roundings(["bias"], 64, 32, 20)
    nearest, stochastic = rows
    assert nearest["error"] == nearest["error_of_mean"]
    for name in ("dq", "dk", "dv"):
        assert stochastic["error_of_mean"][name] < 0.4 * stochastic["error"][name]
        assert stochastic["error"][name] > nearest["error"][name]
        assert len(stochastic["gain"][name]) == 20
