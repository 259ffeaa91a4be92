"""Where recipe "auto" hands a call to torch's own attention: what decides it, and what it is decided by."""

from __future__ import annotations

import json
import logging
import math
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import sagebwd
from sagebwd import arguments, dispatch, sage_attention, sage_attention_varlen
from sagebwd.auto import choice as auto_choice
from sagebwd.auto import model, timings, torch_attention
from sagebwd.auto.contenders import EFFICIENT, TORCH
from sagebwd.auto.model import DIRECTIONS, FORWARD, MARGIN, TRAINING, Cost, Size
from sagebwd.explain import explained
from sagebwd.kernels.capabilities import KERNEL_DTYPES
from sagebwd.masks.kinds import CAUSAL, FULL, KINDS, MASK, PACKED, WINDOW
from tests.auto.calls import ASK, FASTER, FROM_4000, SLOWER, times
from tools import fit_auto

CPU = torch.device("cpu")


def size(tokens, keys=None, heads=16, **more):
    return Size(tokens, tokens if keys is None else keys, heads, heads, **more)


def ms(known, of):
    """Of low precision and of torch."""
    low, full = known.ms(of)
    return low, full["torch"]


def runs(ask=ASK, of=None):
    return auto_choice.choose(ask, of or size(2048)).name


def test_what_takes_less_by_the_margin_runs(measured):
    measured += [times(FROM_4000), times(FASTER, direction=TRAINING)]
    shortest = next(n for n in range(3072, 6000, 128) if runs(of=size(n)) == "hopper/hopper")
    for n, side in ((shortest - 128, False), (shortest, True)):
        low, full = ms(measured[0], size(n))
        assert (full / low > 1 + MARGIN / 100) == side
    assert full > low
    assert {runs(of=size(n)) for n in (shortest + 128, 1 << 17)} == {"hopper/hopper"}
    assert runs(ASK._replace(training=True), size(16)) == "hopper/hopper"
    assert auto_choice.choose(ASK, size(3072)) is auto_choice.handed_to("torch")
    assert str(auto_choice.handed_to("torch").recipe) == "full"
    assert auto_choice.handed_to("torch").forward.impl == "torch"


def test_small_calls_wait_for_the_host_and_the_launches(measured):
    measured.append(times((100, 30, 0, 1)))
    pairs, rows = 1e-9 * 4224 * (4224 + 128) / 2, 1e-6 * 8448  # ms of a head by 1 ps and 1 ns
    small, larger = size(4224, heads=4), size(4224, heads=8)  # whole waves of tiles
    assert ms(measured[0], small) == pytest.approx((0.1, 8 * pairs + 4 * rows), rel=1e-3)
    measured[0] = times((140, 30, 0, 1))
    auto_choice.times_of.cache_clear()
    assert ms(measured[0], small)[0] == pytest.approx(0.14)
    assert runs(of=small) == "torch/torch"
    assert ms(measured[0], larger) == pytest.approx((0.14, 16 * pairs + 8 * rows), rel=1e-3)
    assert runs(of=larger) == "hopper/hopper"
    measured[0] = times((140, 140, 0, 1))
    auto_choice.times_of.cache_clear()
    assert ms(measured[0], larger) == pytest.approx((0.14 + 8 * pairs, 16 * pairs + 8 * rows), rel=1e-3)
    assert runs(of=larger) == "torch/torch"


def test_the_comparison_is_that_of_the_costs():
    """In integers, of random costs and sizes; a call within a millionth of the margin may go either way."""
    generator = torch.Generator().manual_seed(0)
    for draw in torch.rand(2000, 11, generator=generator, dtype=torch.float64).tolist():
        low, full = (Cost.of(1000 * a, 1000 * b, c, d) for a, b, c, d in (draw[:4], draw[4:8]))
        low = low.with_margin()
        of = size(1 + int(draw[8] * 9000), 1 + int(draw[9] * 9000), 1 + int(draw[10] * 40))
        ours, theirs = (of.work(name, CAUSAL, draw[10] < 0.5) for name in ("low", "cudnn"))
        ratio = full.ms(theirs) / low.ms(ours)
        if abs(math.log(ratio)) > 1e-6:
            assert model.is_less(model.taken(low, ours), model.taken(full, theirs)) == (ratio > 1)


