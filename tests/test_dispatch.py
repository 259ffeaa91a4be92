"""Who runs a call and by which recipe, what is refused and how, and how often that is asked."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from sagebwd import Recipe, dispatch, sage_attention, sage_attention_varlen, switches
from sagebwd.arguments import ask_of
from sagebwd.auto import choice as auto_choice
from sagebwd.auto.model import Size
from sagebwd.call import Ask
from sagebwd.kernels import families
from sagebwd.kernels.sm90 import widths
from sagebwd.masks.kinds import FULL, MASK

CARD, CPU = torch.device("cuda", 0), torch.device("cpu")
MIXED, TOKEN, INT8_DP = (Recipe.parse(text) for text in ("mixed", "token", "token(dp=int8)"))
ASK = Ask("auto", 64, 64, torch.bfloat16, CARD)


@pytest.fixture
def hopper(monkeypatch):
    """Every CUDA device is an H100 that has all of the extra."""
    monkeypatch.setattr(dispatch, "arch_of", lambda device: 90 if device.type == "cuda" else 0)
    monkeypatch.setattr(dispatch, "missing", lambda row: None)
    dispatch._choose.cache_clear()
    yield
    dispatch._choose.cache_clear()


@pytest.mark.parametrize("head_dim", widths.HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("impl", [None, "hopper", dispatch.FASTEST])
def test_on_hopper_auto_is_mixed(hopper, head_dim, dtype, impl):
    choice = dispatch.choose(ASK._replace(head_dim=head_dim, value_dim=head_dim, dtype=dtype, impl=impl))
    assert (choice.recipe, choice.name) == (MIXED, "hopper/hopper")
    assert choice.forms(head_dim, head_dim) == ((head_dim, head_dim),) * 2


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"impl": "triton"}, "triton/triton"),
        ({"impl": "reference"}, "reference/reference"),
        ({"device": CPU, "impl": "reference"}, "reference/reference"),
    ],
)
def test_where_hoppers_kernels_do_not_run_mixed_auto_is_token(hopper, changes, name):
    choice = dispatch.choose(ASK._replace(**changes))
    assert (choice.recipe, choice.name) == (TOKEN, name)


def test_on_a_cpu_auto_is_full_precision():
    """By torch where it has a function, `handed_to` torch, else by the reference."""
    ask = ASK._replace(device=CPU)
    assert auto_choice.choose(ask, Size(1 << 20, 1 << 20, 16, 16)) is auto_choice.handed_to("torch")
    for dtype in (torch.bfloat16, torch.float64):
        choice = dispatch.choose(ask._replace(dtype=dtype))
        assert (choice.recipe, choice.name) == (Recipe.named("full"), "reference/reference")


@pytest.mark.parametrize("arch", families.MMA_SYNC.first_on)
@pytest.mark.parametrize(
    ("dims", "recipe", "name"),
    [
        ((128, 128), INT8_DP, "mma_sync/mma_sync"), ((65, 65), INT8_DP, "mma_sync/mma_sync"),
        ((96, 40), INT8_DP, "mma_sync/mma_sync"), ((64, 64), TOKEN, "mma_sync/triton"),
        ((40, 64), TOKEN, "mma_sync/triton"), ((129, 129), TOKEN, "triton/triton"),
        ((192, 128), TOKEN, "triton/triton"),
    ],
)  # fmt: skip
def test_where_mma_syncs_backward_runs_autos_dp_is_int8(monkeypatch, arch, dims, recipe, name):
    monkeypatch.setattr(dispatch, "missing", lambda row: None)
    ask = ASK._replace(head_dim=dims[0], value_dim=dims[1])
    for kind in (FULL, MASK):
        choice = dispatch._choose.__wrapped__(ask._replace(kind=kind), arch, False)
        assert (choice.recipe, choice.name) == (recipe, name)
    assert dispatch._choose.__wrapped__(ask._replace(recipe=TOKEN), arch, False) == (TOKEN, *choice[1:])
    for impl in ("triton", "reference"):
        assert dispatch._choose.__wrapped__(ask._replace(impl=impl), arch, False).recipe == TOKEN
    monkeypatch.setattr(dispatch, "missing", lambda row: "NVRTC is not found" if row.needs else None)
    without = dispatch._choose.__wrapped__(ask, arch, False)
    assert (without.recipe, without.name) == (TOKEN, "triton/triton")


def test_on_hopper_mma_sync_by_name_has_the_recipe_of_its_own_cards(hopper):
    wide = ASK._replace(head_dim=128, value_dim=128)
    assert dispatch.choose(wide._replace(impl="mma_sync")).recipe == INT8_DP
    assert dispatch.choose(ASK._replace(impl="mma_sync")).recipe == TOKEN
    assert dispatch.choose(wide).recipe == MIXED


def test_on_another_card_auto_is_token(monkeypatch):
    monkeypatch.setattr(dispatch, "arch_of", lambda device: 89)
    assert dispatch.choose(ASK).recipe == TOKEN
    with pytest.raises(ValueError, match=r"impl='hopper' needs a GPU of compute capability 9\.0 .*use impl='triton'"):
        dispatch.choose(ASK._replace(impl="hopper"))


@pytest.mark.parametrize("pair", [(1, 1), (40, 64), (72, 72), (96, 40), (112, 112), (160, 96), (192, 192), (250, 3)])
def test_a_call_is_filled_up_to_the_first_form_that_has_room(hopper, pair):
    found = next(form for form in widths.FORMS if all(n >= m for n, m in zip(form, pair)))
    choice = dispatch.choose(ASK._replace(head_dim=pair[0], value_dim=pair[1]))
    assert (choice.name, choice.forms(*pair)) == ("hopper/hopper", (found, found))


def test_forms_of_kernels_of_two_families_fit(hopper, monkeypatch):
    """Backward reads codes as wide as forward wrote them."""
    choice = dispatch.choose(ASK._replace(head_dim=192, value_dim=128, recipe=TOKEN))
    assert (choice.name, choice.forms(192, 128)) == ("triton/triton", ((192, 192), (192, 192)))
    sixteen = dispatch.choose(ASK._replace(recipe=MIXED.replace(dv="16bit", dq="16bit", dk="16bit")))
    monkeypatch.setattr(dispatch, "missing", lambda row: "nvidia-cutlass-dsl is not installed")
    dispatch._choose.cache_clear()
    portable = dispatch.choose(ASK)
    assert (sixteen.name, portable.name) == ("hopper/triton", "triton/hopper")
    for choice in (sixteen, portable):
        for pair in ((64, 64), (72, 72), (112, 40), (192, 128), (160, 128), (250, 250)):
            forward, backward = choice.forms(*pair)
            assert forward[0] == backward[0]
            assert choice.forward.form(*forward) == forward
            assert choice.backward.form(*backward) == backward
            assert all(n >= m for form in (forward, backward) for n, m in zip(form, pair))


def test_each_direction_has_the_kernels_that_run_it(hopper, monkeypatch):
    sixteen = MIXED.replace(dv="16bit", dq="16bit", dk="16bit")
    assert dispatch.choose(ASK._replace(recipe=sixteen)).name == "hopper/triton"
    assert dispatch.choose(ASK._replace(recipe=TOKEN)).name == "triton/triton"
    monkeypatch.setattr(dispatch, "missing", lambda row: "nvidia-cutlass-dsl is not installed")
    dispatch._choose.cache_clear()
    assert dispatch.choose(ASK).name == dispatch.choose(ASK._replace(impl="hopper")).name == "triton/hopper"
    with pytest.raises(NotImplementedError, match="nvidia-cutlass-dsl is not installed"):
        dispatch.choose(ASK._replace(recipe=sixteen, impl="hopper"))


@pytest.mark.parametrize(
    "row",
    [row for family in families.FAMILIES.values() for row in (family.forward, family.backward)],
    ids=lambda row: f"{row.direction}-{row.impl}",
)
def test_a_choice_has_the_rows_of_its_name(row):
    name = f"{row.impl}/{row.impl}"
    choice = dispatch.named(TOKEN, name)
    assert choice.name == name
    assert row in choice


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (
            {"impl": "cuda"},
            ValueError,
            "impl='cuda' is not known; accepted: None, 'reference', 'triton', 'mma_sync', 'hopper'",
        ),
        (
            {"impl": "hopper", "device": CPU},
            ValueError,
            "compute capability 9.0 .*use impl='reference'",
        ),
        (
            {"impl": "triton", "device": CPU},
            ValueError,
            "impl='triton' needs a GPU of compute .* 8.0 or more, got cpu",
        ),
        ({"dtype": torch.float32}, TypeError, "query: dtype float32 is not supported by impl='triton'; accepted: bfl"),
        ({"impl": "hopper", "recipe": TOKEN}, NotImplementedError, r"impl='hopper' .*recipe 'token' has o=int8"),
        ({"impl": "hopper", "value_dim": 300}, NotImplementedError, "head_dim 64/300 is not one of 1 to 256"),
        ({"recipe": MIXED, "impl": "triton"}, NotImplementedError, "has dv=fp8, which is not one of int8, 16bit"),
        (
            {"recipe": MIXED.replace(dp="int8")},
            NotImplementedError,
            r"dp=int8, .*name 'mixed', .*or 'token\(dp=int8\)'",
        ),
        (
            {"recipe": TOKEN.replace(first_keys=4)},
            NotImplementedError,
            "first_keys=4, which is not one of 0, 16.*; impl='reference' does",
        ),
        (
            {"recipe": MIXED, "head_dim": 320},
            NotImplementedError,
            "^impl='hopper' and 'triton' do not support this call: head_dim 320/64 is not one of 1 to 256; recipe "
            "'mixed' has k_scale=lane, which is not one of token, block at a head_dim over 256; name 'token', 'paper' "
            "or 'full', or leave recipe and impl out; recipe 'mixed' has dv=fp8, which is not one of int8, 16bit; "
            "impl='reference' does$",
        ),
        ({"recipe": TOKEN.replace(block_k=16)}, NotImplementedError, "block_k=16, which is not one of 32, 64, 128"),
    ],
)
def test_refusals_name_the_argument_and_the_way_out(hopper, monkeypatch, changes, error, match):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(error, match=match):
        dispatch.choose(ASK._replace(**changes))


@pytest.mark.parametrize("impl", [None, "triton", "mma_sync"])
def test_a_card_before_8_0_is_refused_and_told_who_runs_there(impl):
    with pytest.raises(ValueError, match=r"needs a GPU of compute capability 8\.0 or more.*use impl='reference'"):
        dispatch.choose(ASK._replace(impl=impl), 75)
    assert dispatch.choose(ASK._replace(impl="reference"), 75).name == "reference/reference"


@pytest.fixture
def asked(monkeypatch):
    """The calls of `choose`."""
    calls, real = [], auto_choice.choose
    monkeypatch.setattr(auto_choice, "choose", lambda *ask: calls.append(ask) or real(*ask))
    return calls


@pytest.mark.parametrize("recipe", ["auto", "token", "full"])
def test_who_runs_a_call_is_asked_once(asked, recipe):
    """By dense and packed calls that lie alike, forward and backward together."""
    q, k, v = (torch.randn(2, 2, 40, 32, requires_grad=True) for _ in range(3))
    for _ in range(3):
        sage_attention(q, k, v, is_causal=True, recipe=recipe).sum().backward()
        assert len(asked) == 1
    asked.clear()
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    offsets = torch.tensor([0, 17, 40], dtype=torch.int32)
    sage_attention_varlen(*packed, offsets, offsets, 23, 23, recipe=recipe).sum().backward()
    assert len(asked) == 1


def test_auto_is_the_default():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 32, requires_grad=True) for _ in range(3))
    for given in ({"impl": "reference"}, {"impl": "reference", "recipe": "auto"}):
        assert torch.equal(sage_attention(q, k, v, **given), sage_attention(q, k, v, recipe="token"))
    for given in ({}, {"recipe": "auto"}):
        assert torch.equal(sage_attention(q, k, v, **given), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("switch", ["disabled", "backward_16bit"])
def test_under_a_switch_auto_is_token(hopper, switch):
    query = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device="meta")
    with switches(**{switch: True}):
        assert ask_of(query, query, "auto", None) == ask_of(query, query, TOKEN, None)


@pytest.mark.parametrize(("options", "recipe"), [({"return_lse": True}, "full"), ({"impl": "reference"}, "token")])
def test_a_compiled_call_settles_auto_as_an_eager_one(options, recipe):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 32, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def attend(q, k, v, **more):
        found = sage_attention(q, k, v, is_causal=True, **options, **more)
        return found[0] if "return_lse" in options else found

    torch._dynamo.reset()
    pairs = []
    for call in (torch.compile(attend, backend="aot_eager"), partial(attend, recipe=recipe)):
        out = call(q, k, v)
        pairs.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for found, expected in zip(*pairs):
        assert torch.equal(found, expected)


def test_auto_fixes_no_numbers():
    with pytest.raises(ValueError, match="'auto' is chosen call by call and fixes no numbers; name one: token, paper"):
        Recipe.parse("auto")
    assert Recipe.parse_or_auto("auto") == "auto"
    assert Recipe.parse_or_auto("token") == TOKEN
