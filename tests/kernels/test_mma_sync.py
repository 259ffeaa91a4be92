"""The CUDA kernels of mma.sync: passes beside them, machine code without a GPU, and whole calls where there is one."""

import ctypes
import dataclasses
import subprocess

import pytest
import torch

from sagebwd import dispatch, sage_attention
from sagebwd.cache import PLANS
from sagebwd.call import Ask, Call
from sagebwd.masks.kinds import MASK
from sagebwd.recipe import Recipe
from sagebwd.reference.metrics import relative_l2
from tests.attention_case import AttentionCase
from tests.gpus import DEVICE, HAS_GPU, on_gpu
from tests.kernels import emulated_cuda
from tests.kernels.cubins import cubin, stack_bytes
from tools.cross_compile import BINARIES, count, matrix_loops

pytest.importorskip("triton")

from sagebwd.kernels.families import MMA_SYNC
from sagebwd.kernels.mma_sync import launch
from sagebwd.kernels.mma_sync.variant import (
    BACKWARD,
    FINISH,
    FORWARD,
    HEAD_DIMS,
    QUANTIZE,
    ROW_VALUES,
    Variant,
    finish_variant,
    quantize_variant,
    row_values_variant,
    variant_of,
)
from sagebwd.kernels.runtime import nvrtc

gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a GPU of compute capability 8.0 or more")]
needs_nvrtc = pytest.mark.skipif(nvrtc.unavailable() is not None, reason=str(nvrtc.unavailable()))
# Bytes of shared memory of a thread block.
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
# Of `variant`: direction, head_dim, and whether dP is INT8.
VARIANTS = [*((x, head_dim, False) for x in (FORWARD, QUANTIZE) for head_dim in HEAD_DIMS)]
VARIANTS += [(x, 128, int8_dp) for x in (BACKWARD, ROW_VALUES) for int8_dp in (False, True)] + [(FINISH, 128, False)]
# Registers that do not fit, in bytes of a thread's local memory: those beside the loop.
STACK_BYTES = {FORWARD: 96, QUANTIZE: 32, BACKWARD: 256, ROW_VALUES: 32, FINISH: 0}
# CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
LOCAL_BYTES = 3


def call_of(tokens: int, head_dim: int, recipe: str = "token") -> Call:
    x = torch.empty(2, 3, tokens, head_dim, dtype=torch.bfloat16, device=DEVICE)
    settings = None, None, None, tokens, tokens, False, -1, -1, 0.5, Recipe.parse(recipe)
    return Call.of(x, x, (head_dim, head_dim), *settings)


def variant(
    direction: str, head_dim: int, capability: int, *, half: bool = False, first_keys: int = 16, int8_dp: bool = False
) -> Variant:
    if direction == QUANTIZE:
        return quantize_variant(head_dim, half=half, first_keys=first_keys, turned=head_dim)
    if direction == ROW_VALUES:
        return row_values_variant(head_dim, half=half, int8_dp=int8_dp, turned=head_dim if int8_dp else 0)
    if direction == FINISH:
        return finish_variant(variant(BACKWARD, head_dim, capability, half=half, int8_dp=int8_dp))
    settings = {"first_keys": first_keys, "int8_dp": int8_dp, "turned": head_dim if direction == BACKWARD else 0}
    return variant_of(direction, head_dim, capability, half=half, **settings)


def test_every_card_that_it_is_tried_first_on_is_compiled_for():
    assert set(MMA_SYNC.first_on) <= SHARED_BYTES.keys()


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_variant_has_room_in_shared_memory(capability):
    for direction, head_dim, int8_dp in VARIANTS:
        asked = variant(direction, head_dim, capability, int8_dp=int8_dp)
        assert asked.shared_bytes <= SHARED_BYTES[capability]
        assert not (int8_dp and asked.k_in_registers)


@needs_nvrtc
# 89 has 86's variants, in BF16 as 80 and 120 have theirs
@pytest.mark.parametrize("capability", [80, 86, pytest.param(89, marks=pytest.mark.slow), 120])
@pytest.mark.parametrize(("direction", "head_dim", "int8_dp"), VARIANTS)
def test_compiles_for(capability, direction, head_dim, int8_dp, tmp_path):
    asked = variant(direction, head_dim, capability, half=capability == 86, int8_dp=int8_dp)
    assert stack_bytes(asked.source, capability, tmp_path) <= STACK_BYTES[direction]