@pytest.mark.parametrize("tokens", [(7, 7), (5, 9), (9, 5)])
def test_pairs_are_those_of_tiles_that_a_mask_shows_a_part_of(tokens):
    n, m = (128 * x for x in tokens)
    of, rows = Size(n, m, heads=132, kv_heads=33), 132 * n + 33 * m

    def pairs(shown):
        tiles = shown.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).any(3).any(1)
        return 2 * 132 * 128 * 128 * int(tiles.sum())

    everything = torch.ones(n, m, dtype=torch.bool)
    for kind in (FULL, MASK):
        assert {of.work(name, kind, False) for name in ("low", "fa4", "cudnn")} == {(rows, pairs(everything))}
    for kind, offset in ((CAUSAL, 0), (PACKED, m - n)):
        shown = everything.tril(offset)
        assert of.work("fa4", kind, False) == (rows, pairs(shown))
    if n == m:
        of_window = of._replace(width=200)
        shown = everything.tril().triu(-199)
        surplus = of_window.work("fa4", WINDOW, False).pairs - pairs(shown)
        assert 0 <= surplus <= 3 * 2 * 132 * 128 * 128, "the first tiles have fewer keys before them"
        assert of_window.work("cudnn", WINDOW, False).pairs == pairs(everything)


def test_tokens_of_a_tile_that_an_end_cuts_count_whole():
    pairs = 2 * 132 * 256 * 256
    for n, m in ((129, 256), (256, 200), (200, 200), (256, 256)):
        for name in ("low", "fa4", "cudnn"):
            assert Size(n, m, 132, 132).work(name, FULL, False) == (132 * (n + m), pairs)


def test_multiprocessors_without_a_tile_wait():
    """Forward has a tile of queries a program; backward one of keys, sagebwd's of all heads of a group."""

    def longer(heads, kv_heads, name, training=False):
        pairs = Size(1280, 256, heads, kv_heads).work(name, FULL, training).pairs
        return pairs / (2 * heads * 1280 * 256)

    near = partial(pytest.approx, abs=0.01)
    for name in ("low", "cudnn", "fa4"):
        assert longer(66, 66, name) == 1, "five waves"
        assert longer(4, 2, name) == near(132 / 40)
        assert longer(4, 2, name, training=True) == near(132 / 7 * (2 / 40 + 5 / (4 if name == "low" else 8)))
        half = near((160 + 264) / 320)  # of the last wave counts
        assert longer(16, 16, name) == (1 if name == "fa4" else half)


def test_in_training_gradients_of_keys_are_of_each_query_head():
    of, rows = Size(4096, 4096, 32, 8), 40 * 4096
    assert {of.work(name, FULL, False).rows for name in ("low", "fa4", "cudnn")} == {rows}
    found = {name: of.work(name, FULL, True).rows for name in ("low", "cudnn", "fa4")}
    weighed = (6 * 32 + 4 * 8) * 4096 // 5  # of low precision a row of Q costs half as much again as one of K
    assert found == {"low": weighed, "cudnn": rows + 24 * 4096, "fa4": rows + 56 * 4096}
    assert of._replace(kv_heads=32).work("fa4", FULL, True).rows == 64 * 4096, "no sums"
    assert of._replace(kv_heads=32).work("low", FULL, True).rows == 64 * 4096


def test_packed_sequences_count_between_their_mean_and_the_longest():
    alike, longer = Size(1024, 1024, 160, 160), Size(1024, 1024, 160, 160, longest=3072)
    one, other = (of.work("fa4", PACKED, False) for of in (alike, longer))
    assert (other.rows, other.pairs) == (one.rows, 2 * one.pairs)


