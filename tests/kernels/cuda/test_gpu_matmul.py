"""quantize, mul_mat, get_rows, dequantize and take_rows on a GPU: the comparisons of the simulator at sizes of real models."""
import numpy as np
import pytest

from cuda_simulator import GPUMachine, no_gpu
from expert_comparisons import check_mul_mat_id, check_mul_mat_id_glu
from ggml_py.kernels.call import Call, Operand
from ggml_py.kernels.cuda.half_forms import half_form
from ggml_py.kernels.cuda.mmq import (BLOCKS, HOPPER_BLOCKS, TEAMS, block_shape, hopper_blocks, most_quads, shared_bytes,
                                      team_blocks)
from ggml_py.kernels.cuda.mmq_few import mmq_few, shape_of
from ggml_py.kernels.cuda.mmq_half import EXPERTS, Halves, dense_blocks
from ggml_py.quant.formats import FORMATS
from matmul_comparisons import (PACKED, SCALED, SPLIT, SPECIAL, activations, check_dequantize, check_extremes, check_get_rows,
                                check_mmq_few_qkv, check_mul_mat, check_quantize, check_take_rows, edges, few, float16_edges,
                                largest_block, seeded, weight_of_scales)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(no_gpu() is not None, reason=str(no_gpu()))]
WEIGHTS = [fmt.name for fmt in FORMATS.values() if fmt.planes]
QUANTIZED = [fmt.name for fmt in FORMATS.values() if fmt.is_quantized]


@pytest.fixture(scope="module")
def machine():
    return GPUMachine()


@pytest.mark.parametrize("n, k", [(1, 1), (1, 576), (7, 1536), (512, 4097), (33, 14336)])
def test_quantize(machine, n, k):
    check_quantize(machine, activations(n, k, seeded(f"quantize {n} {k}")), f"quantize[n={n}, k={k}]")


def test_quantize_any_bits(machine):
    """Random bit patterns, NaN and infinities among them, and a chunk around each special value."""
    x = seeded("any bits").integers(0, 1 << 32, (64, 777), dtype=np.uint32).view(np.float32).copy()
    x[:len(SPECIAL)] = 0
    x[np.arange(len(SPECIAL)), 5] = SPECIAL
    check_quantize(machine, x, "quantize[any bits]")


@pytest.mark.parametrize("n", [1, 2, 3, 8, 65])
@pytest.mark.parametrize("name", WEIGHTS)
def test_mul_mat(machine, name, n):
    """577 rows and eleven chunks: a partial tile, two rounds of six warps."""
    check_mul_mat(machine, name, 577, 2816, n)


@pytest.mark.parametrize("fill, scales", [(0, 0), (0, 0x80), (0xff, 0xff), (0x80, 0x7f)])
@pytest.mark.parametrize("name", QUANTIZED)
def test_mul_mat_extremes(machine, name, fill, scales):
    check_extremes(machine, name, fill, scales)


# one token and few rows: two chunks for some or all warps
@pytest.mark.parametrize("name, n_rows, n_cols, n", [
    ("Q4_1", 576, 576, 512), ("Q4_1", 1536, 576, 512), ("Q4_1", 576, 1536, 512), ("Q8_0", 4096, 4096, 1),
    ("Q4_K", 2048, 14336, 9),
    ("Q6_K", 4096, 4096, 3), ("F32", 129, 1000, 31), ("F16", 2049, 577, 7), ("BF16", 1057, 2048, 1), ("F32", 128, 2048, 1),
    ("F32", 256, 7168, 1),
    ("F32", 64, 6400, 1), ("BF16", 40, 4099, 1), ("F16", 1056, 9001, 1)])
def test_mul_mat_of_models(machine, name, n_rows, n_cols, n):
    check_mul_mat(machine, name, n_rows, n_cols, n)


@pytest.mark.parametrize("n", [1, 33, 129])
@pytest.mark.parametrize("name", QUANTIZED)
def test_mmq(machine, name, n):
    """289 rows, ten row tiles of which the last has one row; three chunks."""
    check_mul_mat(machine, name, 289, 768, n, largest_block(machine, (name,)))


