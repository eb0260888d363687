"""kernels/cpu/mul_mat against kernels/reference/mul_mat, bit for bit: every format, both sides of every edge,
all instruction sets, 1 and 2 threads."""
from itertools import product

import numpy as np
import pytest
from cpu_comparisons import compare, matrix, seeded
from guarded_arrays import guarded
from op_runs import product_input
from random_weights import random_weight

from ggml_py.kernels import threads
from ggml_py.kernels.cpu import amx, mul_mat
from ggml_py.kernels.cpu.limbs import BEHIND, LIMB_ROW, TILE_COLUMNS, limbs_shape
from ggml_py.kernels.cpu.mul_mat import PARALLEL, Products, compiled_unit, mul_mat_arrays
from ggml_py.kernels.cpu.quantized_products import BLOCK, N_COLUMNS, form_of
from ggml_py.kernels.cpu.tile_products import Finisher, has_tiles
from ggml_py.kernels.cpu.vector import ISAS, available_isas
from ggml_py.kernels.reference.mul_mat import mul_mat_arrays as reference_arrays
from ggml_py.quant import tile
from ggml_py.quant.activation import LIMIT, quantize_activations
from ggml_py.quant.formats import CHUNK, FORMATS, format_of
from ggml_py.testing import assert_bitwise_equal

NAMES = [fmt.name for fmt in FORMATS.values() if fmt.planes]
FORMS = ["Q4_0", "Q5_K", "F16"]  # groups of 32; of 256, in spans of 64, with scales and minima; floats
ROWS = [1, 31, 32, 33, 65]
N_TOKENS = [1, 2, 5, 8, 16, 17]  # one block, several, and a rest; the last by tiles, where the CPU has them, one product and two
assert N_TOKENS[-3] < TILE_COLUMNS <= N_TOKENS[-2]
GUARD = 16                       # elements behind out that must stay as they are
THREADS = [1, 2] if threads.MOST > 1 else [1]


@pytest.fixture(autouse=True)
def threads_as_before():
    before = threads.get_num_threads()
    yield
    threads.set_num_threads(before)


def columns_of(fmt):
    """One block, a chunk, a chunk and a block, three chunks."""
    block = fmt.block_size if fmt.is_quantized else 5
    return sorted({block, CHUNK, CHUNK + block, 3 * CHUNK})


def activations(n, k, rng):
    return (rng.standard_normal((n, k)) * np.exp2(rng.integers(-6, 6, (n, k)))).astype(np.float32)


def tiles(fmt, data, n_cols):
    return tile.pack(data, fmt, len(data), n_cols).reshape(-1).view(np.uint32)


def run(kernel, words, x, n, n_rows):
    """float32 [n, n_rows] from the first n rows of the operands x."""
    buffer = np.full(n * n_rows + GUARD, np.nan, np.float32)
    kernel(words, *(a[:n] for a in x), buffer[:n * n_rows].reshape(n, n_rows))
    assert np.isnan(buffer[n * n_rows:]).all(), "written behind the end of out"
    return buffer[:n * n_rows].reshape(n, n_rows)


def check(fmt, data, x, rows, n_tokens, isa=None):
    """Weights data [rows, bytes] times activations x [n, k]: the first m of them for m in rows, the first n of those for n in
    n_tokens; the last m with one thread as well."""
    n_cols = x.shape[1]
    kernel, x = mul_mat_arrays(fmt.name, isa, n_cols), product_input(fmt.name, x).arrays
    expected = run(reference_arrays(fmt.name), tiles(fmt, data[:max(rows)], n_cols), x, max(n_tokens), max(rows))
    for m in rows:
        words = tiles(fmt, data[:m], n_cols)
        for n, n_threads in product(n_tokens, THREADS if m == rows[-1] else THREADS[-1:]):
            threads.set_num_threads(n_threads)
            name = f"mul_mat[{fmt.name}, m={m}, k={n_cols}, n={n}, isa={isa}, threads={n_threads}]"
            assert_bitwise_equal(run(kernel, words, x, n, m), expected[:n, :m], name)
    return expected


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_reference(name):
    fmt, rng = format_of(name), seeded(name)
    for n_cols in columns_of(fmt):
        expected = check(fmt, random_weight(fmt, max(ROWS), n_cols, rng), activations(max(N_TOKENS), n_cols, rng), ROWS, N_TOKENS)
        assert np.isfinite(expected).all(), f"{name}: the random weights do not test every bit"