@needs_nvrtc
def test_machine_code_is_read_again_from_disk_where_it_is_whole(tmp_path, monkeypatch):
    source = variant(FINISH, 128, 80).source
    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path))
    made = nvrtc.machine_code(source, 80)
    (kept,) = (tmp_path / "cuda").iterdir()
    monkeypatch.setattr(nvrtc, "compile_source", lambda *_: b"compiled again")
    assert nvrtc.machine_code(source, 80) == made
    for other, capability in ((source._replace(macros=(*source.macros, ("OTHER", 1))), 80), (source, 90)):
        assert nvrtc.machine_code(other, capability) == b"compiled again"
    kept.write_bytes(kept.read_bytes()[:-1])
    assert nvrtc.machine_code(source, 80) == b"compiled again"


@needs_nvrtc
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120])
def test_an_int8_dp_keeps_its_sums_in_registers(capability, tmp_path):
    """Of 128 sums of dK and dV a thread 22 and more would be spilled around each step, without its fences."""
    assert stack_bytes(variant(BACKWARD, 128, capability, int8_dp=True).source, capability, tmp_path) <= 64


@needs_nvrtc
@pytest.mark.parametrize("first_keys", [0, 16])
@pytest.mark.parametrize(
    ("head_dim", "capability", "words"),
    [(128, 80, 4), (128, 89, 4), (128, 90, 4), (128, 120, 4), (64, 80, 8), (64, 90, 8)],
)
def test_a_forward_spills_next_to_nothing_in_its_loop(head_dim, capability, words, first_keys, tmp_path):
    """However many keys are apart: a word or two, where another NVRTC shares out registers otherwise.

    At 64 three thread blocks leave a thread 168 registers, so that it is a few addresses more.
    """
    asked = variant(FORWARD, head_dim, capability, first_keys=first_keys)
    made = cubin(asked.source, capability, tmp_path)
    text = subprocess.run([BINARIES / "nvdisasm", "-c", made], capture_output=True, text=True, check=True).stdout
    loop = count(max(matrix_loops(text.splitlines()), key=len))
    assert loop["IMMA"] == head_dim * asked.row_tiles // asked.split
    assert loop["LDL"] + loop["STL"] <= words


@needs_nvrtc
def test_a_full_disk_costs_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(path, made):
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("SAGEBWD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_keep", refuse)
    assert nvrtc.machine_code(variant(FINISH, 128, 80).source, 80)[:4] == b"\x7fELF"
    assert "No space left" in caplog.text


@needs_nvrtc
def test_what_nvrtc_refuses_is_said():
    with pytest.raises(RuntimeError, match=r"NVRTC cannot compile for --gpu-architecture=sm_80.*undefined"):
        nvrtc.compile_source('extern "C" __global__ void f() { missing(); }', ["--gpu-architecture=sm_80"])


def test_a_library_that_is_missing_is_named(monkeypatch):
    def refuse(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(OSError, match=r"libnvrtc\.so"):
        nvrtc._library.__wrapped__()


@pytest.mark.parametrize(
    ("arch", "head_dim", "name"),
    [
        (80, 128, "mma_sync/mma_sync"), (86, 96, "mma_sync/mma_sync"), (89, 64, "mma_sync/triton"),
        (89, 192, "triton/triton"), (120, 128, "mma_sync/mma_sync"), (100, 128, "triton/triton"),
    ],
)  # fmt: skip
def test_who_runs_token(arch, head_dim, name, monkeypatch):
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    ask = Ask(Recipe.named("token"), head_dim, head_dim, torch.bfloat16, torch.device("cuda"))
    assert dispatch._choose.__wrapped__(ask, arch, False).name == name


INT8_DP = "token(dp=int8)"


@pytest.mark.parametrize("arch", [80, 86, 89, 120])
@pytest.mark.parametrize("head_dim", [65, 96, 128])
def test_who_runs_an_int8_dp(arch, head_dim, monkeypatch):
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    ask = Ask(Recipe.parse(INT8_DP), head_dim, head_dim, torch.bfloat16, torch.device("cuda"))
    assert dispatch._choose.__wrapped__(ask, arch, False).name == "mma_sync/mma_sync"
    assert dispatch._choose.__wrapped__(ask._replace(impl="mma_sync"), 90, False).name == "mma_sync/mma_sync"
    assert dispatch._choose.__wrapped__(ask, 90, False).name == "triton/triton"


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"head_dim": 64, "value_dim": 64}, "mma_sync/triton"), ({"kind": MASK}, "mma_sync/mma_sync")],
)
def test_who_runs_an_int8_dp_that_these_kernels_lack(changes, name, monkeypatch):
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    ask = Ask(Recipe.parse(INT8_DP), 128, 128, torch.bfloat16, torch.device("cuda"))._replace(**changes)
    assert dispatch._choose.__wrapped__(ask, 89, False).name == name


