"""Products of sizes in kernels: of 64 bits, or one of those here that stay below 2^31.

Regression: `3 * planes` of sums of V wrapped from 7.16e8 numbers on, and was written in front of its memory.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sagebwd.call import Packing
from tests.kernels.cuda_products import NAME, declared, products

ROOT = Path(__file__).parents[2] / "src/sagebwd"
FOLDERS = ("kernels",)
# Arguments and variables that grow with a call.
SIZES = {
    "all_heads", "apart", "at", "batch", "batch_head", "blocks", "blocks_k", "blocks_q", "chunk", "chunks", "grid",
    "grid_q", "group", "heads", "heads_at_once", "heads_in_all", "heads_k", "last_heads", "of_head", "owner", "parts",
    "pitch", "planes", "program", "programs", "sequences", "share", "tiles_k", "tokens", "tokens_k", "tokens_q",
    "total", "total_k", "total_q",
}  # fmt: skip
# Of 64 bits wherever they are made: a head among per-token values (`whose`, `heads_of`), and what follows from it.
WIDE = {"z", "z_q", "z_k", "planes"}
FLOATS = {"LOG2_E", "ROUNDING", "float8_scale"}
POSITION = "tokens of one head, or a place among them"
COUNT = "heads over the batch, chunks or programs of one launch: each has more than a number of memory"
ONE_HEAD = "numbers of one head, of which `Packing.padded` allows fewer than 2^31"
FIRST_CHUNKS = "numbers of a sequence's chunks, a 256th of K's"
ROW = "a row of a matrix for TMA, whose coordinates have 32 bits; a row has 64 channels or more"
LISTED = "lists of a mask, tiles of one head, or programs of them, fewer than memory has numbers"
WIDENED = "of 64 bits: batch, head and of_head are cast where they are found"
OF_TILE = "rows of one tile, times keys of a mask"
FLOAT = "a float"
NARROW = {
    "queries * pitch": OF_TILE,
    "lane * chunk": OF_TILE,
    "(self.N - keys_left) * chunks": OF_TILE,
    "lane * (chunk // 4)": OF_TILE,
    "lane * (2 * self.share.chunk)": OF_TILE,
    "2.0 * parts[r]": FLOAT,
    "taken_off(q, k_mean, batch, head, heads, group, start + first, local, left, head_dim, BLOCK_D) * scale": FLOAT,
    "batch * (grid.heads // grid.group)": COUNT,
    "blocks_q * heads * batch": COUNT,
    "part * chunk": POSITION,
    "BLOCK * parts": POSITION,
    "blocks * BLOCK": POSITION,
    "sizes.blocks_q * BLOCK_Q": POSITION,
    "program // groups % blocks * BLOCK": POSITION,
    "chunk * CHUNK": POSITION,
    "(padded_block(start, batch, BLOCK, VARLEN) + number) * BLOCK": POSITION,
    "key_block(tile_index, number, programs, IN_ORDER) * (CONSUMERS * ROWS)": POSITION,
    "key_block(tile_index, number, programs, IN_ORDER and (not VARLEN)) * (CONSUMERS * ROWS)": POSITION,
    "tl.program_id(1) * BLOCK_D * blocks * BLOCK": ONE_HEAD,
    "program % groups * HEADS": COUNT,
    "part * all_heads": COUNT,
    "block * all_heads": COUNT,
    "chunks * group": COUNT,
    "groups * blocks": COUNT,
    "blocks_q * STEPS": COUNT,
    "head_k * group": COUNT,
    "(first_chunk + number // group) * all_heads": COUNT,
    "(first_chunk + chunk) * all_heads": COUNT,
    "(head if VARLEN else batch_head) * group": COUNT,
    "batch * heads": COUNT,
    "batch * heads_k": COUNT,
    "batch * (heads // dp.group)": COUNT,
    "work_tile.batch * (heads // group)": COUNT,
    "work_tile.batch * sizes.heads_k": COUNT,
    "work_tile.batch * sizes.heads_k * sizes.group": COUNT,
    "work_tile.head * group": COUNT,
    "work_tile.head * sizes.group": COUNT,
    "(end - begin) * heads": COUNT,
    "program // (sizes.programs * sizes.heads_at_once) * sizes.heads_at_once": COUNT,
    "first * sizes.programs": COUNT,
    "tile_index * programs": COUNT,
    "program * SPLIT_FIELDS": COUNT,
    "batch * FIRST": COUNT,
    "batch * first_keys.COUNT": COUNT,
    "(row // BLOCK_D * blocks_q + block_0 + block) * CONSUMERS": COUNT,
    "all_heads * head_dim": FIRST_CHUNKS,
    "heads * head_dim": FIRST_CHUNKS,
    "rows[:, None] * apart": FIRST_CHUNKS,
    "columns[:, None] * pitch": ONE_HEAD,
    "columns[None, :] * pitch": ONE_HEAD,
    "rows[:, None] * pitch": "a block of tokens, 2^24 numbers apart at most",
    "at * 4": "of 64 bits: after a head's z",
    "batch * sparse.batch": "of a mask's lists, which are of 128 tokens and more an entry",
    "work_tile.batch * tokens": ROW,
    "work_tile.head * tokens": ROW,
    "of_batch * sizes.heads_k": ROW,
    "work_tile.batch * q_b": ROW,
    "work_tile.batch * do_b": ROW,
    "work_tile.batch * of_batch": ROW,
    "work_tile.head * of_head": ROW,
    "to_row * c.pitch": ROW,
    "(to_row * c.sizes.blocks_q + c.block_0 + to_block) * WIDTH.backward.queries": ROW,
    "(first + within % heads) * grid.blocks_q": COUNT,
    "grid.heads_at_once * grid.blocks_q": COUNT,
    "after * grid.heads": COUNT,
    "begin * sizes.heads_in_all": COUNT,
    "first * blocks": COUNT,
    "first * programs": COUNT,
    "grid.heads * blocks": COUNT,
    "heads * programs": COUNT,
    "number // (programs * at_once) * at_once": COUNT,
    "within // (blocks * at_once) * at_once": COUNT,
    "number // together * grid.heads_at_once": COUNT,
    "number % chunks * TOKENS": POSITION,
    "number % tiles_k * TILE": POSITION,
    "number // tiles_k % tiles_q * TILE": POSITION,
    "tokens_k * UNIT": POSITION,
    "last_heads * columns": LISTED,
    "past % last_heads * columns": LISTED,
    "group * rows": LISTED,
    "of_list * group * step": LISTED,
    "chunk * TILES": LISTED,
    "chunks * tiles_q": LISTED,
    "row * tiles_k": LISTED,
    "tiles_q * tiles_k": LISTED,
    "at * stride": LISTED,
    "of_head // heads * copies": LISTED,
    "batch * count_batch": WIDENED,
    "batch * full_batch": WIDENED,
    "batch * full_count_batch": WIDENED,
    "batch * index_batch": WIDENED,
    "batch * stride_batch": WIDENED,
    "batch * stride_keys": WIDENED,
    "batch * tile_batch": WIDENED,
    "batch * tokens_k": WIDENED,
}

# The same of CUDA C++, where these are ints: a place of a block or head, and what follows from it.
CUDA_SIZES = SIZES | {
    "batch_heads", "begin", "block", "dq_block", "first", "first_k", "first_q", "groups", "head", "head_k", "key",
    "number", "of_head", "padded", "padded_k", "padded_q", "place", "row", "row0", "start", "step_block", "step_head",
    "token",
}  # fmt: skip
SHARED = "shared memory, or a place in one tile"
NARROW_OF_CUDA = {
    "( ( head - first ) * D + 32 * j + 8 * lane . t ) * 4": SHARED,
    "( 32 * chunks [ m ] + 8 * t ) * TABLE_BYTES": SHARED,
    "32 * chunks [ m ]": SHARED,
    "( c * CHUNKS + chunk ) * 4": SHARED,
    "( c * CHUNKS + chunk ) * 8": SHARED,
    "( chunk * 8 + c ) * KEYS": SHARED,
    "chunk * 8": SHARED,
    "chunk * 16": SHARED,
    "at * 16": SHARED,
    "row * BYTES": SHARED,
    "token * ROW": SHARED,
    "( head - begin ) / 2 % STAGES * STAGE": SHARED,
    "( head - first & 1 ) * FOUND": SHARED,
    "( head - first ) * 4": SHARED,
    "( head - first ) * D": SHARED,
    "( last - first ) * D": SHARED,
    "( row % KEYS >> 1 ) * 4": SHARED,
    "block * KEYS": POSITION,
    "begin * KEYS": POSITION,
    "number * KEYS": POSITION,
    "number * TILE": POSITION,
    "number * QUERIES": POSITION,
    "number * ( of_values ? KEYS : TILE )": POSITION,
    "number / STEP * apart": POSITION,
    "place . number * QUERIES": POSITION,
    "place . number * TOKENS": POSITION,
    "step_block * QUERIES": POSITION,
    "( padded_q + step_block ) * QUERIES": POSITION,
    "( end - begin + apart - 1 ) / apart * STEP": POSITION,
    "min ( place . number , ( keys . length + size - 1 ) / size ) * size": POSITION,
    "program / groups % blocks * SLOTS": POSITION,
    "program % groups * HEADS": COUNT,
    "batch * heads": COUNT,
    "batch * heads_k": COUNT,
    "batch * ( int ) heads": COUNT,
    "batch * ( int ) ( heads_k * group )": COUNT,
    "batch * side . heads": COUNT,
    "batch * sums . heads_k": COUNT,
    "batch * FIRST": COUNT,
    "head_k * ( int ) group": COUNT,
    "( head_k + 1 ) * ( int ) group": COUNT,
    "blocks * ( int ) group": COUNT,
    "( batch_heads + step_head ) * ( int ) blocks_q": COUNT,
    "groups * blocks": COUNT,
    "groups * grid": COUNT,
    "( row / KEYS ) * ( BLOCK / 4 )": ONE_HEAD,
    "at * D": "of 64 bits: at is a chunk there, elsewhere an int",
    "t * token": "of 64 bits: the arguments of offset_of",
}


def _products(function: ast.FunctionDef) -> Iterator[ast.BinOp]:
    """The largest products of a function."""
    inner = set()
    for node in ast.walk(function):  # breadth first
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            if node not in inner:
                yield node
            inner |= {x for x in ast.walk(node) if isinstance(x, ast.BinOp)}


def _is_narrow(product: ast.BinOp) -> bool:
    """Whether a product has a size in it and nothing of 64 bits."""
    nodes = list(ast.walk(product))
    names = {x.id for x in nodes if isinstance(x, ast.Name)} | {x.attr for x in nodes if isinstance(x, ast.Attribute)}
    is_zero = any(isinstance(x, ast.Constant) and x.value == 0 for x in nodes)
    return bool(names & SIZES) and not names & (WIDE | FLOATS | {"int64", "float32"}) and not is_zero


def narrow() -> set[str]:
    found = set()
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                made = node.decorator_list if isinstance(node, ast.FunctionDef) else ()
                if any(name in ast.unparse(x) for x in made for name in ("jit", "cute.kernel")):
                    found |= {ast.unparse(x) for x in _products(node) if _is_narrow(x)}
    return found


def narrow_of_cuda() -> set[str]:
    """Products of CUDA C++ with a size in them and nothing of 64 bits: a name that is i64 alone, or a cast to it."""
    found = set()
    for path in sorted((ROOT / "kernels").rglob("*.cu*")):
        text = path.read_text(encoding="utf-8")
        wide, floats = (declared(text, kind) - declared(text, "int") for kind in ("i64", "float"))
        for product in products(text):
            kept = set(NAME.findall(re.sub(r"\( int \) (\w+|\( [^()]* \))", "", product)))
            if set(NAME.findall(product)) & CUDA_SIZES and not kept & (wide | floats | FLOATS | {"i64"}):
                found.add(product)
    return found


@pytest.mark.parametrize(("found", "said"), [(narrow, NARROW), (narrow_of_cuda, NARROW_OF_CUDA)])
def test_products_of_sizes_have_64_bits_or_are_known_to_be_small(found, said):
    assert sorted(found() - set(said)) == [], "cast a factor to 64 bits, or say why it is small"
    assert sorted(set(said) - found()) == [], "of these there is none"


def test_a_product_of_cuda_that_wraps_is_found():
    text = """
    int z = batch * heads;  // of z * all
    i64 n, total;
    if (z) *to = (i64)z * total + z * tokens[1] / D * 2;
    float* at = (float*)y + n * (i64)-z;
    """
    wanted = ["batch * heads", "( i64 ) z * total", "z * tokens [ 1 ] / D * 2", "n * ( i64 ) - z"]
    assert list(products(text)) == wanted
    assert declared(text, "i64") == {"n", "total"}
    assert declared(text, "float") == {"at"}


def test_a_head_of_too_many_numbers_is_refused():
    packing = Packing(1, 1, 1 << 24, 1 << 24, None)
    with pytest.raises(NotImplementedError, match=r"16777216 tokens of 128 channels"):
        packing.padded(64, 64 * 128, dtype=torch.int8, device=torch.device("meta"))
    packing.padded(64, 64 * 64, dtype=torch.int8, device=torch.device("meta"))