@pytest.mark.parametrize("name", NAMES)
def test_special_values(name):
    """Scales of any bits, infinities and NaNs among them; activations with NaN, infinity, zeros, and too small for a scale."""
    fmt, rng = format_of(name), seeded(f"special {name}")
    n_cols = columns_of(fmt)[-2]
    data = rng.integers(0, 256, (65, fmt.row_bytes(n_cols)), dtype=np.uint8)
    x = activations(17, n_cols, rng)
    x[0, 1], x[1, -1], x[2], x[3] = np.nan, -np.inf, 0, x[3] * np.float32(2.0**-120)
    x[4, :CHUNK // 2] = -0.0
    expected = check(fmt, data, x, [65], [1, 7, 17])
    assert np.isnan(expected).any()


@pytest.mark.parametrize("name", [name for name in NAMES if format_of(name).is_quantized])
def test_largest_sums(name):
    """Rows whose integer fields are all zeros, all ones, or the top bit: levels and scales at their bounds,
    with activations at theirs."""
    fmt, rng, n_rows = format_of(name), seeded(f"largest {name}"), 64
    rows = random_weight(fmt, n_rows, 2 * CHUNK, rng)
    data = rows[:, fmt.header_bytes:].reshape(n_rows, -1, fmt.type_size)
    first, digit = 0, 1
    for field, size in fmt.fields:
        if field not in ("d", "dmin", "m", "e"):
            data[..., first:first + size] = np.resize(np.repeat(np.uint8([0x00, 0x7f, 0x80, 0xff]), digit), n_rows)[:, None, None]
            digit *= 4
        first += size
    x = np.ones((17, 2 * CHUNK), np.float32)
    x[1], x[2, ::2] = -1, -1
    assert np.abs(quantize_activations(x)[0]).min() == LIMIT
    check(fmt, np.concatenate([rows[:, :fmt.header_bytes], data.reshape(n_rows, -1)], axis=1), x, [n_rows], [3, 17])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMS)
def test_instruction_sets(name, isa):
    if isa not in available_isas():
        pytest.skip(f"this CPU lacks one of {', '.join(ISAS[isa].features)}")
    fmt, rng = format_of(name), seeded(f"{name} {isa}")
    n_cols = columns_of(fmt)[-1]
    check(fmt, random_weight(fmt, 65, n_cols, rng), activations(9, n_cols, rng), [33, 65], [1, 4, 9], isa)


@pytest.mark.parametrize("name", [name for name in NAMES if format_of(name).is_quantized])
def test_without_a_dot_product_of_bytes(name):
    """What other CPUs than the newest take: tiles of weights are unpacked in another way there."""
    if "avx2" not in available_isas():
        pytest.skip("this CPU lacks AVX2")
    fmt, rng = format_of(name), seeded(f"{name} by pairs")
    n_cols = CHUNK + fmt.block_size
    check(fmt, random_weight(fmt, 33, n_cols, rng), activations(5, n_cols, rng), [33], [5], "avx2")


# Of one limb and two; groups of 32, 128, 256; minima over 16 and 32, of one, of others, none
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q2_K", "Q5_K", "Q6_K", "IQ1_S", "Q1_0"])
@pytest.mark.parametrize("n", [16, 22, 145])  # one product of a group: three chunks are on their way; 16 columns and 6; two units
def test_emulated_tiles(name, n):
    """The loops that stand for AMX, on CPUs without it. Nothing is read behind the arrays."""
    if not ISAS[available_isas()[0]].dot4:
        pytest.skip("this CPU has no dot product of bytes, which what stands beside tiles takes")
    fmt, rng = format_of(name), seeded(f"tiles {name}")
    n_cols = 4 * CHUNK + fmt.block_size
    data = random_weight(fmt, 33, n_cols, rng)
    x, words = product_input(name, activations(n, n_cols, rng)).arrays, tiles(fmt, data, n_cols)
    expected, out = run(reference_arrays(name), words, x, n, 33), guarded(np.full((n, 33), np.nan, np.float32))
    limbs = guarded(np.full(limbs_shape(n, 5), 0xff, np.uint8))
    Products([(name, guarded(words), out)], [guarded(a) for a in x], n_cols, limbs, tiles=amx.emulated)()
    assert_bitwise_equal(out, expected, f"mul_mat[{name}, n={n}] by emulated tiles")


def test_tiles_read_behind_the_last_row():
    """So many rows of a chunk as `limbs_shape` gives: 16 from each row on that begins a tile."""
    assert BEHIND == amx.COLUMNS - 1 and limbs_shape(17, 2) == (2, 32, LIMB_ROW) and limbs_shape(TILE_COLUMNS - 1, 2)[1] == 11


@pytest.mark.parametrize("isas, expected", [(["avx512vnni", "plain"], amx.tiles), (["avx2", "plain"], None)])
def test_tiles_need_a_dot_product_of_bytes(isas, expected, monkeypatch):
    """A CPU, or a virtual machine, may have tiles and hide AVX-512."""
    monkeypatch.setattr(amx, "available", lambda: True)
    monkeypatch.setattr(mul_mat, "available_isas", lambda: isas)
    assert mul_mat.tiles_for(format_of("Q4_0"), 64) is expected
    assert (mul_mat.limbs_for([format_of("Q4_0")], 64, CHUNK) is None) == (expected is None)


def test_minima_of_one():
    """Their sums over 32 columns are all that minima take; others may be 0."""
    ones = [name for name in NAMES if format_of(name).has_min and Finisher(format_of(name), "avx512vnni").ones]
    assert ones == ["Q4_1", "Q5_1"]