def test_without_nvrtc_the_portable_kernels_run(monkeypatch):
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "NVRTC is not found")
    ask = Ask(Recipe.named("token"), 128, 128, torch.bfloat16, torch.device("cuda"))
    assert dispatch._choose.__wrapped__(ask, 89, False).name == "triton/triton"
    with pytest.raises(NotImplementedError, match="NVRTC is not found"):
        dispatch._choose.__wrapped__(ask._replace(impl="mma_sync"), 89, False)


def test_a_cpu_is_refused():
    x = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"impl='mma_sync' needs a GPU of compute capability 8.0 or more, got cpu"):
        sage_attention(x, x, x, recipe="token", impl="mma_sync")


class Recorder:
    """Stands for a compiled kernel: arguments of its launches."""

    def __init__(self) -> None:
        self.calls = []

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append(arguments)


def kinds_of(direction: str, recipe: str) -> list[str]:
    """What a kernel's parameters are: pointer, i64 or float."""
    asked = variant(direction, 128, 89, int8_dp=Recipe.parse(recipe).dp == "int8")
    given = emulated_cuda.parameters(asked.source)
    return ["pointer" if "*" in x else x.split()[0] for x in given]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("recipe", ["token", "token(first_keys=0, smooth_v=False)", INT8_DP])
@pytest.mark.parametrize("on", [pytest.param(DEVICE, marks=on_gpu)])
def test_launches_hand_over_what_the_kernels_take(packed, recipe, on, monkeypatch):
    kernel = Recorder()
    monkeypatch.setattr(launch, "kernel_of", lambda source, arch: kernel)
    lengths = {"lengths_q": [30, 50], "lengths_k": [30, 50]} if packed else {"tokens_q": 70, "tokens_k": 80}
    case = AttentionCase(recipe=recipe, heads=2, kv_heads=1, head_dim=128, device=on, with_dlse=True, **lengths)
    q, k, v, do, dlse = case.inputs()
    call = case.call(q, k)
    saved = launch.forward(call, q, k, v)
    gradients = launch.backward(call, saved._replace(o=torch.zeros_like(do)), do, dlse, None, None, v)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    for direction, arguments in zip((QUANTIZE, FORWARD, ROW_VALUES, BACKWARD, FINISH), kernel.calls, strict=True):
        kinds = [
            "pointer" if x is None or isinstance(x, torch.Tensor) else {int: "i64", float: "float"}[type(x)]
            for x in arguments
        ]
        assert kinds == kinds_of(direction, recipe)


@pytest.mark.parametrize("recipe", ["token", INT8_DP])
@pytest.mark.parametrize("changes", [{"scale": -0.1}, {"deterministic": True}], ids=str)
def test_what_the_portable_kernels_run(changes, recipe, monkeypatch):
    """A negative scale both ways, gradients in a fixed order."""
    asked = []
    for name in ("forward", "backward"):
        monkeypatch.setattr(launch.portable, name, lambda *_, name=name: asked.append(name))
    call = call_of(64, 128, recipe)._replace(**changes)
    launch.backward(call, *[None] * 6)
    if "scale" in changes:
        launch.forward(call, None, None, None)
    assert asked == ["backward", "forward"][: len(asked)]
    assert asked


