"""quantize, mul_mat, get_rows, dequantize and take_rows in the simulator: every format at the smallest shape, and the edges."""
from dataclasses import astuple
from itertools import product

import numpy as np
import pytest

from cuda_simulator import SimulatedMachine, run_in_simulator
from ggml_py.kernels.cuda import quantize as cuda_quantize
from ggml_py.kernels.call import Call, Operand, Unsupported
from ggml_py.kernels.cuda.dequantize import dequantize
from ggml_py.kernels.cuda.mmvq_staged import StagedShape, stage_bytes
from ggml_py.kernels.cuda.mmq import HOPPER_BLOCKS
from ggml_py.kernels.cuda.mmq_few import few_shape, mmq_few
from ggml_py.kernels.cuda.mul_mat import Block, FewShape, MMVQShape, half_block, mmvq_shape, mul_mat_shape
from ggml_py.kernels.cuda.mul_mat_qkv import team_shape
from ggml_py.quant.formats import FORMATS
from matmul_comparisons import (SPECIAL, activations, check_dequantize, check_extremes, check_get_rows, check_mul_mat,
                                check_quantize, check_take_rows, float16_edges, seeded)

WEIGHTS = [fmt.name for fmt in FORMATS.values() if fmt.planes]


def test_in_the_simulator():
    run_in_simulator(__file__, "-m", "not slow")


@pytest.mark.slow
def test_the_others_in_the_simulator():
    run_in_simulator(__file__, "-m", "slow")


@pytest.mark.parametrize("type_, n_rows, n_cols, n, expected", [
    ("F16", 4096, 14336, 8, (4, 8, (128, 2))), ("F32", 33, 257, 3, (4, 2, (2, 1))), ("F32", 576, 14336, 1, (1, 8, (18, 1))),
    ("BF16", 128256, 4096, 1, (1, 4, (4008, 1))), ("F32", 128, 2048, 512, (16, 8, (4, 32))),
    ("F16", 33, 576, 9, (16, 3, (2, 1)))])
def test_mmvq_shape(type_, n_rows, n_cols, n, expected):
    assert astuple(mmvq_shape(type_, n_rows, n_cols, n, 132)) == expected


# too many tokens, rows, columns
@pytest.mark.parametrize("type_, n_rows, n_cols, n, expected", [
    ("Q4_K", 4096, 14336, 1, FewShape), ("Q4_K", 4096, 14336, 8, FewShape), ("Q4_K", 4096, 14336, 192, FewShape),
    ("Q4_K", 4096, 14336, 256, Block(4, 2, 8)),
    ("Q8_0", 4096, 14336, 512, Block(4, 2, 16)), ("Q4_1", 576, 576, 1, FewShape), ("Q4_1", 576, 576, 2, FewShape),
    ("Q4_1", 576, 576, 512, FewShape),
    ("Q8_0", 49152, 576, 33, FewShape), ("Q8_0", 49152, 576, 65, Block(4, 2, 16)), ("F16", 49152, 576, 512, MMVQShape),
    ("F32", 128, 2048, 1, StagedShape(1, (16, 1), 8, 8 * (8 << 10) + 8 * (1 << 10) + 8 * 32)),
    ("BF16", 1050, 4097, 1, StagedShape(1, (132, 1), 16, 17 * (5120 + 32))),
    ("F32", 128, 2048, 16, StagedShape(1, (16, 16), 8, 8 * (9 << 10) + 8 * 32)),
    ("F32", 128, 2048, 33, StagedShape(4, (16, 9), 16, 8 * (12 << 10) + 8 * 128)),
    ("F32", 128, 2048, 64, StagedShape(4, (16, 16), 16, 8 * (12 << 10) + 8 * 128)),
    ("F32", 128, 2048, 66, MMVQShape), ("F32", 1057, 2048, 1, MMVQShape), ("F32", 8, 25 * 256 + 1, 1, MMVQShape)])
def test_mul_mat_shape(type_, n_rows, n_cols, n, expected):
    found = mul_mat_shape(type_, n_rows, n_cols, n, 132, 227 << 10)
    assert found == expected or type(found) is expected


