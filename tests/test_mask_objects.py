"""Masks that were read, as objects: cut along the batch by pytree code, copied, kept in files, moved, handed on."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from sagebwd import read_block_mask, read_mask, sage_attention
from sagebwd.masks.mask import Mask
from tests.attention_case import outcome
from tests.lab.training.runs import begin, finish

BATCH, TOKENS = 4, 160
# Of batch elements 0 and 1 no query sees the last keys: which keys count differs.
HIDDEN = (torch.arange(BATCH) < 2)[:, None, None, None] & (torch.arange(TOKENS) >= 100)
SHOWN = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() & ~HIDDEN
SHARED = SHOWN[2:3]


def of_blocks(shown: Tensor) -> Mask:
    batch = None if shown.shape[0] == 1 else shown.shape[0]
    return read_block_mask(
        create_block_mask(lambda b, h, q, k: shown[b, 0, q, k], batch, None, TOKENS, TOKENS, device="cpu")
    )


READERS = {
    "elements": read_mask, "bias": lambda shown: read_mask(torch.where(shown, 0.0, -torch.inf)), "blocks": of_blocks,
}  # fmt: skip


def inputs(batch: int = BATCH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(batch)
    return [torch.randn(batch, 2, TOKENS, 16, generator=generator) for _ in range(4)]


def assert_shows(shown: Tensor, mask: Mask, batch: int = BATCH, rows: slice = slice(None)) -> None:
    """That a call of some batch elements gives what torch's own attention gives under what is shown."""
    given = [x[rows] for x in inputs(batch)]
    expected = outcome(F.scaled_dot_product_attention, given[:3], given[3], attn_mask=shown)
    found = outcome(sage_attention, given[:3], given[3], block_mask=mask, recipe="full")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def by_tree_map(mask: Mask) -> list[Mask]:
    def part(rows: slice) -> Mask:
        return tree_map(lambda x: x[rows] if isinstance(x, Tensor) and len(x) == BATCH else x, mask)

    return [part(slice(0, 2)), part(slice(2, 4))]


def by_pipelining(mask: Mask) -> list[Mask]:
    microbatch = pytest.importorskip("torch.distributed.pipelining.microbatch")
    _, parts = microbatch.split_args_kwargs_into_chunks((torch.zeros(BATCH, 1),), {"block_mask": mask}, 2)
    return [part["block_mask"] for part in parts]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("cut", [by_tree_map, by_pipelining, lambda mask: [mask[:2], mask[2:]]])
@pytest.mark.parametrize("is_used", [False, True])
def test_a_mask_that_is_cut_along_its_batch(cut, reader, is_used):
    """Regression: each part was read by what kernels had made of the first, and tiles were cut like a batch."""
    mask = READERS[reader](SHOWN)
    if is_used:
        assert_shows(SHOWN, mask)
    for number, part in enumerate(cut(mask)):
        rows = slice(2 * number, 2 * number + 2)
        assert_shows(SHOWN[rows], part, rows=rows)
    assert_shows(SHOWN, mask)


@pytest.mark.parametrize("reader", READERS)
def test_a_mask_of_the_whole_batch_is_each_parts_own(reader):
    mask = READERS[reader](SHARED)
    assert all(part is mask for part in by_pipelining(mask))
    assert mask[1:3] is mask
    leaves, tree = tree_flatten(mask)
    assert tree_unflatten(leaves, tree) is mask


@pytest.mark.parametrize("reader", READERS)
def test_what_is_put_in_the_place_of_tensors_is_refused(reader):
    for shown in (SHOWN, SHARED):
        with pytest.raises(TypeError, match="block_mask: pytree code put"):
            assert_shows(shown, tree_map(lambda _: None, READERS[reader](shown)))


def test_parts_of_several_lengths_are_refused():
    mask = READERS["elements"](SHOWN)
    lengths = iter((2, 4, 4))
    with pytest.raises(ValueError, match="batches 2, 4 and 4; cut all of them alike"):
        assert_shows(SHOWN[:2], tree_map(lambda x: x[: next(lengths)], mask), rows=slice(0, 2))


@pytest.mark.parametrize("rows", [0, slice(0, 4, 2), (slice(0, 2),)], ids=str)
def test_a_slice_of_the_batch_is_a_slice(rows):
    with pytest.raises(TypeError, match=r"expected a slice of the batch, as block_mask\[2:4\]"):
        READERS["elements"](SHOWN)[rows]


def test_what_cannot_be_read_is_refused():
    with pytest.raises(TypeError, match="block_mask: expected a BlockMask, got Tensor"):
        read_block_mask(SHOWN)
    for shape in ((5,), (1, 1, 1, 5, 5)):
        with pytest.raises(ValueError, match=f"has {len(shape)} dimensions; accepted: 2 to 4"):
            read_mask(torch.ones(shape))