CALLS = {
    "full": AttentionCase(tokens_q=256, tokens_k=384, head_dim=128),
    "causal-grouped": AttentionCase(tokens_q=333, tokens_k=333, heads=4, kv_heads=2, head_dim=128, is_causal=True),
    "window": AttentionCase(tokens_q=500, tokens_k=450, head_dim=128, window=(70, 20)),
    "packed": AttentionCase(lengths_q=[100, 0, 257, 3], lengths_k=[90, 4, 300, 3], head_dim=128, with_dlse=True),
    "packed-causal": AttentionCase(lengths_q=[130, 64, 1], lengths_k=[130, 64, 1], head_dim=128, is_causal=True),
    "padding": AttentionCase(batch=3, tokens_q=200, tokens_k=260, head_dim=128, masked=True, padding=True),
    "holes": AttentionCase(batch=2, tokens_q=200, tokens_k=260, head_dim=128, masked=True),
    "sink": AttentionCase(tokens_q=300, tokens_k=300, head_dim=128, sink=12),
    "narrow": AttentionCase(tokens_q=150, tokens_k=150, head_dim=80, value_dim=72, is_causal=True),
    "fp16": AttentionCase(tokens_q=150, tokens_k=170, head_dim=128, dtype=torch.float16, is_causal=True),
    "64": AttentionCase(tokens_q=333, tokens_k=300, head_dim=64, heads=4, kv_heads=2),
    "64-causal": AttentionCase(tokens_q=333, tokens_k=333, head_dim=64, is_causal=True, dtype=torch.float16),
    "mask": AttentionCase(tokens_q=140, tokens_k=140, head_dim=128, mask="document"),
    "deterministic": AttentionCase(tokens_q=200, tokens_k=200, head_dim=128, deterministic=True),
    "no-first": AttentionCase(recipe="token(first_keys=0)", tokens_q=140, tokens_k=140, head_dim=128),
    "one-token": AttentionCase(tokens_q=1, tokens_k=1, head_dim=128),
}


# 16 keys apart: a causal query sees some of them, a mask leaves fewer, or hides the first.
FIRST_16 = {
    "16-full": AttentionCase(tokens_q=70, tokens_k=140, heads=1, head_dim=128, sink=12, place=5),
    "16-causal-grouped": AttentionCase(tokens_q=150, tokens_k=150, head_dim=128, is_causal=True, sink=12, place=5),
    "16-window": AttentionCase(tokens_q=200, tokens_k=180, heads=1, head_dim=128, window=(70, 20)),
    "16-holes": AttentionCase(
        batch=2, tokens_q=70, tokens_k=140, heads=1, head_dim=128, masked=True, sink=12, place=5
    ),
    "16-few": AttentionCase(batch=2, tokens_q=40, tokens_k=140, heads=1, head_dim=128, masked=True, every=11),
    "16-packed": AttentionCase(lengths_q=[30, 0, 70, 3], lengths_k=[20, 4, 140, 3], head_dim=128, with_dlse=True),
    "16-packed-without-keys": AttentionCase(lengths_q=[30, 5, 2], lengths_k=[20, 9, 0], heads=1, head_dim=128),
    "16-packed-causal": AttentionCase(lengths_q=[130, 9], lengths_k=[130, 9], head_dim=128, is_causal=True),
    "16-64": AttentionCase(tokens_q=150, tokens_k=140, head_dim=64, is_causal=True, dtype=torch.float16),
    "16-narrow": AttentionCase(tokens_q=70, tokens_k=70, heads=1, head_dim=80, value_dim=72, is_causal=True),
}
for _case in FIRST_16.values():
    _case.recipe = "token(first_keys=16)"
CALLS |= FIRST_16

