"""flash-attn's signatures: its layouts and alignment, with gradients, and nothing dropped without a word."""

import importlib.metadata
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sagebwd import sage_attention
from sagebwd.integrations import flash_attn
from sagebwd.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    install,
)
from sagebwd.integrations.flash_attn_padding import index_first_axis, pad_input, unpad_input
from sagebwd.reference.metrics import relative_l2
from sagebwd.switches import current, switches
from tests.attention_case import softmax_attention

pytestmark = pytest.mark.rounding

EXACT = {"recipe": "full", "impl": "reference"}
LOW = {"recipe": "token", "impl": "reference"}
# flash-attn 2.8's parameters that all of its functions share, with their defaults
SHARED = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
}  # fmt: skip
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
FIRST = {
    flash_attn_func: ("q", "k", "v"),
    flash_attn_kvpacked_func: ("q", "kv"),
    flash_attn_qkvpacked_func: ("qkv",),
    flash_attn_varlen_func: ("q", "k", "v", *OFFSETS),
    flash_attn_varlen_kvpacked_func: ("q", "kv", *OFFSETS),
    flash_attn_varlen_qkvpacked_func: ("qkv", "cu_seqlens", "max_seqlen"),
}
BANDS = [(False, (-1, -1)), (True, (-1, -1)), (False, (3, 1)), (False, (-1, 2)), (True, (2, -1)), (True, (0, 5))]


def drawn(batch=2, tokens=7, kv_tokens=7, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64):
    """q, k, v and do, (batch, tokens, heads, head_dim)."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, heads), (kv_tokens, kv_heads), (kv_tokens, kv_heads), (tokens, heads)]
    return [torch.randn(batch, *shape, head_dim, generator=generator, dtype=dtype) for shape in shapes]


def exact(q, k, v, causal, window, scale):
    """o and lse with a mask that is spelt out: the last query meets the last key."""
    place = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    keys, (left, right) = torch.arange(k.shape[1]), window
    visible = (keys <= place) | (not causal)
    visible = visible & (keys >= place - left) if left >= 0 else visible
    visible = visible & (keys <= place + right) if right >= 0 else visible
    o, lse = softmax_attention(*(x.transpose(1, 2) for x in (q, k, v)), visible, scale=scale)
    return o.transpose(1, 2), lse


def outcome(function, tensors, do):
    """o, what else the function returns, and the gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    found = function(*leaves)
    o, rest = (found[0], found[1:]) if isinstance(found, tuple) else (found, ())
    return [o.detach(), *(x.detach() for x in rest)], torch.autograd.grad(o, leaves, do)


