"""Masks by name: their lists beside create_block_mask's, what they show beside loops, and under attention."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from sagebwd import block_masks, read_block_mask, sage_attention
from sagebwd.block_masks import (
    causal_frames,
    diffusion_forcing,
    from_key_ranges,
    image_blocks,
    prefix_documents,
    sliding_frames,
    teacher_forcing,
)
from sagebwd.reference.metrics import relative_l2
from tests.gpus import HAS_GPU

CPU = {"device": "cpu"}
IMAGES = torch.zeros(397, dtype=torch.int64)
IMAGES[40:190], IMAGES[190:200], IMAGES[250:260], IMAGES[390:] = 1, 2, 1, 1


def chunk_of(frame, chunk, first_alone):
    return (frame + chunk - 1) // chunk if first_alone else frame // chunk


def frames_by_hand(frames, window=(-1, 0), sink=0, chunk=1, first_alone=False):
    """Which frames a frame sees, by loops over both."""
    of = [chunk_of(frame, chunk, first_alone) for frame in range(frames)]
    shown = torch.zeros(frames, frames, dtype=torch.bool)
    for q in range(frames):
        last = max(frame for frame in range(frames) if of[frame] == of[q])
        for k in range(frames):
            left, right = (n if n >= 0 else frames for n in window)
            behind = k - last
            shown[q, k] = -left <= behind <= right or (k < sink and behind <= right)
    return shown


def in_tokens(shown, tokens):
    return shown.repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)


def teacher_forcing_by_hand(frames, chunk=1, first_alone=False):
    shown = torch.zeros(2 * frames, 2 * frames, dtype=torch.bool)
    for q in range(2 * frames):
        for k in range(2 * frames):
            (q_noisy, q_frame), (k_noisy, k_frame) = divmod(q, frames), divmod(k, frames)
            q_chunk, k_chunk = (chunk_of(frame, chunk, first_alone) for frame in (q_frame, k_frame))
            if q_noisy:
                shown[q, k] = k_chunk == q_chunk if k_noisy else k_chunk < q_chunk
            else:
                shown[q, k] = not k_noisy and k_chunk <= q_chunk
    return shown


def documents_by_hand(lengths, prefixes):
    rows = []
    for length, prefix in zip(lengths, prefixes):
        row = torch.ones(length, length, dtype=torch.bool).tril()
        row[:, :prefix] = True
        rows.append(row)
    return torch.block_diag(*rows).bool()


def images_by_hand(images, window=None):
    tokens, values = len(images), images.tolist()
    shown = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if window is not None:
        shown &= ~shown.tril(-window)
    start = 0
    for token in range(1, tokens + 1):
        if token == tokens or values[token] != values[start]:
            if values[start]:
                shown[start:token, start:token] = True
            start = token
    return shown


BATCH = [[100, 157, 43], [300]], [[30, 0, 43], [129]]
CASES = {
    "causal": (lambda: causal_frames(5, 77, **CPU), lambda: in_tokens(frames_by_hand(5), 77)),
    "causal-even": (lambda: causal_frames(4, 64, **CPU), lambda: in_tokens(frames_by_hand(4), 64)),
    "causal-of-one": (lambda: causal_frames(1, 200, **CPU), lambda: in_tokens(frames_by_hand(1), 200)),
    "causal-by-token": (lambda: causal_frames(300, 1, **CPU), lambda: torch.ones(300, 300).tril().bool()),
    "causal-chunks": (lambda: causal_frames(7, 61, chunk=3, **CPU), lambda: in_tokens(frames_by_hand(7, chunk=3), 61)),
    "causal-first-alone": (
        lambda: causal_frames(9, 50, chunk=4, first_alone=True, **CPU),
        lambda: in_tokens(frames_by_hand(9, chunk=4, first_alone=True), 50),
    ),
    "diffusion-forcing": (
        lambda: diffusion_forcing(7, 61, chunk=3, **CPU), lambda: in_tokens(frames_by_hand(7, chunk=3), 61),
    ),
    "sliding": (lambda: sliding_frames(9, 45, (2, 0), **CPU), lambda: in_tokens(frames_by_hand(9, (2, 0)), 45)),
    "sliding-both-ways": (
        lambda: sliding_frames(9, 45, (2, 1), **CPU), lambda: in_tokens(frames_by_hand(9, (2, 1)), 45),
    ),
    "sliding-sink-chunks": (
        lambda: sliding_frames(11, 45, (3, 0), sink=2, chunk=3, **CPU),
        lambda: in_tokens(frames_by_hand(11, (3, 0), 2, 3), 45),
    ),
    "sliding-to-the-end": (
        lambda: sliding_frames(6, 45, (0, -1), sink=1, **CPU), lambda: in_tokens(frames_by_hand(6, (0, -1), 1), 45),
    ),
    "teacher-forcing": (lambda: teacher_forcing(4, 83, **CPU), lambda: in_tokens(teacher_forcing_by_hand(4), 83)),
    "teacher-forcing-chunks": (
        lambda: teacher_forcing(5, 50, chunk=2, first_alone=True, **CPU),
        lambda: in_tokens(teacher_forcing_by_hand(5, 2, True), 50),
    ),
    "documents": (
        lambda: prefix_documents([130, 1, 0, 256, 60], **CPU),
        lambda: documents_by_hand([130, 1, 0, 256, 60], [0] * 5),
    ),
    "prefix-documents": (
        lambda: prefix_documents([130, 1, 256, 60], [40, 0, 256, 59], **CPU),
        lambda: documents_by_hand([130, 1, 256, 60], [40, 0, 256, 59]),
    ),
    "prefix-documents-batch": (
        lambda: prefix_documents(*BATCH, **CPU),
        lambda: torch.stack([documents_by_hand(*row) for row in zip(*BATCH)]),
    ),
    "images": (lambda: image_blocks(IMAGES), lambda: images_by_hand(IMAGES)),
    "images-window": (lambda: image_blocks(IMAGES, window=30), lambda: images_by_hand(IMAGES, 30)),
    "images-boolean-batch": (
        lambda: image_blocks(torch.stack([IMAGES > 0, IMAGES.flip(0) > 1]), window=200),
        lambda: torch.stack([images_by_hand(x, 200) for x in (IMAGES > 0, IMAGES.flip(0) > 1)]),
    ),
}  # fmt: skip
LISTS = ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks")


def check_lists(found, expected):
    """The same counts, and the same blocks in the same order; what is behind them is never read."""
    for name in LISTS:
        counts = getattr(found, name)
        for made in (counts, getattr(found, name.replace("num_blocks", "indices"))):
            assert made.dtype == torch.int32
            assert made.is_contiguous()
        assert torch.equal(counts, getattr(expected, name)), name
        places = [getattr(x, name.replace("num_blocks", "indices")) for x in (found, expected)]
        listed = torch.arange(places[0].shape[-1]) < counts[..., None]
        assert torch.equal(*(x.masked_fill(~listed, -1) for x in places)), name


def check(mask, shown):
    """A BlockMask beside what it should show, (queries, keys) or (batch, queries, keys)."""
    sizes = (None if shown.dim() == 2 else len(shown)), None, *shown.shape[-2:]
    shown = shown if shown.dim() == 3 else shown[None]
    assert mask.seq_lengths == sizes[2:]
    assert mask.BLOCK_SIZE == (128, 128)
    assert torch.equal(create_mask(mask.mask_mod, *sizes, device="cpu")[:, 0], shown)
    check_lists(mask, create_block_mask(mask.mask_mod, *sizes, device="cpu"))


@pytest.mark.parametrize("name", CASES)
def test_a_mask_is_what_its_name_says(name):
    make, by_hand = CASES[name]
    mask, shown = make(), by_hand()
    check(mask, shown)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, shown.shape[-1], 8, generator=generator) for _ in range(3))
    ours = sage_attention(q, k, v, block_mask=read_block_mask(mask), recipe="full")
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=shown.view(-1, 1, *shown.shape[-2:]))
    assert relative_l2(ours, theirs) < 1e-5


def test_ranges_in_any_order_that_overlap_touch_or_are_empty():
    generator = torch.Generator().manual_seed(0)
    for batch, count, queries, keys in ((1, 4, 150, 260), (2, 3, 260, 140), (1, 1, 1, 1), (1, 2, 128, 128)):
        starts, ends = (
            torch.randint(-20, keys + 20, (batch, count, queries), generator=generator) for _ in range(2)
        )  # fmt: skip
        starts[..., : queries // 2], ends[..., : queries // 2] = starts[..., :1], ends[..., :1]
        if count > 1:
            starts[:, 1, ::3] = ends[:, 0, ::3]  # one begins where another ends
        k = torch.arange(keys)
        shown = ((starts[..., None] <= k) & (k < ends[..., None])).any(1)
        check(from_key_ranges(starts, ends, keys), shown if batch > 1 else shown[0])


def test_sizes_of_other_kinds_of_integers():
    rows = torch.tensor(BATCH[0][0]), torch.tensor([100, 200, 0])
    expected = prefix_documents([x.tolist() for x in rows], **CPU)
    for lengths in (rows, torch.stack(rows), torch.stack(rows).numpy()):
        check_lists(prefix_documents(lengths, **CPU), expected)
    lengths = torch.tensor([70, 230])
    expected = prefix_documents([70, 230], [3, 200], **CPU)
    check_lists(prefix_documents(lengths.numpy(), torch.tensor([3, 200]).numpy(), **CPU), expected)
    check_lists(causal_frames(*torch.tensor([3, 70]).numpy(), **CPU), causal_frames(3, 70, **CPU))
    short = from_key_ranges(torch.zeros(300, dtype=torch.uint8), torch.full((300,), 200, dtype=torch.uint8), 300)
    check(short, (torch.arange(300) < 200).expand(300, 300))


def test_a_mask_keeps_what_it_was_made_of():
    starts, ends = torch.zeros(200, dtype=torch.int32), torch.arange(1, 201, dtype=torch.int32)
    mask = from_key_ranges(starts, ends, 200)
    starts.fill_(100)
    ends.fill_(100)
    check(mask, torch.ones(200, 200).tril().bool())


def test_a_compiler_takes_its_mask_mod():
    mask = teacher_forcing(3, 50, **CPU)
    q, k, v = (torch.randn(1, 2, 300, 16) for _ in range(3))
    compiled = torch.compile(flex_attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, block_mask=mask), flex_attention(q, k, v, block_mask=mask))


class Largest(TorchDispatchMode):
    """How many elements the largest tensor has that an operator makes, and operators that read a number."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "waits for the device"
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return found