# Of a CPU, whose threads of CUDA are fibers: a second or two each.
SMALL = {
    "full": AttentionCase(tokens_q=70, tokens_k=140, heads=1, head_dim=128),
    "causal-grouped": AttentionCase(tokens_q=150, tokens_k=150, head_dim=128, is_causal=True),
    "window": AttentionCase(tokens_q=200, tokens_k=180, heads=1, head_dim=128, window=(70, 20)),
    "window-beyond-keys": AttentionCase(tokens_q=200, tokens_k=40, heads=1, head_dim=128, window=(10, 0)),
    "window-without-end": AttentionCase(tokens_q=130, tokens_k=140, heads=1, head_dim=128, window=(2**31 - 1, 5)),
    "packed": AttentionCase(lengths_q=[30, 0, 70, 3], lengths_k=[20, 4, 140, 3], head_dim=128, with_dlse=True),
    "packed-causal": AttentionCase(lengths_q=[130, 1], lengths_k=[130, 1], head_dim=128, is_causal=True),
    "holes": AttentionCase(batch=2, tokens_q=70, tokens_k=140, heads=1, head_dim=128, masked=True),
    "sink": AttentionCase(tokens_q=130, tokens_k=130, heads=1, head_dim=128, sink=12),
    "narrow-fp16": AttentionCase(tokens_q=70, tokens_k=70, heads=1, head_dim=80, value_dim=72, dtype=torch.float16),
    "64": AttentionCase(tokens_q=150, tokens_k=140, head_dim=64, is_causal=True),
    "one-token": AttentionCase(tokens_q=1, tokens_k=1, head_dim=128),
    "no-first": AttentionCase(recipe="token(first_keys=0)", tokens_q=70, tokens_k=140, heads=1, head_dim=128),
    "as-it-is": AttentionCase(recipe="token(rotate=False)", tokens_q=20, tokens_k=20, heads=1, head_dim=128),
    **FIRST_16,
}


@pytest.fixture(params=[89, pytest.param(90, marks=pytest.mark.slow)], ids=["K in registers", "K in shared memory"])
def emulated(request, monkeypatch):
    """Kernels of a compute capability on a CPU, by source."""
    if emulated_cuda.COMPILER is None:
        pytest.skip("no C++ compiler")
    made = {}
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    monkeypatch.setattr(launch, "capability", lambda device: request.param)
    monkeypatch.setattr(
        launch, "kernel_of", lambda source, arch: made.setdefault(source, emulated_cuda.EmulatedKernel(source))
    )
    PLANS.clear()
    yield made
    PLANS.clear()  # programs that have these kernels
    assert made
    assert all(kernel.launches for kernel in made.values())


on_cpu = pytest.mark.skipif(HAS_GPU, reason="where there is a GPU Triton's passes write its memory")


@on_cpu
@pytest.mark.parametrize("name", SMALL)
def test_on_a_cpu_the_kernels_are_the_recipe(name, emulated):
    SMALL[name].check("mma_sync")


@on_cpu
@pytest.mark.parametrize("emulated", [pytest.param(80, id="three stages")], indirect=True)
def test_on_a_cpu_three_stages_are_the_recipe(emulated):
    """Six blocks of keys, so that each stage is written twice; at 64, where other cards have two stages."""
    case = AttentionCase(recipe="token(first_keys=16)", tokens_q=70, tokens_k=650, heads=1, head_dim=64)
    case.check("mma_sync")
    (asked,) = (dict(x.macros) for x in emulated if x.name == FORWARD)
    assert asked["STAGES"] == 3


# With an INT8 dP: others, which differ from these in 16-bit dP's way alone, are slow.
OF_INT8_DP = ("full", "causal-grouped", "packed", "holes", "narrow-fp16", "one-token")


@on_cpu
@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if x in OF_INT8_DP else pytest.mark.slow) for x in SMALL if SMALL[x].head_dim > 64],
)
def test_on_a_cpu_an_int8_dp_is_the_recipe(name, emulated):
    dataclasses.replace(SMALL[name], recipe=INT8_DP).check("mma_sync")


@on_cpu
@pytest.mark.parametrize("recipe", ["token", INT8_DP])
def test_a_block_of_gradients_that_is_zero_leaves_others_their_bits(recipe, emulated):
    """Its scale is 1, a thousand times that of the others."""
    case = AttentionCase(recipe=recipe, tokens_q=256, tokens_k=128, heads=1, head_dim=128)
    q, k, v, do, _ = case.inputs()
    do = 1e-3 * do
    do[:, :, 64:128] = 0
    found, expected = (case.run(impl, (q, k, v, do, None)) for impl in ("mma_sync", "reference"))
    for name in ("dq", "dk", "dv"):
        assert relative_l2(found[name], expected[name]) < 0.01