@pytest.mark.parametrize("kib", [227, 163, 99])
def test_blocks_of_one_token_are_alone(kib):
    """Two never fit a multiprocessor, of which a KiB of each is the driver's, where there are many; few take what they need."""
    limit = kib << 10
    many, few = (few_shape(("Q1_0",), n_rows, 14336, 1, 132, limit).n_bytes for n_rows in (4096, 2048))
    assert few <= many <= limit and 2 * (many + 1024) > limit + 1024
    assert few < many or kib < 227


def test_few_refuses():
    """More words of activations than an int32 counts."""
    n_cols, n = 1 << 20, 5120
    operands = dict(w=Operand("Q8_0", (1, n_cols)), x=Operand("act", (n, n_cols)), out=Operand("f32", (n, 1)))
    call = Call("mul_mat", "node", None, operands, plan=few_shape(("Q8_0",), 1, n_cols, n, 132, 227 << 10))
    with pytest.raises(Unsupported, match="n is 5120, allowed: 1..3120"):
        mmq_few(call)


@pytest.mark.parametrize("type_, n_rows, n, expected", [
    ("Q4_K", 4096, 8, FewShape), ("Q4_K", 4096, 16, FewShape),
    ("Q2_K", 4096, 16, Block(2, 1, 4, True, 8, 4, 2)), ("Q6_K", 4096, 16, Block(2, 1, 4, True, 8, 4, 2)),
    ("Q6_K", 14336, 16, Block(2, 1, 4, True, 4, 2)), ("TQ2_0", 4096, 16, FewShape),
    ("Q4_K", 4096, 32, Block(2, 1, 8, True, 5, 4, 2, 2)), ("Q4_K", 4096, 64, Block(2, 1, 16, True, 3, 2, 2, 2, 4)),
    ("Q8_0", 4096, 32, Block(2, 1, 8, True, 5, 4, 2, 1, 4)),
    ("Q4_K", 14336, 32, Block(2, 1, 8, True, 6, 4)), ("Q8_0", 4096, 64, Block(2, 1, 16, True, 3, 2, 2, 2, 4)),
    ("Q4_1", 4096, 64, Block(2, 1, 16, True, 3, 2, 2, 2)), ("Q5_1", 14336, 512, Block(4, 2, 8)),
    ("Q4_K", 4096, 128, Block(2, 1, 16, True, 3, copiers=4)), ("TQ2_0", 4096, 128, HOPPER_BLOCKS[1]),
    ("Q8_0", 4096, 128, Block(2, 2, 8, True, 3, copiers=4)), ("Q4_K", 14336, 64, Block(4, 1, 16, True, 3, copiers=4)),
    ("Q8_0", 14336, 64, Block(4, 1, 16, True, 3, copiers=4)), ("Q4_K", 4096, 512, Block(4, 1, 16, True, 3, copiers=4)),
    ("Q6_K", 128256, 33, Block(4, 1, 16, True, 3, copiers=4)), ("Q4_K", 32, 8, FewShape)])
def test_mul_mat_shape_with_warpgroups(type_, n_rows, n, expected):
    found = mul_mat_shape(type_, n_rows, 4096, n, 132, 227 << 10, True)
    assert found == expected or type(found) is expected


@pytest.mark.parametrize("n_multiprocessors, warpgroups", [(132, True), (148, False)])
def test_every_shape_has_its_times(n_multiprocessors, warpgroups):
    """Also on devices without warpgroups, whose answer is not used."""
    for fmt in (fmt for fmt in FORMATS.values() if fmt.is_quantized):
        for n_rows, n in product((1024, 4096, 14336), (9, 33, 64, 128, 512)):
            shape = mul_mat_shape(fmt.name, n_rows, 4096, n, n_multiprocessors, 227 << 10, warpgroups)
            half_block(fmt.name, shape, n_rows, 4096, n, n_multiprocessors, 227 << 10)


@pytest.mark.parametrize("types, n, expected", [
    (("Q4_K",) * 3, 32, Block(2, 1, 8, True, 6, 4)), (("Q4_K", "Q4_K", "Q6_K"), 32, Block(2, 1, 8, True, 6, 3)),
    (("Q4_1",) * 3, 32, Block(2, 1, 8, True, 6, 3)), (("Q4_K",) * 3, 64, Block(2, 1, 16, True, 3, copiers=4)),
    (("Q4_K",) * 3, 128, None)])