def test_a_trace_counts_work_of_all_lengths_in_one_graph():
    """Else it compiles anew as lengths vary, until torch's limit."""
    for kind in (CAUSAL, PACKED):
        for name in ("low", "cudnn"):
            counter = CompileCounterWithBackend("eager")

            def scaled(x, longest, name=name, kind=kind):
                return x * Size(x.shape[0], x.shape[0], 8, 2, longest=longest).work(name, kind, True).pairs

            torch._dynamo.reset()
            compiled = torch.compile(scaled, fullgraph=True, backend=counter, dynamic=True)
            for tokens, longest in ((300, 900), (900, 300), (9000, 300), (9000, 20000), (100, 50)):
                x = torch.ones(tokens)
                assert torch.equal(compiled(x, longest), scaled(x, longest))
            assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("of", "change", "ran"),
    [
        (size(704), {"kind": WINDOW, "training": True}, "efficient"),
        (size(640), {"kind": WINDOW, "training": True}, "cudnn"),
        (size(704), {"kind": WINDOW}, "cudnn"),
        (size(704), {"kind": CAUSAL, "training": True}, "cudnn"),
        (size(704, 832), {"kind": CAUSAL, "training": True}, "cudnn"),
        (size(705, 704), {"kind": CAUSAL, "training": True}, "efficient"),  # a mask's too
        (Size(704, 704, 16, 4), {"kind": WINDOW, "training": True}, None),  # torch's memory-efficient takes no groups
    ],
)
def test_a_mask_under_which_cudnn_gets_gradients_wrong_is_anothers(of, change, ran, measured, monkeypatch):
    """torch's issue 196678: dQ is NaN under a mask, at 64 keys more than a multiple of 128.

    Whoever of torch's refuses a call has it run by cuDNN.
    """
    ask = ASK._replace(**change)
    one = times(
        (0, 0, 9, 99), direction=DIRECTIONS[ask.training], kind=ask.kind, full=None, cudnn=(0, 0, 1, 1),
        flash=(0, 0, 1, 2), efficient=(0, 0, 1, 3),
    )  # fmt: skip
    measured.append(one)
    of = of._replace(width=64)
    choice = auto_choice.choose(ask, of)
    assert choice.contender == ran
    why = explained(choice, ask, of, "auto", "NVIDIA H200").why
    assert ("; torch's cuDNN may give NaN in gradients under a mask of 704 keys" in why) == (ran != "cudnn")
    picked = "torch" if ran == "cudnn" else None
    assert auto_choice.choose(ask, of, planned=False).contender == picked, "as of a compiled call"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert auto_choice.choose(ask, of, planned=False).contender == "torch", "which then runs no cuDNN"


@pytest.mark.parametrize("counts", [((3, 0, 0, 0),) * 2, ((100, 200), (1, 0)), ((1, 0), (100, 200))])
def test_most_packed_sequences_may_have_no_token(counts):
    queries, keys = (torch.tensor([0, *x]).cumsum(0, dtype=torch.int32) for x in counts)
    q, k = (torch.empty(sum(x), 4, 128, dtype=torch.bfloat16, requires_grad=True) for x in counts)
    given = q, k, k, queries, keys, max(counts[0]), max(counts[1])
    size = arguments.choice_of(sage_attention_varlen, *given, card="NVIDIA H200")[1].size
    assert size[:2] == tuple(math.ceil(sum(x) / len(x)) for x in counts)
    with torch.no_grad():
        arguments.choice_of(sage_attention_varlen, *given, card="NVIDIA H200")


def test_a_call_has_the_size_of_its_tensors():
    q, k = torch.empty(2, 8, 30, 16), torch.empty(2, 2, 40, 16)
    for more, width in (({"window": (5, 3)}, 9), ({"is_causal": True}, 40)):
        _, of = arguments.choice_of(sage_attention, q, k, k, enable_gqa=True, **more)
        assert of.size == Size(30, 40, 16, 4, width=width)
    for some, others in ((q[:, :, :0], k), (q, k[:, :, :0])):
        assert arguments.choice_of(sage_attention, some, others, others, enable_gqa=True)[1].size is None