@on_cpu
@pytest.mark.parametrize("recipe", ["token", INT8_DP])
def test_gradients_of_outputs_of_queries_that_see_nothing_set_no_scale(recipe, emulated):
    """Those from 50 on, of the block of 64 that the others are in."""
    case = AttentionCase(recipe=recipe, tokens_q=64, tokens_k=40, heads=1, head_dim=128, window=(10, 0))
    q, k, v, do, _ = case.inputs()
    louder = do.clone()
    louder[:, :, 50:] *= 1000
    found, expected = (case.run("mma_sync", (q, k, v, x, None)) for x in (louder, do))
    for name in ("dq", "dk", "dv"):
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("on", [pytest.param("cuda", marks=gpu)])
def test_the_kernels_are_the_recipe(name, on):
    call = CALLS[name]
    call.device = on
    call.check("mma_sync")


@pytest.mark.parametrize("name", [x for x in CALLS if x != "one-token"])
@pytest.mark.parametrize("on", [pytest.param("cuda", marks=gpu)])
def test_an_int8_dp_is_the_recipe(name, on):
    call = CALLS[name]
    recipe = call.recipe.replace("token(", "token(dp=int8, ") if "(" in call.recipe else INT8_DP
    dataclasses.replace(call, recipe=recipe, device=on).check("mma_sync")


@pytest.mark.parametrize("on", [pytest.param("cuda", marks=gpu)])
def test_of_one_token_an_int8_dp_leaves_rounding(on):
    """P is 1, so dQ and dK are 0: delta is the row's dP, of which sums in another order differ in their last bits."""
    case = dataclasses.replace(CALLS["one-token"], recipe=INT8_DP, device=on)
    inputs = case.inputs()
    found = case.run("mma_sync", inputs)
    assert max(found[x].abs().max().item() for x in ("dq", "dk")) < 1e-5
    case.check_outputs(inputs, found, ("o", "lse", "dv"))


@pytest.mark.parametrize("on", [pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("recipe", ["token", INT8_DP])
@pytest.mark.parametrize("which", range(3))
def test_nan_goes_out(which, recipe, on):
    """Of a query from its row, of k or v, whose mean is taken off, from all of its head; from no other head."""
    inputs = [torch.randn(1, 2, 200, 128, device=on, dtype=torch.bfloat16) for _ in range(3)]
    inputs[which][0, 0, 150, 3] = torch.nan
    leaves = [x.requires_grad_() for x in inputs]
    o = sage_attention(*leaves, is_causal=True, recipe=recipe, impl="mma_sync")
    o.float().sum().backward()
    lost = o.isnan().any(-1)
    assert lost[0, 0, 150].item()
    assert not lost[0, 1].any()
    assert lost[0, 0, :150].all() == (which > 0)
    assert lost[0, 0, :150].any() == (which > 0)
    assert leaves[0].grad[0, 0, 150].isnan().any()
    assert leaves[0].grad[0, 1].isfinite().all()


@pytest.mark.parametrize("on", [pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("recipe", ["token", INT8_DP])
def test_strides_of_a_projection_and_odd_addresses(recipe, on):
    case = AttentionCase(recipe=recipe, tokens_q=130, tokens_k=130, head_dim=128, device=on)
    case.check_addresses("mma_sync", ("q", "k", "v", "do"))


@needs_nvrtc
@pytest.mark.parametrize("on", [pytest.param("cuda", marks=gpu)])
def test_loops_hold_their_registers(on):
    """Local memory of a thread: a few words beside a loop, and not the tiles."""
    from sagebwd.kernels.runtime.device import libcuda

    device = torch.device(on, torch.cuda.current_device())
    capability = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    for direction, head_dim, int8_dp in VARIANTS:
        kernel = nvrtc.kernel_of(variant(direction, head_dim, capability, int8_dp=int8_dp).source, capability)
        local = ctypes.c_int()
        function = kernel.function(device)
        assert libcuda().cuFuncGetAttribute(ctypes.byref(local), ctypes.c_int(LOCAL_BYTES), function) == 0
        assert local.value <= 256