def test_team_shape(types, n, expected):
    assert team_shape(types, (4096, 1024, 1024), 4096, n, 132, 227 << 10, True) == expected


@pytest.mark.parametrize("type_, n_rows, n_cols, tokens", [
    ("Q4_K", 4096, 4096, None), ("Q4_K", 28672, 8192, 16), ("Q5_K", 4096, 4096, None), ("IQ4_XS", 14336, 4096, None)])
def test_half_block_in_the_place_of_mmq_few(type_, n_rows, n_cols, tokens):
    """16 tokens of types with minima go by float16 where that takes less."""
    shape = mul_mat_shape(type_, n_rows, n_cols, 16, 132, 227 << 10, True)
    block = half_block(type_, shape, n_rows, n_cols, 16, 132, 227 << 10)
    assert isinstance(shape, FewShape) and (block and block.tokens) == tokens


@pytest.fixture
def machine():
    return SimulatedMachine()


def partial_columns(name):
    """Two chunks, the second one partial where the format's blocks allow it."""
    block = FORMATS[name].block_size
    return 512 if block == 256 else 256 + max(block, 32 if block > 1 else 21)


@pytest.mark.parametrize("n, k", [(1, 1), (2, 257), (1, 512)])
def simulate_quantize(machine, n, k):
    check_quantize(machine, activations(n, k, seeded(f"quantize {n} {k}")), f"quantize[n={n}, k={k}]")


@pytest.mark.parametrize("n, k, expected",
                         [(1, 14336, ((56, 1), 64)), (512, 14336, ((14, 512), 256)), (65535, 576, ((1, 65535), 192)),
                          (512, 2048, ((8, 512), 64))])
def test_blocks_of_quantize(n, k, expected):
    assert cuda_quantize.blocks(n, k) == expected


@pytest.mark.parametrize("n, k", [(1, 1100), (2, 257)])
def simulate_quantize_many(machine, n, k, monkeypatch):
    """Blocks of several chunks."""
    monkeypatch.setattr(cuda_quantize, "MOST_BLOCKS", 1)
    check_quantize(machine, activations(n, k, seeded(f"quantize {n} {k}")), f"quantize[n={n}, k={k}], several chunks a block")


@pytest.mark.parametrize("value", SPECIAL)
def simulate_quantize_special(machine, value):
    x = np.zeros((1, 300), np.float32)
    x[0, 7], x[0, 255], x[0, 256:] = value, value / 3, np.linspace(-1, 1, 44)
    check_quantize(machine, x, f"quantize[{value}]")


@pytest.mark.parametrize("name", WEIGHTS)
def simulate_mul_mat(machine, name):
    """One chunk, or a part of one."""
    check_mul_mat(machine, name, 33, FORMATS[name].block_size if FORMATS[name].is_quantized else 21, 1)


@pytest.mark.parametrize("name, n_rows, n_cols, n", [
    ("Q4_1", 31, 288, 2),     # sub-blocks of 32, groups of 32, minima
    ("Q2_K", 1, 256, 3),      # sub-blocks of 16 in a group of 256, minima
    ("Q6_K", 32, 512, 3),     # sums of 64 bits
    ("NVFP4", 5, 320, 9),     # groups of 16; two groups of tokens
    ("Q8_0", 3, 2336, 1),     # ten chunks in two rounds of five warps
    ("F16", 3, 2310, 3), ("F32", 33, 7, 5),
    # sixteen tokens a block: more chunks than a round, or a part of one
    ("F32", 33, 2314, 18), ("BF16", 31, 284, 9), ("F16", 40, 512, 16),
    ("BF16", 9, 5 * 256 + 3, 1)])  # one token and few rows: six chunks, a part of the last
def simulate_mul_mat_edges(machine, name, n_rows, n_cols, n):
    check_mul_mat(machine, name, n_rows, n_cols, n)