@pytest.mark.parametrize("name", QUANTIZED)
def test_mmq_of_few_rows(machine, name):
    if not machine.target.warpgroups or len(blocks := hopper_blocks((name,), machine.target.shared_limit)) < 2:
        pytest.skip("no such block")
    check_mul_mat(machine, name, 289, 1280, 65, blocks[1])


@pytest.mark.parametrize("n", [1, 33, 129])
@pytest.mark.parametrize("name", QUANTIZED)
def test_mmq_without_warpgroups(machine, name, n):
    check_mul_mat(machine, name, 289, 768, n, block_shape((name,), machine.target.shared_limit))


@pytest.mark.parametrize("quads, teams", [(quads, teams) for quads, most in TEAMS.items() for teams in range(1, most + 1)])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "IQ2_XXS", "TQ2_0", "Q8_0", "MXFP4",
                                  "IQ5_K", "IQ4_NL", "NVFP4", "Q4_1"])
def test_teams(machine, name, quads, teams, blocks):
    """Of a block or of a cluster of two; chunks for all in each turn or not, one chunk only."""
    found = [block for block in team_blocks((name,), machine.target.shared_limit)
             if (block.quads, block.teams, block.blocks) == (quads, teams, blocks)]
    if not machine.target.warpgroups or not found:
        pytest.skip("no such block")
    for n_rows, n_cols, n in (289, 256 * 11, 4 * quads + 1), (33, 256, 3), (4096, 4096, 4 * quads):
        check_mul_mat(machine, name, n_rows, n_cols, n, found[0])


@pytest.mark.parametrize("block", BLOCKS + HOPPER_BLOCKS, ids=str)
@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q4_K", "Q6_K", "Q2_K", "NVFP4", "IQ2_XXS", "TQ2_0"])
def test_mmq_any_block(machine, name, block):
    """The bits do not depend on the block; rows and tokens on both sides of its edges."""
    if block.warpgroups > machine.target.warpgroups or (not block.warpgroups and block.quads > most_quads(
        FORMATS[name])) or shared_bytes((name,), block) > machine.target.shared_limit:
        pytest.skip("no such block")
    for n_rows, n in ((31, 9), (block.rows + 1, block.tokens), (block.rows, block.tokens + 1)):
        check_mul_mat(machine, name, n_rows, 512, n, block)


@pytest.fixture
def hopper(machine):
    if not machine.target.warpgroups:
        pytest.skip("this GPU has no warpgroups")
    return machine


# Formats with integer scales, multiplied by float16 or int8, and the blocks of one matrix that they have
INTEGER_BLOCKS = [(fmt.name, block) for fmt in (*PACKED, *SPLIT) for block in dense_blocks(fmt)]


@pytest.mark.parametrize("name, block", INTEGER_BLOCKS, ids=str)
@pytest.mark.parametrize("n_rows, n_cols, n", [(289, 768, 129), (31, 256, 1), (4096, 4096, 65), (8192, 1280, 400)])
def test_mmq_half(hopper, n_rows, n_cols, n, name, block):
    check_mul_mat(hopper, name, n_rows, n_cols, n, Halves(block))


@pytest.mark.parametrize("fmt", SCALED, ids=lambda fmt: fmt.name)
def test_mmq_half_of_scaled(hopper, fmt):
    for block in dense_blocks(fmt):
        for n_rows, n_cols, n in (289, 768, 129), (31, 256, 1), (4096, 1280, 65):
            check_mul_mat(hopper, fmt.name, n_rows, n_cols, n, Halves(block))
        for fill in 0, 0x77, 0xff:
            check_extremes(hopper, fmt.name, fill, 0x3c, 65, Halves(block))
        blocks = weight_of_scales(fmt, 512, seeded(fmt.name))
        check_mul_mat(hopper, fmt.name, len(blocks), 512, 65, Halves(block), blocks=blocks)


