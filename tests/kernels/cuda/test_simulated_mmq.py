"""mmq and mmq_few in the simulator: one format of each form, at blocks of one warp and of some."""
from dataclasses import astuple
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest

from cuda_simulator import SimulatedMachine, run_in_simulator
from ggml_py.kernels.call import Call, Operand, Unsupported
from ggml_py.kernels.cuda import argmax, few_product, mul_mat_glu, mul_mat_qkv
from ggml_py.kernels.cuda.launch import RESERVED
from ggml_py.kernels.cuda.mmq import BLOCKS, Block, block_shape, most_quads, shared_bytes
from ggml_py.kernels.cuda.few_product import TOGETHER
from ggml_py.kernels.cuda.few_slots import shared_words
from ggml_py.kernels.cuda.mmq_few import MAX_WARPS, FewShape, few_shape, shape_of, threads_of, work
from ggml_py.kernels.cuda.mul_mat import quantized_shape
from ggml_py.quant.formats import FORMATS
from matmul_comparisons import (activations, check_extremes, check_mmq_few_qkv, check_mul_mat, check_mul_mat_argmax,
                                check_mul_mat_glu, few as few_of, seeded)
from thread_order import hold_back, hold_back_warp

WEIGHTS = [fmt.name for fmt in FORMATS.values() if fmt.is_quantized]
KIB = 1 << 10
LIMITS = 227 * KIB, 163 * KIB, 99 * KIB  # bytes of shared memory of a block on GPUs of compute capability 9.0, 8.0 and 8.6
ONE_WARP = BLOCKS[-1]


def test_in_the_simulator():
    run_in_simulator(__file__)


# Shapes