@pytest.mark.parametrize("name", ["F32", "BF16"])
@pytest.mark.parametrize("n_warps", [1, 2])
def simulate_mmvq_launch_shapes(machine, name, n_warps):
    """Three chunks: the bits do not depend on the shape of the launch."""
    check_mul_mat(machine, name, 18, 544, 2, MMVQShape(1, n_warps, (1, 2)))


@pytest.mark.parametrize("name", ["F32", "F16"])
@pytest.mark.parametrize("n_warps", [1, 3])
def simulate_mmvq_staged_launch_shapes(machine, name, n_warps):
    """Six chunks: a warp has more than there are groups of lanes, or a group none. Two row tiles."""
    check_mul_mat(machine, name, 42, 1404, 1, StagedShape(1, (6, 1), n_warps, stage_bytes(FORMATS[name], 6, 1)))


@pytest.mark.parametrize("n, n_tokens, n_warps", [(2, 1, 2), (3, 2, 4), (5, 4, 1), (4, 4, 16)])
def simulate_mmvq_staged_tokens(machine, n, n_tokens, n_warps):
    """A row and a half of blocks, of which the last has fewer tokens."""
    shape = StagedShape(n_tokens, (2, -(-n // n_tokens)), n_warps, stage_bytes(FORMATS["F16"], 3, n_tokens))
    for n_cols in 520, 517:
        check_mul_mat(machine, "F16", 12, n_cols, n, shape)


@pytest.mark.parametrize("value", [np.inf, np.nan, 0, 1e-35])
def simulate_mul_mat_special(machine, value):
    """A chunk of zeros, of too small values, or with d = NaN."""
    x = activations(1, 320, seeded("special"))
    x[0, :256] = 0
    x[0, 3] = value
    check_mul_mat(machine, "Q5_1", 2, 320, 1, x=x)


@pytest.mark.parametrize("name, fill, scales", [
    ("Q6_K", 0, 0x80), ("Q4_K", 0xff, 0xff), ("IQ4_XS", 0, 0), ("IQ3_S", 0xff, 0xff), ("Q8_0", 0x80, 0)])
def simulate_mul_mat_extremes(machine, name, fill, scales):
    check_extremes(machine, name, fill, scales)


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHTS)
def simulate_get_rows(machine, name):
    check_get_rows(machine, name, 34, partial_columns(name), [33])


def simulate_get_rows_in_any_order(machine):
    check_get_rows(machine, "Q4_0", 40, 1056, [39, 0, 31, -1, 32, 0])


@pytest.mark.parametrize("name", WEIGHTS)
def simulate_dequantize(machine, name):
    """One type in float32, the next one in float16: the unpacking is the same."""
    check_dequantize(machine, name, 1, FORMATS[name].block_size if FORMATS[name].is_quantized else 8,
                     ("f32", "f16")[WEIGHTS.index(name) % 2])


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("name, n_rows, n_cols",
                         [("Q4_0", 31, 288), ("Q4_1", 32, 256), ("Q5_1", 33, 32), ("NVFP4", 1, 320), ("BF16", 33, 1),
                                                  ("F16", 2, 24), ("F16", 1, 33), ("F32", 1, 36), ("F32", 1, 263)])
def simulate_dequantize_edges(machine, name, n_rows, n_cols, dtype):
    check_dequantize(machine, name, n_rows, n_cols, dtype)


@pytest.mark.parametrize("n_cols", [16, 15])
def simulate_dequantize_rounds(machine, n_cols):
    check_dequantize(machine, "F32", 4, n_cols, "f16", float16_edges(n_cols))


@pytest.mark.parametrize("shape, dtype, message", [
    ((0, 32), "f32", "n_rows is 0"), ((1, 0), "f32", "n_cols is 0"), ((1, 32), "bf16", "dtype is bf16, allowed: f32, f16")])
def test_dequantize_refuses(shape, dtype, message):
    with pytest.raises(ValueError, match=message):
        dequantize(Call("dequantize", "", None, {"w": Operand("Q4_0", shape), "out": Operand(dtype, shape)}))


@pytest.mark.parametrize("n_cols, ids", [(1, [0]), (129, [4, 4, 0])])
def simulate_take_rows(machine, n_cols, ids):
    check_take_rows(machine, 5, n_cols, ids)