@pytest.mark.parametrize("name", [*(fmt.name for fmt in (*PACKED, *SPLIT)), "MXFP4", "Q4_1"])
@pytest.mark.parametrize("block", EXPERTS, ids=str)
def test_mmq_half_of_experts(hopper, name, block):
    """None to all tokens of an expert, and ids that are none."""
    ids = np.minimum(seeded("ids").integers(-1, 40, (150, 3)), 19).astype(np.int32)
    act = "swiglu_oai" if name in ("MXFP4", "Q4_1") else "silu"
    check_mul_mat_id(hopper, name, 20, 300, 1280, ids, 3, Halves(block))
    check_mul_mat_id_glu(hopper, act, (name, name), 20, 300, 1280, ids, 1, True, Halves(block))


LARGE = {"all": np.sign, "nearly alike": lambda x: np.where(x > 0, 1, 69 / 127).astype(np.float32),
         "some": lambda x: np.where(np.arange(len(x))[:, None] % 100 == 7, np.sign(x), x),
         "special": lambda x: edges(*x.shape, seeded("special"))}


@pytest.mark.parametrize("name, block", [each for each in INTEGER_BLOCKS if half_form(FORMATS[each[0]]).parts > 1
                                         or half_form(FORMATS[each[0]]).split], ids=str)
@pytest.mark.parametrize("which", LARGE)
def test_mmq_half_of_large_sums(hopper, which, name, block):
    """Whose chunks are multiplied in parts, by float16: all, or those with some tokens."""
    check_mul_mat(hopper, name, 289, 1280, 129, Halves(block), LARGE[which](activations(129, 1280, seeded("large"))))


@pytest.mark.parametrize("name, block", INTEGER_BLOCKS, ids=str)
def test_mmq_half_of_extremes(hopper, name, block):
    """Of sums, and of float scales."""
    for fill, scales in (0, 0xff), (0xff, 0xff), (0, 0):  # scales of 0 may be the least
        check_extremes(hopper, name, fill, scales, 65, Halves(block))
    blocks = weight_of_scales(FORMATS[name], 512, seeded(name))
    check_mul_mat(hopper, name, len(blocks), 512, 65, Halves(block), blocks=blocks)


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "IQ3_KS", "IQ2_XS"])
@pytest.mark.parametrize("block", EXPERTS, ids=str)
@pytest.mark.parametrize("which", LARGE)
def test_mmq_half_of_large_sums_of_experts(hopper, which, block, name):
    ids = np.minimum(seeded("ids").integers(-1, 8, (150, 2)), 3).astype(np.int32)
    x = LARGE[which](activations(150, 1280, seeded("large")))
    check_mul_mat_id(hopper, name, 4, 70, 1280, ids, 1, Halves(block), x=x)
    check_mul_mat_id_glu(hopper, "silu", (name, name), 4, 70, 1280, ids, 1, False, Halves(block), x=x)


def test_sums_of_halves_are_exact(machine):
    """On the GPUs known to have warpgroups."""
    assert machine.target.halves == machine.target.warpgroups


@pytest.mark.parametrize("n", [1, 3, 4, 5, 8, 16, 33])
@pytest.mark.parametrize("name", QUANTIZED)
def test_mmq_few(machine, name, n):
    """289 rows, ten row tiles of which the last has one row; eleven chunks."""
    check_mul_mat(machine, name, 289, 2816, n, few(machine, (name,), 289, 2816, n))


@pytest.mark.parametrize("n_warps, n_blocks", [(1, 1), (3, 2), (5, 3)])
@pytest.mark.parametrize("name, n", [("Q4_K", 3), ("Q8_0", 8), ("IQ3_S", 8), ("Q6_K", 16), ("Q4_1", 16)])
def test_mmq_few_tiles_in_a_row(machine, name, n, n_warps, n_blocks):
    """Several row tiles of three chunks to a block: warps multiply chunks of the next one while sums of this one are added."""
    n_tokens = few(machine, (name,), 289, 768, n).n_tokens
    check_mul_mat(machine, name, 289, 768, n, shape_of((name,), 289, 768, n, n_tokens, n_warps, n_blocks))