def test_a_packed_call_has_the_size_of_its_tensors(monkeypatch):
    monkeypatch.setattr(torch_attention, "takes_packed", lambda head_dim, value_dim, grouped: grouped)
    offsets = torch.tensor([0, 30, 50], dtype=torch.int32)
    for kv_heads in (8, 2):
        q, k = (torch.empty(50, heads, 16, dtype=torch.bfloat16) for heads in (8, kv_heads))
        _, of = arguments.choice_of(sage_attention_varlen, q, k, k, offsets, offsets, 30, 30, card="NVIDIA H200")
        assert of.size == Size(25, 25, 16, 2 * kv_heads, by_torch=kv_heads == 2, longest=30)


def test_what_was_not_timed_is_torchs(measured):
    assert runs(of=size(1 << 20)) == "torch/torch"
    measured += [times(SLOWER), times(FASTER, kind=WINDOW), times(FASTER, dims=(256, 256))]
    auto_choice.times_of.cache_clear()
    assert runs(of=size(1 << 20)) == "torch/torch"
    assert runs(ASK._replace(kind=FULL)) == "torch/torch"
    assert runs(ASK._replace(kind=WINDOW)) == "hopper/hopper"


def test_what_torch_does_not_run_is_not_torchs(measured):
    measured.append(times(SLOWER, full=None))
    assert runs(of=size(16)) == "hopper/hopper"


def test_a_width_counts_as_the_next_smaller_of_the_same_kernels(measured):
    measured += [times(SLOWER, dims=(80, 80)), times(FASTER, dims=(96, 96)), times(FASTER, dims=(64, 64))]
    found = {d: runs(ASK._replace(head_dim=d, value_dim=d)) for d in (64, 72, 80, 88, 96)}
    assert found == {
        64: "hopper/hopper", 72: "torch/torch", 80: "torch/torch", 88: "torch/torch", 96: "hopper/hopper",
    }  # fmt: skip
    measured[0] = times(FASTER, dims=(80, 80))
    auto_choice.times_of.cache_clear()
    found = {d: runs(ASK._replace(head_dim=d, value_dim=d)) for d in (72, 88)}
    assert found == {72: "torch/torch", 88: "hopper/hopper"}


def test_wide_heads_count_as_the_next_smaller_timed_ones(measured, monkeypatch):
    """Those of other kernels answer for none of them, nor they for others."""
    monkeypatch.setattr(
        arguments, "ask_of", lambda *x: ASK._replace(head_dim=x[0].shape[-1], value_dim=x[1].shape[-1])
    )

    def ran(head_dim, value_dim):
        q, v = (torch.empty(1, 16, 2048, width) for width in (head_dim, value_dim))
        return arguments.choice_of(sage_attention, q, q, v, is_causal=True)[0].name

    def found():
        auto_choice.times_of.cache_clear()
        return {d: ran(d, d) for d in (128, 256, 257, 288, 320, 384, 511, 512)}

    measured += [times(FASTER, dims=(256, 256)), times(FASTER, dims=(256, 256), impl="triton/triton")]
    assert found() == dict.fromkeys((128, 257, 288, 320, 384, 511, 512), "torch/torch") | {256: "hopper/hopper"}
    measured.append(times(FASTER, dims=(288, 288), impl="triton/triton"))
    wide = dict.fromkeys((288, 320, 384, 512), "triton/triton")
    of_masked_reads = dict.fromkeys((257, 511), "torch/torch")
    assert found() == wide | of_masked_reads | {128: "torch/torch", 256: "hopper/hopper"}
    measured.append(times(SLOWER, dims=(384, 384), impl="triton/triton"))
    assert found()[320] == "triton/triton"
    assert found()[384] == found()[512] == "torch/torch"
    measured.append(times(FASTER, dims=(320, 320), impl="triton/triton"))
    auto_choice.times_of.cache_clear()
    assert ran(320, 320) == "triton/triton"
    assert ran(320, 352) == ran(512, 64) == "torch/torch", "no such pairs were timed"