def offsets(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize(("causal", "window"), BANDS)
@pytest.mark.parametrize(("tokens", "kv_tokens"), [(7, 7), (4, 9), (9, 4), (1, 6)])
def test_bands_are_aligned_bottom_right(tokens, kv_tokens, causal, window):
    q, k, v, do = drawn(tokens=tokens, kv_tokens=kv_tokens)
    options = {"causal": causal, "window_size": window, "softmax_scale": 0.4, "return_attn_probs": True, **EXACT}
    (expected, expected_lse), wanted = outcome(lambda *x: exact(*x, causal, window, 0.4), (q, k, v), do)
    (o, lse, weights), gradients = outcome(lambda *x: flash_attn_func(*x, **options), (q, k, v), do)
    assert weights.numel() == 0
    for actual, right in zip((o, lse, *gradients), (expected, expected_lse, *wanted)):
        torch.testing.assert_close(actual, right, rtol=1e-9, atol=1e-12)

    (o, lse, _), gradients = outcome(
        lambda q, kv: flash_attn_kvpacked_func(q, kv, **options), (q, torch.stack((k, v), 2)), do
    )
    for actual, right in zip((o, lse, *gradients), (expected, expected_lse, wanted[0], torch.stack(wanted[1:], 2))):
        torch.testing.assert_close(actual, right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("causal", "window"), BANDS)
def test_packed_sequences(causal, window):
    """Of a pack each sequence is what `flash_attn_func` makes of it alone."""
    lengths, kv_lengths = (5, 1, 7), (5, 6, 3)
    q, k, v, do = (x[0] for x in drawn(1, sum(lengths), sum(kv_lengths)))
    options = {"causal": causal, "window_size": window, "return_attn_probs": True, **EXACT}
    places = offsets(*lengths), offsets(*kv_lengths), torch.tensor(7), 6
    (o, lse, _), gradients = outcome(lambda *x: flash_attn_varlen_func(*x, *places, **options), (q, k, v), do)
    packed_kv = outcome(
        lambda q, kv: flash_attn_varlen_kvpacked_func(q, kv, *places, **options), (q, torch.stack((k, v), 1)), do
    )
    torch.testing.assert_close(packed_kv[0][0], o)
    torch.testing.assert_close(packed_kv[1][1].unbind(1)[1], gradients[2])
    parts = zip(q.split(lengths), k.split(kv_lengths), v.split(kv_lengths), do.split(lengths))
    alone = [
        outcome(lambda *x: flash_attn_func(*x, **options), [x[None] for x in (q, k, v)], do[None])
        for q, k, v, do in parts
    ]
    torch.testing.assert_close(o, torch.cat([x[0][0][0] for x in alone]))
    torch.testing.assert_close(lse, torch.cat([x[0][1][0] for x in alone], 1))
    for index, gradient in enumerate(gradients):
        torch.testing.assert_close(gradient, torch.cat([x[1][index][0] for x in alone]))


def test_a_band_of_an_empty_batch():
    """Regression: a refusal of cu_seqlens_q, which nobody gave."""
    q, k = torch.zeros(0, 5, 2, 8), torch.zeros(0, 7, 2, 8)
    assert flash_attn_func(q, k, k, causal=True).shape == q.shape


def test_queries_keys_and_values_in_one_tensor():
    q, k, v, do = drawn(kv_heads=4)
    (o,), gradients = outcome(lambda *x: flash_attn_func(*x, causal=True, **EXACT), (q, k, v), do)
    packed = torch.stack((q, k, v), 2)
    (whole,), (gradient,) = outcome(lambda x: flash_attn_qkvpacked_func(x, causal=True, **EXACT), [packed], do)
    torch.testing.assert_close(whole, o)
    torch.testing.assert_close(gradient, torch.stack(gradients, 2))
    places = offsets(7, 7), 7
    (flat,), (gradient,) = outcome(
        lambda x: flash_attn_varlen_qkvpacked_func(x, *places, causal=True, **EXACT), [packed.flatten(0, 1)],
        do.flatten(0, 1),
    )  # fmt: skip
    torch.testing.assert_close(flat, o.flatten(0, 1))
    torch.testing.assert_close(gradient, torch.stack(gradients, 2).flatten(0, 1))


@pytest.mark.parametrize("kv_tokens", [40, 64])
def test_low_precision_is_sage_attentions(kv_tokens):
    q, k, v, do = drawn(tokens=40, kv_tokens=kv_tokens, head_dim=32, dtype=torch.float32)
    wide = [x.double() for x in (q, k, v)]
    (expected, _), wanted = outcome(lambda *x: exact(*x, True, (-1, -1), 32**-0.5), wide, do.double())
    (o,), gradients = outcome(lambda *x: flash_attn_func(*x, causal=True, **LOW), (q, k, v), do)
    assert 1e-4 < relative_l2(o, expected) < 0.02  # measured .011
    for actual, right in zip(gradients, wanted):
        assert 1e-4 < relative_l2(actual, right) < 0.04  # measured .020
    if kv_tokens == 40:
        by_head = (x.transpose(1, 2) for x in (q, k, v))
        assert torch.equal(o.transpose(1, 2), sage_attention(*by_head, is_causal=True, enable_gqa=True, **LOW))


@pytest.mark.parametrize("function", FIRST)
def test_signature_is_flash_attns(function):
    parameters = inspect.signature(function).parameters
    names = [*FIRST[function], *SHARED] + ["block_table"] * (function is flash_attn_varlen_func)
    assert [name for name, x in parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD] == names
    assert [name for name, x in parameters.items() if x.kind is x.KEYWORD_ONLY] == ["recipe", "impl"]
    assert {name: parameters[name].default for name in SHARED} == SHARED


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p=0.1 is not supported"),
        ({"softcap": 30.0}, "softcap=30.0 is not supported"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes is not supported"),
    ],
)
@pytest.mark.parametrize("function", FIRST)
def test_refuses_by_name(function, changed, message):
    q, k, v, _ = drawn(kv_heads=4)
    dense = {"q": q, "k": k, "v": v, "kv": torch.stack((k, v), 2), "qkv": torch.stack((q, k, v), 2)}
    if "varlen" in function.__name__:
        dense = {name: x.flatten(0, 1) for name, x in dense.items()}
    places = {name: 7 if "max" in name else offsets(7, 7) for name in (*OFFSETS, "cu_seqlens", "max_seqlen")}
    with pytest.raises(NotImplementedError, match=message):
        function(*((dense | places)[name] for name in FIRST[function]), **changed)