@pytest.mark.parametrize("n", [1, 3, 8, 16, 33])
@pytest.mark.parametrize("types, n_rows, n_cols", [
    (("Q4_K", "Q4_K", "Q6_K"), (4096, 1024, 1024), 4096), (("Q8_0", "Q8_0", "Q8_0"), (2048, 512, 513), 2048),
    (("Q4_1", "Q5_1", "Q4_0"), (576, 192, 192), 576),
    (("IQ2_S", "IQ3_S", "Q4_K"), (1, 33, 31), 768)], ids=str)
def test_qkv(machine, types, n_rows, n_cols, n):
    check_mmq_few_qkv(machine, types, n_rows, n_cols, n)


def test_launches_of_one_kernel(machine, monkeypatch):
    """A launch keeps the shared memory that it asks for when another one of the kernel, with less, is prepared."""
    most, less = (shape_of(("Q4_K",), 33, 4096, 1, 1, n_warps, 1) for n_warps in (12, 5))
    operands = {"w": Operand("Q4_K", (33, 4096), 0), "x": Operand("act", (1, 4096), 0), "out": Operand("f32", (1, 33), 0)}
    run = machine.run

    def prepare_another_and_run(launch):
        assert less.n_bytes < most.n_bytes == launch.config.shmem_size
        mmq_few(Call("mul_mat", "another", machine.target, operands, plan=less))
        run(launch)
    monkeypatch.setattr(machine, "run", prepare_another_and_run)
    check_mul_mat(machine, "Q4_K", 33, 4096, 1, most)


@pytest.mark.parametrize("kernel", ["mmq", "mmq_few"])
@pytest.mark.parametrize("fill, scales", [(0, 0), (0, 0x80), (0xff, 0xff), (0x80, 0x7f)])
@pytest.mark.parametrize("name", QUANTIZED)
def test_mmq_extremes(machine, name, fill, scales, kernel):
    plan = largest_block(machine, (name,)) if kernel == "mmq" else few(machine, (name,), 1, 256, 9)
    check_extremes(machine, name, fill, scales, 9, plan)


@pytest.mark.parametrize("name, n_rows, n_cols, n", [
    ("Q4_1", 576, 576, 512), ("Q4_1", 576, 1536, 96), ("Q8_0", 1000, 4096, 33), ("Q4_K", 512, 14336, 64),
    ("Q6_K", 300, 4096, 200)])
def test_mmq_of_models(machine, name, n_rows, n_cols, n):
    check_mul_mat(machine, name, n_rows, n_cols, n, largest_block(machine, (name,)))


@pytest.mark.parametrize("name", WEIGHTS)
def test_get_rows(machine, name):
    check_get_rows(machine, name, 1000, 2304, [*seeded("ids").integers(0, 1000, 64), -1])


@pytest.mark.parametrize("n_rows, n_cols", [(1, 256), (31, 512), (32, 2304), (33, 14336), (1000, 768)])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_dequantize(machine, name, dtype, n_rows, n_cols):
    check_dequantize(machine, name, n_rows, n_cols, dtype)


@pytest.mark.parametrize("n_cols", [1, 7, 8, 31, 33, 36, 257, 577, 4100])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_dequantize_any_columns(machine, name, dtype, n_cols):
    check_dequantize(machine, name, 65, n_cols, dtype)


@pytest.mark.parametrize("name, n_cols",
                         [(name, n_cols) for name in ("Q4_0", "Q4_1", "Q5_1", "Q8_0", "MXFP4") for n_cols in (32, 224, 288, 576)])
def test_dequantize_part_of_a_chunk(machine, name, n_cols):
    check_dequantize(machine, name, 65, n_cols, "f16")


@pytest.mark.parametrize("n_cols", [56, 57])
def test_dequantize_rounds(machine, n_cols):
    check_dequantize(machine, "F32", 4, n_cols, "f16", float16_edges(n_cols))


@pytest.mark.parametrize("n_cols", [1, 128, 129, 4096])
def test_take_rows(machine, n_cols):
    check_take_rows(machine, 100, n_cols, seeded("ids").integers(0, 100, 33))