def test_grouped_heads_are_none_for_the_memory_efficient_kernel(measured):
    """Which torch runs by its plain functions there, at heads that no other backend takes."""
    measured.append(times(SLOWER, dims=(512, 512), impl="triton/triton", full=None, efficient=(0, 0, 1, 2)))
    ask = ASK._replace(head_dim=512, value_dim=512)
    assert [runs(ask, Size(4096, 4096, 8, kv_heads)) for kv_heads in (8, 1)] == ["torch/torch", "triton/triton"]


def test_grouped_wide_heads_go_by_what_torch_picks_where_gradients_have_to_repeat(measured, monkeypatch):
    """Regression: the memory-efficient kernel, torch's first for other heads, was all that they had there."""
    full = {EFFICIENT: Cost.of(0, 0, 0.5, 1), TORCH: Cost.of(0, 0, 1, 2)}
    measured.append(times(SLOWER, dims=(512, 512), impl="triton/triton")._replace(full=full))
    ask = ASK._replace(head_dim=512, value_dim=512)
    found = [auto_choice.choose(ask, Size(4096, 4096, 8, 1), planned=planned).name for planned in (True, False)]
    assert found == ["torch/torch"] * 2


def test_a_width_that_the_kernels_lack_was_not_timed_on_them(measured, monkeypatch):
    """Regression: a card with timings at 64, whose backward is Triton's, refused calls at 128."""
    monkeypatch.setattr(dispatch, "arch_of", lambda device: 89)
    measured += [times(FASTER, dims=(64, 64), impl="mma_sync/triton")]
    found = {d: runs(ASK._replace(head_dim=d, value_dim=d)) for d in (64, 128)}
    assert found == {64: "mma_sync/triton", 128: "torch/torch"}


def test_what_was_timed_on_other_kernels_does_not_count(measured, monkeypatch):
    measured += [times(FASTER), times(FASTER, kind=MASK)]
    assert runs(ASK._replace(kind=MASK)) == "hopper/hopper"
    monkeypatch.setattr(dispatch, "missing", lambda row: "nvidia-cutlass-dsl is not installed")
    dispatch._choose.cache_clear()
    auto_choice.times_of.cache_clear()
    assert runs() == "torch/torch"


def test_what_was_named_is_never_handed_over(measured):
    for change in ({"recipe": sagebwd.Recipe.named("mixed")}, {"impl": "hopper"}, {"impl": dispatch.FASTEST}):
        assert runs(ASK._replace(**change), size(16)) == "hopper/hopper"
    assert auto_choice.choose(ASK, None).name == "hopper/hopper"
    with pytest.raises(TypeError, match="dtype float32"):
        runs(ASK._replace(dtype=torch.float32), size(16))
    for change in ({"recipe": sagebwd.Recipe.named("token")}, {"impl": "reference"}):
        assert runs(ASK._replace(device=CPU, **change), size(16)) == "reference/reference"


def test_without_a_gpu_torch_runs_what_it_has_a_function_for():
    ask = ASK._replace(device=CPU)
    assert {runs(ask._replace(dtype=getattr(torch, name)), size(1 << 20)) for name in KERNEL_DTYPES} == {"torch/torch"}
    assert runs(ask._replace(only_torch="dropout_p"), size(16)) == "torch/torch"
    with pytest.raises(TypeError, match="dtype int8"):
        runs(ask._replace(dtype=torch.int8), size(16))


def test_the_model_of_this_project():
    found = model.of_this_project()
    assert {"NVIDIA H200", "NVIDIA H100 80GB HBM3"} == set(found)
    for known in found.values():
        assert {one.kind for one in known} == set(KINDS)
        assert len({one[:6] for one in known}) == len(known)
        for one in known:
            assert min(one.low) >= 0
            assert one.direction in DIRECTIONS
            assert one.low.host > 0
    assert timings.of_card("NVIDIA A100-SXM4-80GB", "0") == ()
    assert timings.of_card("NVIDIA H200", "0") == found["NVIDIA H200"]