def test_other_refusals():
    q, k, v, _ = drawn()
    with pytest.raises(NotImplementedError, match="block_table"):
        flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), *[offsets(7, 7)] * 2, 7, 7, block_table=q)
    with pytest.raises(NotImplementedError, match="flash_attn_func"):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=3, causal=True)
    with pytest.raises(ValueError, match="window_size=3"):
        flash_attn_func(q, k, v, window_size=3)
    with pytest.raises(ValueError, match=r"window_size=\(1.5, 0\)"):
        flash_attn_func(q, k, v, window_size=(1.5, 0))
    for given in ({"softmax_scale": "x"}, {"causal": 3}):
        with pytest.raises(TypeError, match=f"^{next(iter(given))}="):
            flash_attn_func(*(torch.randn(1, 8, 2, 16) for _ in range(3)), **given)
    with pytest.raises(ValueError, match=r"^k: head_dim 8 differs from q's 16"):
        flash_attn_func(torch.randn(1, 8, 2, 16), torch.randn(1, 8, 2, 8), torch.randn(1, 8, 2, 16))
    with pytest.raises(ValueError, match="batches of 2, 1 and 1"):
        flash_attn_func(q, k[:1], v[:1])
    with pytest.raises(ValueError, match="k: expected 4 dimensions"):
        flash_attn_func(q, k[0], v)
    with pytest.raises(TypeError, match="v: expected a tensor"):
        flash_attn_func(q, k, None)
    with pytest.raises(ValueError, match="kv: expected 2 tensors before heads"):
        flash_attn_kvpacked_func(q, torch.stack((k, k, v), 2))


def test_windows_are_given_as_flash_attns_tests_do():
    q, k, v, _ = drawn()
    expected = flash_attn_func(q, k, v, window_size=(3, -1), **EXACT)
    for window in ([3, -5], torch.tensor([3, -1])):
        torch.testing.assert_close(flash_attn_func(q, k, v, window_size=window, **EXACT), expected)


@pytest.mark.parametrize("given", [False, True])
def test_deterministic_reaches_the_call(given, monkeypatch):
    q, k, v, _ = drawn()
    seen = []

    def watched(*arguments, **options):
        seen.append(current.deterministic)
        return sage_attention(*arguments, **options)

    monkeypatch.setattr(flash_attn, "sage_attention", watched)
    flash_attn_func(q, k, v, deterministic=given, **EXACT)
    with switches(deterministic=True):
        flash_attn_func(q, k, v, deterministic=given, **EXACT)
    assert seen == [given, True]


@pytest.mark.parametrize("given", [False, True])
def test_deterministic_is_traced(given):
    found = []

    def backend(module, inputs):
        found.extend(
            node.args[18] for node in module.graph.nodes if node.target is torch.ops.sagebwd.attention.default
        )
        return module.forward

    def attend(x):
        return flash_attn_func(x, x, x, causal=True, deterministic=given, return_attn_probs=True, recipe="token")

    torch.compile(attend, fullgraph=True, backend=backend)(drawn()[0])
    assert found == [given]