@pytest.mark.parametrize("name", WEIGHTS)
def test_blocks_fit(name):
    """Every format has a block for any GPU; on large ones it is the first that registers hold."""
    fmt = FORMATS[name]
    blocks = [block_shape((name,), limit) for limit in LIMITS]
    assert blocks[0] == next(block for block in BLOCKS if block.quads <= most_quads(fmt))
    for block, limit in zip(blocks, LIMITS):
        assert shared_bytes((name,), block) <= limit and 32 * block.n_warps <= 256


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_few_shapes_fit(name, limit):
    """Rounds of a single token are whole turns of the warps or whole rows; places of several tokens are a power of two and more
    than the warps. A multiprocessor has registers and shared memory for the block."""
    for n_rows, n_cols, n in ((4096, 14336, 1), (4096, 14336, 8), (128256, 4096, 1), (576, 1536, 16), (32, 256, 3),
                              (33, 70000, 40)):
        shape = few_shape((name,), n_rows, n_cols, n, 132, limit)
        n_chunks, n_tiles, n_valid = -(-n_cols // 256), -(-n_rows // 32), min(n, shape.n_tokens)
        n_sides = 1 if shape.grid[0] == n_tiles and shape.n_boxes >= n_chunks else 2
        n_bytes = 4 * shared_words((name,), shape.n_tokens, shape.n_warps, shape.n_boxes, n_valid, n_sides)
        if (n_blocks := prod(shape.grid)) > 66:  # more than a share: no more blocks to a multiprocessor than to others
            n_bytes = max(n_bytes, (limit + RESERVED) // (-(-n_blocks // 132) + 1) // 16 * 16 - RESERVED + 16)
        assert shape.n_bytes == n_bytes <= limit and shape.grid[0] <= 132 and shape.grid[1] * shape.n_tokens >= n
        most = MAX_WARPS[shape.n_tokens]
        assert 1 <= shape.n_warps <= most and shape.n_threads <= threads_of(shape.n_tokens, most)
        if n == 1:
            assert shape.n_warps <= n_chunks and (shape.n_boxes == n_chunks or shape.n_boxes % shape.n_warps == 0)
        else:
            assert shape.n_boxes.bit_count() == 1 and shape.n_boxes > shape.n_warps and shape.n_boxes >= TOGETHER


@pytest.mark.parametrize("type_, n_rows, n_cols, n, expected", [
    ("Q4_K", 4096, 14336, 1, (1, 12, 56, (128, 1))), ("Q8_0", 4096, 14336, 8, (8, 7, 8, (128, 1))),
    ("Q8_0", 4096, 14336, 1, (1, 12, 56, (128, 1))), ("Q6_K", 4096, 14336, 1, (1, 12, 56, (128, 1))),
    ("Q6_K", 128256, 4096, 1, (1, 8, 16, (132, 1))),
    ("Q4_K", 128256, 4096, 1, (1, 16, 16, (132, 1))), ("Q4_1", 576, 1536, 512, (16, 6, 8, (18, 32))),
    ("Q4_K", 4096, 4096, 3, (4, 8, 16, (128, 1))), ("Q4_K", 14336, 4096, 4, (4, 11, 16, (132, 1))),
    ("Q4_K", 4096, 14336, 16, (16, 11, 16, (128, 1))), ("Q8_0", 14336, 4096, 16, (16, 8, 16, (132, 1)))])
def test_few_shape(type_, n_rows, n_cols, n, expected):
    assert astuple(few_shape((type_,), n_rows, n_cols, n, 132, LIMITS[0]))[:4] == expected


@pytest.mark.parametrize("names, n, kind", [
    (("IQ4_XS",), 8, FewShape), (("IQ4_XS",), 9, FewShape), (("IQ4_XS",), 16, FewShape), (("IQ4_XS",), 17, Block),
    (("Q4_1",), 16, FewShape), (("Q4_K",), 8, FewShape), (("Q4_K",), 9, Block), (("Q6_K",), 8, FewShape), (("Q6_K",), 9, Block),
    (("Q1_0",), 16, FewShape),
    (("IQ3_S", "IQ4_XS"), 16, FewShape), (("IQ3_S", "Q4_K"), 64, Block)])
def test_slow_formats_take_few_tokens_apart(names, n, kind):
    assert isinstance(quantized_shape(names, 4096, 14336, n, 132, LIMITS[0], warpgroups=True), kind)


def test_work():
    """56 chunks: twelve warps are three of a scheduler, which hide each other's waiting; fewer wait, more have no less to do.
    16 chunks: sixteen warps."""
    assert [work(n_warps, 1, 56) for n_warps in (1, 4, 8, 12, 14, 16)] == [168, 42, 21, 15, 16, 16]
    assert [work(n_warps, 1, 16) for n_warps in (8, 12, 16)] == [6, 6, 4]


@pytest.mark.parametrize("names, n_rows, n_cols, n, expected", [
    (("Q4_K", "Q4_K"), 14336, 4096, 1, FewShape), (("Q8_0", "Q8_0"), 14336, 4096, 512, Block(4, 2, 16)),
    (("Q8_0", "Q6_K"), 14336, 4096, 512, Block(4, 2, 8)),
    (("Q4_1", "Q4_1"), 1536, 576, 512, FewShape)])
def test_glu_shape(names, n_rows, n_cols, n, expected):
    found = quantized_shape(names, n_rows, n_cols, n, 132, LIMITS[0])
    assert found == expected or type(found) is expected


def glu_call(type_, n, act="silu", biased=False, warpgroups=True, halves=False):
    """Of gate and up of 14336 rows, on a GPU as large as an H200."""
    target = SimpleNamespace(n_multiprocessors=132, shared_limit=LIMITS[0], warpgroups=warpgroups, halves=halves)
    gate, bias = Operand(type_, (14336, 4096)), Operand("f32", (14336,)) if biased else None
    x = Operand("act" if FORMATS[type_].is_quantized else "f32", (n, 4096))
    call = Call("mul_mat_glu", "node", target, {"gate": gate, "up": gate, "x": x, "gate_bias": bias, "up_bias": bias, "act": act,
                                                "out": Operand("f32", (n, 14336))})
    mul_mat_glu.check(call)
    call.plan = mul_mat_glu.plan(call)
    return call


@pytest.mark.parametrize("options, declined", [
    ({"n": 9, "type_": "Q6_K"}, True), ({"n": 8, "type_": "Q6_K"}, False), ({"n": 16, "type_": "Q4_1"}, False), ({"n": 16}, True),
    ({"n": 8, "halves": True}, False), ({"n": 512}, True), ({"n": 512, "act": "gelu"}, False),
    ({"n": 512, "biased": True}, False), ({"n": 512, "warpgroups": False}, False), ({"n": 512, "type_": "F16"}, False)], ids=str)
def test_glu_is_declined_where_warpgroups_multiply_many_tokens(options, declined):
    assert mul_mat_glu.declines(glu_call(**{"type_": "Q4_K", **options})) == declined


@pytest.mark.parametrize("type_, expected", [("Q4_K", None), ("F16", ("f32", (5, 14336)))])
def test_scratch_of_glu(type_, expected):
    """One kernel keeps the products of both matrices; of two products one must be in memory."""
    assert mul_mat_glu.scratch(glu_call(type_, 5)) == expected


# Bits

@pytest.fixture
def machine():
    return SimulatedMachine()


FORMS = [
    ("Q8_0", 33, 288),    # groups of 32; two row tiles, two chunks
    ("Q4_0", 2, 288),     # with a zero point
    ("Q5_1", 2, 32),      # with minima
    ("NVFP4", 1, 64),     # groups of 16
    ("Q1_0", 2, 512),     # groups of 128
    ("TQ2_0", 2, 256),    # a group of 256 without integer scales
    ("Q2_K", 1, 256),     # with them for 16 columns, and minima
    ("Q3_K", 3, 256),     # and a zero point
    ("IQ2_XS", 2, 256),   # and lanes of eight columns
    ("Q6_K", 2, 256),     # and a sum a limb
    ("Q4_K", 2, 512),     # for 32 columns, and minima
    ("IQ4_XS", 2, 256),
    ("IQ1_S", 1, 256),
    ("IQ3_XXS", 2, 256)]
# Of a single token: what its product adds of each level
TERMS = [
    ("MXFP4", 2, 64),     # two and a constant
    ("NVFP4", 1, 64),     # for 16 columns
    ("IQ4_KS", 2, 256),   # and a shift, 32 bits are too few
    ("IQ4_K", 2, 256),    # for 16 columns
    ("IQ3_K", 1, 256),    # one
    ("IQ5_K", 1, 256),    # four
    ("IQ6_K", 1, 256),    # a level and a shift
    ("IQ2_KS", 2, 256),   # one, for 32 columns
    ("IQ2_KL", 2, 256),   # levels of pairs
    ("IQ2_KT", 2, 256)]   # four bytes


def one_warp(machine, name, *sizes):
    return ONE_WARP


def few(machine, name, *sizes):
    return few_of(machine, (name,), *sizes)


@pytest.mark.parametrize("name, n_rows, n_cols", FORMS)
def simulate_mmq(machine, name, n_rows, n_cols):
    check_mul_mat(machine, name, n_rows, n_cols, 9, ONE_WARP)


@pytest.mark.parametrize("name, n_rows, n, block", [
    ("Q8_0", 33, 17, Block(1, 1, 16)), ("Q4_K", 65, 33, Block(2, 1, 8)), ("Q6_K", 33, 34, Block(2, 2, 8))])
def simulate_mmq_blocks(machine, name, n_rows, n, block):
    check_mul_mat(machine, name, n_rows, 256, n, block)


@pytest.mark.parametrize("name, n_rows, n_cols", FORMS)
def simulate_mmq_few(machine, name, n_rows, n_cols):
    check_mul_mat(machine, name, n_rows, n_cols, 3, few(machine, name, n_rows, n_cols, 3))


@pytest.mark.parametrize("name, n_rows, n_cols", dict.fromkeys(FORMS + TERMS))
def simulate_one_token(machine, name, n_rows, n_cols):
    """Row tiles after another in one block, fewer warps than chunks."""
    check_mul_mat(machine, name, n_rows, n_cols, 1, shape_of((name,), n_rows, n_cols, 1, 1, 1, 1))


@pytest.mark.parametrize("name, n_rows, n_cols, n", [
    *((*case, n) for case in FORMS for n in (1, 3)), ("Q4_K", 1, 256, 8), ("Q1_0", 1, 256, 8), ("Q1_0", 1, 256, 9),
    ("NVFP4", 1, 64, 9)])
def simulate_few_on_other_architectures(machine, monkeypatch, name, n_rows, n_cols, n):
    """Where less is kept on its way."""
    monkeypatch.setattr("ggml_py.kernels.cuda.simulator.ARCHITECTURE", 1200)
    check_mul_mat(machine, name, n_rows, n_cols, n, few(machine, name, n_rows, n_cols, n))


def simulate_few_without_bulk_copies(machine, monkeypatch):
    """Before compute capability 9.0; more chunks than boxes."""
    monkeypatch.setattr("ggml_py.kernels.cuda.simulator.ARCHITECTURE", 800)
    check_mul_mat(machine, "Q8_0", 40, 1536, 3, shape_of(("Q8_0",), 40, 1536, 3, 4, 3, 1))


@pytest.mark.parametrize("name, block", [("Q8_0", Block(1, 1, 16)), ("Q4_1", Block(1, 1, 8)), ("Q1_0", Block(1, 1, 8))])
def simulate_mmq_on_other_architectures(machine, monkeypatch, name, block):
    monkeypatch.setattr("ggml_py.kernels.cuda.simulator.ARCHITECTURE", 1200)
    check_mul_mat(machine, name, 1, 256, 33, block)


@pytest.mark.parametrize("name, n_rows, n_cols, n, n_tokens, n_warps, n_boxes, grid", [
    ("Q8_0", 65, 1312, 5, 8, 2, 4, (2, 1)),      # three row tiles to two blocks, six chunks by turns in four places
    ("Q4_0", 33, 800, 17, 16, 3, 4, (2, 2)),     # two groups of tokens
    ("Q5_K", 40, 768, 9, 16, 1, 4, (1, 1)),      # one warp
    ("IQ2_XXS", 33, 1280, 1, 1, 2, 4, (1, 1)),   # codebooks
    ("Q4_K", 65, 1536, 1, 1, 3, 6, (2, 1)),      # one token, a round a row
    ("Q4_K", 161, 256, 3, 4, 4, 4, (1, 1)),      # a warp in each of four row tiles
    ("Q5_1", 33, 800, 2, 1, 2, 2, (1, 2)),       # one token a block
    ("Q6_K", 3, 768, 8, 8, 4, 4, (1, 1))])       # a warp without a chunk
def simulate_mmq_few_launch_shapes(machine, name, n_rows, n_cols, n, n_tokens, n_warps, n_boxes, grid):
    """The bits do not depend on the shape of the launch."""
    n_bytes = 4 * shared_words((name,), n_tokens, n_warps, n_boxes, min(n, n_tokens))
    check_mul_mat(machine, name, n_rows, n_cols, n, FewShape(n_tokens, n_warps, n_boxes, grid, n_bytes))


def four_tiles(machine, n_warps=3, n_boxes=4):
    """Four row tiles of eight chunks to a block of warps that multiply and one that adds."""
    n_bytes = 4 * shared_words(("Q8_0",), 8, n_warps, n_boxes, 5)
    check_mul_mat(machine, "Q8_0", 100, 2048, 5, FewShape(8, n_warps, n_boxes, (1, 1), n_bytes))


@pytest.mark.parametrize("n_warps, n_boxes, late", [
    (1, 4, 0), (1, 4, 1), *((n, 4, late) for n in (3, 4) for late in range(n + 1)), (7, 8, 7)])
def simulate_a_late_warp(machine, monkeypatch, n_warps, n_boxes, late):
    """One warp does nothing that the others need not wait for; the last one adds."""
    hold_back_warp(monkeypatch, late)
    four_tiles(machine, n_warps, n_boxes)


@pytest.mark.parametrize("lane", [0, 1, 31])
def simulate_late_lanes(machine, monkeypatch, lane):
    """Of the warp that adds, all lanes but one come late; they let boxes go in their order."""
    hold_back(monkeypatch, lambda cluster: {thread for thread in cluster.blocks[0].threads
                                            if thread.index.x // 32 == 3 and thread.index.x % 32 != lane})
    four_tiles(machine)


def simulate_boxes_that_are_not_waited_for(machine, monkeypatch):
    """Without the wait for a box, sums that are not yet added are lost."""
    def hasty(shared, barrier, parity):
        if barrier % few_product.BOX_BARRIERS == 0:  # the barrier of sums that are there
            wait_at(shared, barrier, parity)
    wait_at = few_product.wait_at
    monkeypatch.setattr(few_product, "wait_at", hasty)
    hold_back_warp(monkeypatch, 3)
    with pytest.raises((AssertionError, RuntimeError)):
        four_tiles(machine)


@pytest.mark.parametrize("shape", [ONE_WARP, FewShape(8, 1, 4, (1, 1), 64 * KIB)], ids=["mmq", "mmq_few"])
@pytest.mark.parametrize("act, types, n_rows, n_cols, n, biased", [
    ("silu", ("Q8_0", "Q8_0"), 33, 288, 5, False), ("gelu", ("Q4_K", "Q6_K"), 2, 256, 2, True),
    ("relu", ("IQ2_XXS", "IQ3_S"), 1, 512, 1, True)], ids=str)
def simulate_glu(machine, act, types, n_rows, n_cols, n, biased, shape):
    """Gate and up of one format and of two, with a codebook each."""
    check_mul_mat_glu(machine, act, types, n_rows, n_cols, n, biased, shape)


@pytest.mark.parametrize("type_, n_rows, n_cols, n, shape", [
    ("Q8_0", 100, 800, 5, (8, 2, 4, (2, 1))),    # four row tiles to two blocks
    ("Q4_0", 33, 800, 17, (16, 3, 4, (1, 2))),   # two groups of tokens
    ("Q4_K", 70, 1536, 1, (1, 3, 6, (1, 1))),    # three row tiles to a block, two warps that own no row
    ("Q8_0", 40, 256, 3, None)], ids=str)        # the product in memory
def simulate_argmax(machine, monkeypatch, type_, n_rows, n_cols, n, shape):
    shape = FewShape(*shape, 4 * shared_words((type_,), *shape[:3], min(n, shape[0]))) if shape else ONE_WARP
    monkeypatch.setattr(argmax, "THREADS", 32)
    monkeypatch.setattr(argmax, "PARTS", 2)
    check_mul_mat_argmax(machine, type_, n_rows, n_cols, n, plan=shape)


@pytest.mark.parametrize("types, n_rows, n_cols, n, shape", [
    (("Q8_0", "Q8_0", "Q8_0"), (65, 33, 1), 288, 1, (1, 2, 2, (3, 1))),       # six row tiles to three blocks
    (("Q4_K", "Q4_K", "Q6_K"), (33, 1, 32), 512, 3, None),
    # three formats, all row tiles to one block, two groups of tokens
    (("Q5_1", "Q4_0", "Q8_0"), (1, 31, 97), 320, 6, (4, 2, 4, (1, 2))),
    (("IQ2_XXS", "IQ3_S", "IQ2_XXS"), (2, 34, 1), 512, 1, (1, 1, 2, (2, 1))),  # codebooks
    (("IQ2_KL", "IQ3_S", "IQ2_KL"), (2, 34, 1), 512, 1, (1, 1, 2, (2, 1))),    # one that a single token does not read
    (("Q4_0", "Q4_0", "Q4_0"), (1, 1, 65), 32, 9, (16, 1, 4, (2, 1)))], ids=str)
def simulate_qkv(machine, types, n_rows, n_cols, n, shape):
    if shape:
        n_bytes = 4 * shared_words(types, *shape[:3], min(n, shape[0]))
        shape = FewShape(*shape, n_bytes)
    check_mmq_few_qkv(machine, types, n_rows, n_cols, n, shape)


@pytest.mark.parametrize("n_rows, n_cols, n, message", [
    ((5, 0, 5), 32, 1, "n_rows is 0, allowed: at least 1"), ((5, 5, 5), 0, 1, "n_cols is 0, allowed: at least 1"),
    ((5, 5, 5), 32, 0, f"n is 0, allowed: 1..{4 * 65535}")])
def test_qkv_refuses(n_rows, n_cols, n, message):
    operands = {what: Operand("Q8_0", (m, n_cols)) for what, m in zip("qkv", n_rows)}
    biases_and_results = {f"{what}_bias": None for what in "qkv"} | {f"{what}_out": Operand("f32", (n, 5)) for what in "qkv"}
    with pytest.raises(Unsupported, match=message):
        mul_mat_qkv.check(Call("mul_mat_qkv", "node", None, {**operands, **biases_and_results, "x": Operand("act", (n, n_cols))}))


@pytest.mark.parametrize("shape", [one_warp, few])
@pytest.mark.parametrize("name", ["Q2_K", "Q4_1", "Q6_K"])
def simulate_special(machine, name, shape):
    """Chunks of zeros, of too small values, or with d = NaN."""
    x = activations(5, 512, seeded("special"))
    x[:, :256] = 0
    x[:, 3] = [np.inf, np.nan, 0, 1e-35, 1]
    check_mul_mat(machine, name, 2, 512, 5, shape(machine, name, 2, 512, 5), x)


@pytest.mark.parametrize("shape", [one_warp, few])
@pytest.mark.parametrize("name, fill, scales", [
    ("Q6_K", 0, 0x80), ("Q6_K", 0xff, 0x7f), ("Q4_K", 0xff, 0xff), ("Q3_K", 0, 0), ("Q2_K", 0xff, 0xff), ("IQ4_XS", 0, 0),
    ("IQ3_S", 0xff, 0xff),
    ("Q8_0", 0x80, 0), ("Q5_0", 0, 0)])
def simulate_extremes(machine, name, fill, scales, shape):
    """Sums at the bounds of the format table."""
    check_extremes(machine, name, fill, scales, 2, shape(machine, name, 1, 256, 2))