def test_the_model_is_what_its_files_say():
    assert fit_auto.MODEL.read_text(encoding="utf-8") == fit_auto.text_of(fit_auto.files_of_model())


def test_between_timed_sizes_the_faster_one_runs():
    """Regression: a call smaller than those that were timed went to torch, though `mixed` was 1.26 times as fast."""
    of = Size(4096, 4096, 64, 64)
    for card in model.of_this_project():
        for training in (False, True):
            ask = ASK._replace(head_dim=80, value_dim=80, training=training)
            low, full = auto_choice.times_of(ask, card).ms(of)
            assert full["cudnn"] > 1.1 * low
            assert auto_choice.choose(ask, of, card).name == "hopper/hopper"


@pytest.mark.parametrize(("torch_version", "newer"), [("2.11.1", False), ("2.12.0+cpu", True), ("2.9", False)])
def test_a_newer_torch_is_known(torch_version, newer):
    assert model.is_newer(torch_version, "2.11.0+cu130") == newer


CARD = "NVIDIA H200"
ROW = {
    "kind": FULL, "head_dim": 64, "value_dim": 64, "direction": FORWARD, "batch": 2, "heads": 16, "tokens": 8192,
    "recipe": "mixed", "impl": "hopper/hopper", "ms": 1.0, "host_ms": 0.1, "torch_ms": 2.0, "torch_host_ms": 0.1,
}  # fmt: skip


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """The file of what was measured on this machine."""
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path))
    path = timings.kept_at(CARD, "0")
    path.parent.mkdir()
    timings.of_card.cache_clear()
    yield path
    timings.of_card.cache_clear()


def test_what_was_measured_here_comes_first(kept, caplog):
    kept.write_text(json.dumps({"rows": [ROW, {**ROW, "direction": TRAINING, "torch_ms": None}]}))
    forward, training, *packaged = timings.of_card(CARD, "0")
    assert not {times[:4] for times in packaged} & {forward[:4], training[:4]}
    assert forward.source == f"timings in {kept}"
    assert ms(forward, size(8192, heads=32)) == pytest.approx((1, 2))
    assert (training.direction, training.full) == (TRAINING, {})
    assert not caplog.messages


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "JSONDecodeError: Expecting value"),
        (json.dumps({"rows": [ROW]})[:-40], "JSONDecodeError: "),
        (b"\xff\xfe", "UnicodeDecodeError: "),
        ("[" * 100_000, "RecursionError: "),
        ("{}", "KeyError: 'rows'"),
        ("[]", "TypeError: "),
        ('{"rows": [3]}', "TypeError: "),
        (json.dumps({"rows": [ROW, {}]}), "KeyError: 'kind'"),
        (json.dumps({"rows": [{**ROW, "tokens": "256"}]}), "TypeError: "),
        (json.dumps({"rows": [{**ROW, "kind": []}]}), "TypeError: "),
        (json.dumps({"rows": [{**ROW, "kind": "none"}]}), "ValueError: "),
        (json.dumps({"rows": [{**ROW, "ms": "fast"}]}), "TypeError: "),
        (json.dumps({"rows": [{**ROW, "batch": 10**400}]}), "OverflowError: "),
        (None, "IsADirectoryError: "),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_told_and_left_out(text, reason, kept, caplog):
    """Regression: KeyError 'rows', of a call of auto, without the file's name."""
    if text is None:
        kept.mkdir()
    else:
        kept.write_bytes(text if isinstance(text, bytes) else text.encode())
    with caplog.at_level(logging.WARNING, "sagebwd"):
        for _ in range(2):
            found = timings.of_card(CARD, "0")
    assert found == model.of_this_project()[CARD]
    (said,) = caplog.messages
    for part in (str(kept), reason, "Delete it, or measure anew with `sagebwd doctor --measure`"):
        assert part in said


def test_a_cache_folder_that_is_a_file_has_nothing_measured(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path / "file"))
    assert timings.of_card.__wrapped__("NVIDIA A100-SXM4-80GB", "0") == ()
    assert not caplog.messages