@pytest.mark.parametrize("tokens", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_a_mask_of_no_tokens(tokens):
    """Regression: torch's "cannot reshape tensor of 0 elements", in a trace too."""
    q, k = (torch.randn(2, 2, count, 16, requires_grad=True) for count in tokens)
    elements = torch.ones(2, 1, *tokens, dtype=torch.bool)
    o = sage_attention(q, k, k, block_mask=READERS["elements"](elements), recipe="token")
    torch.ops.sagebwd.mask_blocks(elements)
    o.sum().backward()
    assert not any(x.any() for x in (o, q.grad, k.grad))


@pytest.mark.parametrize("reader", READERS)
def test_a_mask_that_is_cast_is_refused(reader):
    """Regression: 1.0 off as bool, else torch's error of a condition; also where a call like it has been planned."""
    mask = READERS[reader](SHOWN)
    assert_shows(SHOWN, mask)
    with pytest.raises(TypeError, match="a mask has no dtype"):
        mask.to(torch.float32)
    for cast in (Tensor.float, Tensor.bool):
        with pytest.raises(TypeError, match=r"block_mask: its [a-z]+ were cast"):
            assert_shows(SHOWN, tree_map(cast, mask))


def test_a_mask_as_an_input_of_a_program_is_refused():
    """Regression: a flatten_with_keys_fn that torch did not find."""
    given = *inputs()[:3], READERS["blocks"](SHOWN)
    with pytest.raises(NotImplementedError, match="hold it in the module"):
        torch.export.export(AttentionOf(), given, strict=False)


class AttentionOf(nn.Module):
    """Attention under a mask that it is given."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return sage_attention(q, k, v, block_mask=mask)


class Layer(nn.Module):
    """A module that holds a mask."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask


def saved(mask: Mask) -> Mask:
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    return torch.load(file)  # by its default, which makes known objects alone


COPIES = {
    "deepcopy": copy.deepcopy, "of a module": lambda mask: copy.deepcopy(Layer(mask)).mask, "torch.save": saved,
    "pickle": lambda mask: pickle.loads(pickle.dumps(mask)), "to": lambda mask: mask.to("cpu", non_blocking=True),
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("way", COPIES)
def test_a_mask_that_is_copied(way, reader):
    """Regression: cannot pickle a stream."""
    for shown in (SHOWN, SHARED):
        mask = READERS[reader](shown)
        assert_shows(shown, mask)
        copied = COPIES[way](mask)
        assert copied is not mask
        assert_shows(shown, copied)


def test_a_move_is_waited_for_unless_told():
    """What comes back from a GPU would else be read before it is there."""
    moves = []

    class Moves(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, given=(), options=None):
            if function is torch.ops.aten._to_copy.default:
                moves.append(options.get("non_blocking", False))
            return function(*given, **(options or {}))

    mask = of_blocks(SHOWN)
    with Moves():
        mask.to("meta")
        mask.to("meta", non_blocking=True)
    assert moves == [False] * 4 + [True] * 4


@pytest.mark.parametrize("tokens", [129, 159, 161, 400])
def test_a_mask_of_other_queries_is_refused(tokens):
    """Regression: rows of zeros, or blocks read out of bounds."""
    mask = of_blocks(SHARED)
    _, k, v, _ = inputs(1)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"160 queries and 160 keys does not fit .* {tokens} queries"):
            sage_attention(torch.zeros(1, 2, tokens, 16), k, v, block_mask=mask, recipe="full")


class Stage(nn.Module):
    """A layer of a pipeline, whose calls share a mask."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)
        generator = torch.Generator().manual_seed(number)
        for x in self.parameters():
            nn.init.normal_(x, std=0.2, generator=generator)

    def forward(self, x: Tensor, block_mask: Mask) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        out = sage_attention(q, k, v, block_mask=block_mask, recipe="full")
        return x + out.transpose(1, 2).reshape(x.shape)


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def pipelined(reader: str) -> None:
    """Each process has a stage; the last holds the losses to those of one process."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x, target = torch.randn(2, BATCH, TOKENS, 32, generator=torch.Generator().manual_seed(0))
    for shown in (SHOWN, SHARED):
        stage = PipelineStage(Stage(rank), rank, 2, torch.device("cpu"))
        schedule, losses = ScheduleGPipe(stage, 2, loss_fn=loss_of), []
        mask = READERS[reader](shown)
        if rank == 0:
            schedule.step(x, block_mask=mask)
        else:
            schedule.step(block_mask=mask, target=target, losses=losses)
            expected = [
                loss_of(Stage(1)(Stage(0)(part, of_part), of_part), of_target)
                for part, of_target, of_part in zip(x.chunk(2), target.chunk(2), (mask[:2], mask[2:]))
            ]
            torch.testing.assert_close(torch.stack(losses), torch.stack(expected))
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not in this build")
def test_a_pipeline_of_two_processes():
    finish(begin(2, "cpu", pipelined, "blocks"))