def test_no_pair_is_evaluated_and_nothing_waits():
    images = torch.arange(4096) // 256 % 4 == 0
    for make in (
        lambda: causal_frames(16, 256, **CPU),
        lambda: sliding_frames(16, 256, (2, 0), sink=1, **CPU),
        lambda: teacher_forcing(8, 256, **CPU),
        lambda: prefix_documents([1000, 3096], [200, 0], **CPU),
        lambda: image_blocks(images),
    ):
        with Largest() as largest:
            make()
        assert largest.elements <= 4 * 4096


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: causal_frames(0, 5), "frames: expected an integer, at least 1, got 0"),
        (lambda: teacher_forcing(2, 1.5), "tokens: expected an integer, at least 1, got 1.5"),
        (lambda: causal_frames(2, 5, chunk=0), "chunk: expected"),
        (lambda: sliding_frames(2, 5, (-2, 0)), r"window\[0\]: expected an integer, at least -1"),
        (lambda: sliding_frames(2, 5, (1, 0), sink=-1), "sink: expected"),
        (lambda: sliding_frames(2, 5, 3), r"window: expected \(left, right\)"),
        (lambda: prefix_documents([0, 0]), "lengths, the sum: expected"),
        (lambda: prefix_documents([]), "lengths: expected integers"),
        (lambda: prefix_documents([5, 2.0]), "lengths: expected integers"),
        (lambda: prefix_documents([5, -2]), "lengths: expected an integer, at least 0"),
        (lambda: prefix_documents([5, 2], [1]), "prefixes: .* not one for each"),
        (lambda: prefix_documents([5, 2], [1, 3]), "prefixes: .* longer than their documents"),
        (lambda: prefix_documents([[5, 2], [8]]), "expected as many in each"),
        (lambda: image_blocks(torch.zeros(5)), "images: expected .* got torch.float32"),
        (lambda: image_blocks([0, 1]), "images: expected .* got list"),
        (lambda: image_blocks(IMAGES, window=0), "window: expected"),
        (lambda: from_key_ranges(IMAGES, IMAGES[:5], 5), "starts, ends: shapes"),
        (lambda: from_key_ranges(IMAGES.float(), IMAGES, 5), "starts: expected .* got torch.float32 of shape"),
        (lambda: from_key_ranges(IMAGES, [5], 5), "ends: expected .* got list"),
        (lambda: from_key_ranges(IMAGES, IMAGES, 0), "kv_tokens: expected"),
    ],
)
def test_what_is_no_mask_is_refused_by_name(make, told):
    with pytest.raises((ValueError, TypeError), match=told):
        make()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_a_gpu_makes_the_same_lists_without_a_wait():
    makes = [
        lambda device: sliding_frames(9, 145, (3, 0), sink=1, chunk=2, device=device),
        lambda device: teacher_forcing(4, 283, device=device),
        lambda device: prefix_documents(*BATCH, device=device),
        lambda device: image_blocks(images[device], window=30),
    ]
    images = {device: IMAGES.to(device) for device in ("cpu", "cuda")}
    torch.use_deterministic_algorithms(True)
    try:
        torch.cuda.set_sync_debug_mode("error")
        found = [make("cuda") for make in makes]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)
    for make, mask in zip(makes, found):
        check_lists(mask.to("cpu"), make("cpu"))


def test_every_public_function_is_tried():
    public = {name for name, x in vars(block_masks).items() if callable(x) and x.__module__ == block_masks.__name__}
    assert {name for name in public if not name.startswith("_")} <= globals().keys()