def test_padding_goes_and_comes_back():
    x = torch.randn(3, 5, 2, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    packed, indices, starts, longest, used = unpad_input(x, mask)
    assert torch.equal(packed, x[mask.bool()])
    assert (starts.tolist(), starts.dtype, longest, used.tolist()) == ([0, 3, 7, 7], torch.int32, 4, [3, 4, 0])
    assert torch.equal(index_first_axis(x.flatten(0, 1), indices), packed)
    padded = pad_input(packed, indices, 3, 5)
    assert torch.equal(padded, x * mask[..., None, None])
    (gradient,) = torch.autograd.grad(padded.sum(), x)
    assert torch.equal(gradient, mask[..., None, None].expand_as(x).double())
    assert unpad_input(x, mask, 1 - mask)[0].shape[0] == 15


def there() -> tuple[list[str], bool]:
    """Modules of ``flash_attn``, and whether there is such a package, as FlashAttention-4's."""
    modules = [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]
    return modules, importlib.util.find_spec("flash_attn") is not None


def test_installed_under_flash_attns_name_and_undone():
    q, k, v, _ = drawn()
    before = there()
    with install("paper", "reference") as installed:
        import flash_attn as found
        from flash_attn.bert_padding import index_first_axis as index
        from flash_attn.bert_padding import pad_input as pad
        from flash_attn.bert_padding import unpad_input as unpad
        from flash_attn.flash_attn_interface import flash_attn_func as function

        assert torch.equal(function(q, k, v), flash_attn_func(q, k, v, recipe="paper", impl="reference"))
        assert torch.equal(function(q, k, v, recipe="full"), flash_attn_func(q, k, v, **EXACT))
        assert inspect.signature(function) == inspect.signature(flash_attn_func)
        assert found.flash_attn_func is function
        assert {x.__name__ for x in FIRST} | {"flash_attn_with_kvcache"} <= set(dir(found))
        assert (pad, unpad, index) == (pad_input, unpad_input, index_first_axis)
        assert found.bert_padding.pad_input is pad
        assert importlib.util.find_spec("flash_attn") is not None
        assert found.__version__ == importlib.metadata.version("flash_attn") == "2.8.4+sagebwd"
        assert importlib.metadata.version("flash-attn") == found.__version__
        assert "not the package" in importlib.metadata.metadata("flash-attn")["Summary"]
        assert "flash-attn" in importlib.metadata.packages_distributions()["flash_attn"]
        with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.layers"):
            importlib.import_module("flash_attn.layers.rotary")
        with pytest.raises(ValueError, match="flash_attn is imported already"):
            install()
    installed.uninstall()
    assert there() == before
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")


def test_refuses_where_the_package_is_imported(monkeypatch, tmp_path):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with install():  # the package is there and not imported: it stands behind
        assert importlib.import_module("flash_attn").flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", importlib.import_module("flash_attn"))
    with pytest.raises(ValueError, match=r"flash_attn is imported already, from .*__init__\.py"):
        install()
    with pytest.raises(ValueError, match="impl"):
        install(impl="fast")


MODEL = """
from sagebwd.integrations import flash_attn
flash_attn.install("token", "reference")
import torch
from tests.attention_case import softmax_attention
import transformers.utils.import_utils as checks
checks.is_torch_cuda_available = lambda: True  # it offers flash_attention_2 beside a GPU alone
from transformers import AutoModelForCausalLM, LlamaConfig

calls = []
attended = flash_attn.sage_attention_varlen
def watched(*arguments, **options):
    calls.append(str(options["recipe"]))
    return attended(*arguments, **options)
flash_attn.sage_attention_varlen = watched

config = LlamaConfig(
    hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    vocab_size=64,
)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2", dtype=torch.bfloat16)
ids = torch.randint(64, (1, 16))
positions = torch.cat([torch.arange(6), torch.arange(10)])[None]
logits = model(ids, position_ids=positions).logits
logits.float().square().mean().backward()
assert calls == ["token"] * 2, calls
other = model(ids.index_fill(1, torch.arange(6), 1), position_ids=positions).logits
assert torch.equal(logits[:, 6:], other[:, 6:])  # a neighbour in the row changes nothing
assert not torch.equal(logits[:, :6], other[:, :6])
padding = torch.ones(1, 16, dtype=torch.long).index_fill(1, torch.arange(4), 0)
padded, short = model(ids, attention_mask=padding).logits[:, 4:], model(ids[:, 4:]).logits
eager = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
eager.load_state_dict(model.state_dict())
error = (padded - eager(ids, attention_mask=padding).logits[:, 4:]).float()
assert 0 < error.square().mean() < 1e-2 * padded.float().square().mean(), error.square().mean()
"""


def test_transformers_takes_it_for_flash_attention_2():
    pytest.importorskip("transformers")
    sources = Path(__file__).parents[2] / "src"
    outcome = subprocess.run(
        [sys.executable, "-c", MODEL], capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | {"PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert outcome.returncode == 0, outcome.stderr