@pytest.mark.parametrize("available", [True, False])
def test_tiles_are_those_of_the_cpu(available, monkeypatch):
    """Limbs may be there for other products of the same activations, which have few columns: a CPU without AMX has no tiles for
    the many columns of this one, and their code would end the process. Nor has a product with a named instruction set."""
    asked = []
    monkeypatch.setattr(amx, "available", lambda: available)
    monkeypatch.setattr(mul_mat, "compiled_unit", lambda *arguments: asked.append(arguments) or compiled_unit(arguments[0]))
    fmt, rng = format_of("Q4_0"), seeded("tiles or not")
    data = random_weight(fmt, 33, CHUNK, rng)
    x, words = product_input("Q4_0", activations(17, CHUNK, rng)).arrays, tiles(fmt, data, CHUNK)
    out = np.zeros((17, 33), np.float32)
    for isa in None, "plain":
        Products([("Q4_0", words, out)], x, CHUNK, np.empty(limbs_shape(17, 1), np.uint8), isa)()
        assert_bitwise_equal(out, run(reference_arrays("Q4_0"), words, x, 17, 33), f"{isa}")
    assert asked == [("Q4_0", None, amx.tiles if available else None), ("Q4_0", "plain", None)]


def test_what_has_tiles():
    assert [name for name in NAMES if format_of(name).is_quantized and not has_tiles(format_of(name))] == ["NVFP4"]
    assert not has_tiles(format_of("F16"))


@pytest.mark.parametrize("name", ["Q4_1", "F32"])
@pytest.mark.parametrize("n", [0, N_COLUMNS, N_COLUMNS + 1, 2 * N_COLUMNS + BLOCK + 1])
def test_columns_in_several_units(name, n):
    fmt, rng = format_of(name), seeded(f"{name} {n}")
    check(fmt, random_weight(fmt, 33, CHUNK, rng), activations(n, CHUNK, rng), [33], [n])


@pytest.mark.parametrize("name", ["Q4_1", "F32"])
def test_units_in_parallel(name):
    fmt, rng, n_rows, n_cols, n = format_of(name), seeded(f"parallel {name}"), 65, 3 * CHUNK, 345
    assert n_rows * n_cols * n >= PARALLEL, "too little work to be shared"
    check(fmt, random_weight(fmt, n_rows, n_cols, rng), activations(n, n_cols, rng), [n_rows], [n])


def test_spans():
    """Columns that may be summed in 32 bits before they are carried over: the bound of the table,
    worked out by hand for the largest levels."""
    assert {name: form_of(format_of(name)).span for name in ("Q8_0", "Q2_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "NVFP4")} == {
        "Q8_0": 32, "Q2_K": 256, "Q4_K": 128, "Q5_K": 64, "Q6_K": 32, "IQ4_XS": 32, "NVFP4": 16}


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("types", [("Q4_K", "Q6_K", "Q4_K"), ("F16", "F32", "BF16")], ids="-".join)
def test_matrices_that_are_one_job(types, biased):
    """Of other types and other numbers of rows; enough work for two threads, and too little."""
    rng = seeded(f"one job {types} {biased}")
    for n, n_cols in (1, 512), (3, 512), (2, 256), (130, 512):
        n_rows = (257, 64, 33) if n_cols == 512 else (1, 32, 2)
        matrices = [matrix(*each, n_cols, rng) for each in zip(types, n_rows)]
        biases = [rng.standard_normal(rows).astype(np.float32) for rows in n_rows] if biased else []
        x = product_input(types[0], activations(n, n_cols, rng))
        for n_threads in THREADS:
            threads.set_num_threads(n_threads)
            compare(f"{types}, n={n}, k={n_cols}, threads={n_threads}", "mul_mat_qkv", *matrices, x, *biases)


def test_refusals():
    words, out = np.zeros(tile.tile_bytes("Q4_0") // 4, np.uint32), np.zeros((2, 32), np.float32)
    q, d, sums = np.zeros((2, 256), np.int16), np.zeros((2, 1), np.float32), np.zeros((2, 16), np.int32)
    kernel = mul_mat_arrays("Q4_0")
    kernel(words, q, d, sums, out)
    for wrong in q.astype(np.int32), q.T.copy().T, q[0]:
        with pytest.raises(AssertionError, match=r"mul_mat: Q4_0: arrays \[.*\], not \[.*\], or not contiguous"):
            kernel(words, wrong, d, sums, out)
    with pytest.raises(AssertionError, match=r"mul_mat: Q4_0 tiles of 33 rows x 1 chunks are 2304 words, got 1152"):
        kernel(words, q, d, sums, np.zeros((2, 33), np.float32))
    with pytest.raises(AssertionError, match=r"mul_mat: Q4_0: x \(2, 256\), \[\(2, 1\), \(2, 16\), \(3,\)\]"):
        kernel(words, q, d, sums, np.zeros((3, 32), np.float32))
    with pytest.raises(ValueError, match="mul_mat: unknown instruction set 'mmx'; known: avx512vnni, avx512, avx2, plain"):
        mul_mat_arrays("Q4_0", "mmx")
    with pytest.raises(ValueError, match="mul_mat: unknown tensor type 'Q9_9'"):
        mul_mat_arrays("Q9_9")
