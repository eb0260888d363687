"""The format table, and every unpacking: equal to gguf bit for bit, as plain Python, and as PTX without float64."""
from itertools import chain
from types import SimpleNamespace
from zlib import crc32

import numba
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from ggml_py.quant import tile
from ggml_py.quant.dequantize import CPU, dequantize
from ggml_py.quant.formats import CHUNK, FORMATS, format_of
from ggml_py.quant.i_quants import codebook
from ik_reference import dequantized
from places import REFERENCE
from ggml_py.quant.words import Parts, Primitives, negated, primitives, signs8, unpacker

QUANTIZED = [fmt.name for fmt in FORMATS.values() if fmt.is_quantized]
FLOATS = [fmt.name for fmt in FORMATS.values() if fmt.values]


def random_bytes(fmt, n_rows, n_cols):
    rng = np.random.default_rng(crc32(f"{fmt.name} {n_rows} {n_cols}".encode()))
    return rng.integers(0, 256, (n_rows, fmt.row_bytes(n_cols)), dtype=np.uint8)


def reference(data, fmt):
    """gguf's dequantization, and our own of what gguf lacks: ik_llama.cpp's types, and Q1_0: bit c of the 16 bytes after d is
    column c, set for +d, clear for -d."""
    with np.errstate(all="ignore"):
        if fmt.own_id is not None:
            return dequantized(data, fmt)
        if fmt.name == "Q1_0":
            blocks = data.reshape(-1, 18)
            d = blocks[:, :2].copy().view(np.float16).astype(np.float32)
            bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
            return np.where(bits == 1, d, -d).reshape(len(data), -1)
        return quants.dequantize(data, fmt.type_id)


def assert_same_values(fmt, data, ours, theirs):
    """Bit patterns, but any NaN for any NaN; a mismatch is reported with the first bad block's bytes."""
    assert ours.dtype == theirs.dtype == np.float32 and ours.shape == theirs.shape
    bad = (ours.view(np.uint32) != theirs.view(np.uint32)) & ~(np.isnan(ours) & np.isnan(theirs))
    if bad.any():
        row, col = np.argwhere(bad)[0]
        block = data[row, fmt.header_bytes:].reshape(-1, fmt.type_size)[col // fmt.block_size]
        raise AssertionError(f"{fmt.name}: {bad.sum()} of {bad.size} differ, first at ({row}, {col}): "
                             f"{ours[row, col].view(np.uint32):#010x} != {theirs[row, col].view(np.uint32):#010x} "
                             f"({ours[row, col]}, {theirs[row, col]}), block {block.tobytes().hex()}")


# The table

def test_table_has_every_type_of_gguf():
    intermediate = {"Q8_1", "Q8_K"}  # of dot products only: no tensor in a file has them
    own = {fmt.name for fmt in FORMATS.values() if fmt.own_id is not None}
    assert set(FORMATS) - own == {t.name for t in GGMLQuantizationType} - intermediate
    assert not {FORMATS[name].type_id for name in own} & {int(t) for t in GGMLQuantizationType}


@pytest.mark.parametrize("name", FORMATS)
def test_lookup(name):
    fmt = FORMATS[name]
    assert format_of(name) is format_of(int(fmt.type_id)) is format_of(fmt.type_id) is format_of(fmt) is fmt


@pytest.mark.parametrize("unknown", ["Q9_9", "q4_k", 7777, -1, 9])
def test_unknown_type_lists_the_known_ones(unknown):
    with pytest.raises(ValueError, match="unknown tensor type") as error:
        format_of(unknown, "blk.0.ffn_up.weight")
    message = str(error.value)
    assert message.startswith(f"blk.0.ffn_up.weight: unknown tensor type {unknown!r}; known: F32 (0), F16 (1)")
    assert all(f"{fmt.name} ({int(fmt.type_id)})" in message for fmt in FORMATS.values())


@pytest.mark.parametrize("name", QUANTIZED)
def test_bounds_keep_integer_sums_exact(name):
    fmt = FORMATS[name]
    assert fmt.sub in (16, 32) and fmt.group in (16, 32, 64, 128, 256)
    assert fmt.group % fmt.sub == 0 and fmt.block_size % fmt.sub == 0
    product = fmt.max_level * fmt.max_isc
    assert fmt.max_level <= 128 and product < 2**15        # levels are int8, level * isc int16
    assert fmt.group * product * 127 < 2**31               # one limb over a group
    assert CHUNK * product * 16256 < 2**53                 # both limbs over a chunk, exact as float64 or int64
    assert fmt.group * fmt.max_imin * 16256 < 2**31        # minima times sums of q


@pytest.mark.parametrize("name", [fmt.name for fmt in FORMATS.values() if fmt.planes])
def test_chunk_splits_into_pieces_words_halves(name):
    fmt = FORMATS[name]
    assert fmt.chunk_bytes == 16 * fmt.n_pieces + 4 * fmt.n_words + 2 * fmt.n_halves
    assert fmt.chunk_bytes == fmt.header_bytes + CHUNK // fmt.block_size * fmt.type_size
    assert fmt.n_words < 4 and fmt.n_halves < 2
    assert {field for plane in fmt.planes for field in plane} == {field for field, _ in (*fmt.header, *fmt.fields)}


def test_row_that_is_no_whole_number_of_blocks():
    message = r"^blk\.0\.ffn_up\.weight: Q4_K rows must be a multiple of 256 values, got 4000$"
    with pytest.raises(ValueError, match=message):
        FORMATS["Q4_K"].row_bytes(4000, "blk.0.ffn_up.weight")
    with pytest.raises(ValueError, match=message):
        dequantize(np.zeros(2250, np.uint8), "Q4_K", (1, 4000), "blk.0.ffn_up.weight")
    with pytest.raises(ValueError, match=r"^w: Q8_0 of shape \(2, 64\) takes 136 bytes, got 135$"):
        dequantize(np.zeros(135, np.uint8), "Q8_0", (2, 64), "w")


# Unpacking

@pytest.mark.parametrize("name", QUANTIZED)
def test_dequantize_equals_the_definition(name):
    """20,480 random blocks, NaN and infinite scales among them, and rows of zero blocks."""
    fmt = FORMATS[name]
    data = random_bytes(fmt, 80, 256 * fmt.block_size)
    data[[0, 47]] = 0
    assert_same_values(fmt, data, dequantize(data, name, (80, 256 * fmt.block_size)), reference(data, fmt))


@pytest.mark.parametrize("name", [fmt.name for fmt in FORMATS.values() if fmt.own_id is not None and fmt.is_in_files])
def test_dequantize_equals_ik_llama_cpp(name):
    """Rows of random bytes and of its own quantizers: what its products take, and where it has no such array, its `to_float`."""
    path = REFERENCE / "quants" / "ik.npz"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    with np.load(path) as vectors:
        data = vectors[f"{name}.bytes"]
        values = vectors[f"{name}.matmul" if f"{name}.matmul" in vectors else f"{name}.values"]
    found = dequantize(data, name, values.shape)
    if name == "IQ3_KT":  # whose levels are integers, without a negative zero
        found, values = found + np.float32(0), values + np.float32(0)
    assert_same_values(FORMATS[name], data, found, values)


@pytest.mark.parametrize("n_blocks", [1, 3, 9])
@pytest.mark.parametrize("name", ["Q1_0", "Q4_1", "Q6_K", "NVFP4", "Q6_0", "IQ2_KS", "IQ4_KSS"])
def test_dequantize_partial_chunks_and_tiles(name, n_blocks):
    fmt = FORMATS[name]
    data = random_bytes(fmt, 33, n_blocks * fmt.block_size)
    ours = dequantize(data, fmt.type_id, (3, 11, n_blocks * fmt.block_size))
    assert_same_values(fmt, data, ours.reshape(33, -1), reference(data, fmt))


@pytest.mark.parametrize("name", FLOATS)
def test_dequantize_floats(name):
    data = random_bytes(FORMATS[name], 5, 1000)
    assert_same_values(FORMATS[name], data, dequantize(data, name, (5, 1000)), reference(data, FORMATS[name]))


def test_dequantize_refuses_plain_types():
    with pytest.raises(ValueError, match="^ids: I32 is no weight type; dequantize takes float and quantized types$"):
        dequantize(np.zeros(4, np.int32), "I32", (4,), "ids")


def quarter_columns(q, pairs):
    """The columns, of 32, of the two words of quarter q."""
    first, second = (8 * q, 8 * q + 4) if pairs else (4 * q, 16 + 4 * q)
    return [*range(first, first + 4), *range(second, second + 4)]


def assert_levels_of_quarters(fmt, pairs, quarters, levels):
    """quarters: int32 [8, 4, 2], levels: int8 [256]."""
    codes = np.empty((8, 32), np.int8)
    for q in range(4):
        codes[:, quarter_columns(q, pairs)] = np.ascontiguousarray(quarters[:, q]).view(np.int8)
    assert fmt.zero == 0 or codes.min() >= 0
    assert np.array_equal(codes.reshape(CHUNK).astype(int) - fmt.zero, levels)


def plain(function):
    return function


def plain_chunk(fmt, tiles, n_chunks, row, chunk):
    """The source run as plain Python over one chunk: levels [256], isc and imin [256 / sub], d and m [256 / group]."""
    levels, sub, group, quarter, pairs = fmt.unpack(primitives(plain), *tile.loads(fmt, plain))[:5]
    t = (tiles.reshape(-1).view(np.uint32), (row // 32 * n_chunks + chunk) * tile.tile_bytes(fmt) // 4, row % 32)
    level_words = [levels(t, j) for j in range(8)]
    quarters = [[quarter(t, j, q) for q in range(4)] for j in range(8)]
    assert all(type(word) is np.int32 for words in (*level_words, *chain(*quarters)) for word in words)
    assert_levels_of_quarters(fmt, pairs, np.array(quarters, np.int32),
                              np.array(level_words, np.int32).view(np.int8).reshape(CHUNK))
    scales, floats = [sub(t, i) for i in range(CHUNK // fmt.sub)], [group(t, g) for g in range(CHUNK // fmt.group)]
    assert all(type(v) is np.int32 for pair in scales for v in pair)
    assert all(type(v) is np.float32 for pair in floats for v in pair)
    return np.array(level_words, np.int32).view(np.int8).reshape(CHUNK), np.array(scales).T, np.array(floats).T


@pytest.mark.parametrize("name", QUANTIZED)
def test_plain_python_equals_gguf_within_the_bounds(name):
    """What runs in the CUDA simulator. Integer overflow, which warns in numpy scalars, is an error here."""
    fmt = FORMATS[name]
    n_chunks = 3
    data = random_bytes(fmt, 33, n_chunks * CHUNK)
    expected = reference(data, fmt)
    tiles = tile.pack(data, fmt, 33, n_chunks * CHUNK)
    for row, chunk in ((0, 0), (1, 1), (31, 2), (32, 0), (32, 2)):
        with np.errstate(over="raise"):
            levels, (isc, imin), (d, m) = plain_chunk(fmt, tiles, n_chunks, row, chunk)
        assert abs(
            levels.astype(int)).max() <= fmt.max_level and abs(isc).max() <= fmt.max_isc and abs(imin).max() <= fmt.max_imin
        with np.errstate(all="ignore"):
            scale = np.repeat(np.repeat(d, fmt.group // fmt.sub) * isc.astype(np.float32), fmt.sub)
            minimum = np.repeat(np.repeat(m, fmt.group // fmt.sub) * imin.astype(np.float32), fmt.sub)
            values = scale * levels.astype(np.float32)
            values = values - minimum if fmt.has_min else values
        assert_same_values(fmt, data[row:row + 1, fmt.row_bytes(CHUNK) * chunk:fmt.row_bytes(CHUNK) * (chunk + 1)], values[None],
                           expected[row:row + 1, CHUNK * chunk:CHUNK * (chunk + 1)])


@pytest.mark.parametrize("name", FLOATS)
def test_plain_python_float_values(name):
    fmt = FORMATS[name]
    data = random_bytes(fmt, 33, CHUNK)
    words = tile.pack(data, fmt, 33, CHUNK).reshape(-1).view(np.uint32)
    values = fmt.values(primitives(plain), tile.loads(fmt, plain)[0])
    for row in (0, 31, 32):
        ours = np.array([values((words, row // 32 * tile.tile_bytes(fmt) // 4, row % 32), q) for q in range(CHUNK // 8)],
                        np.float32)
        assert_same_values(fmt, data[row:row + 1], ours.reshape(1, -1), reference(data[row:row + 1], fmt))


@pytest.mark.parametrize("name", QUANTIZED)
def test_compiled_quarters_of_run_time_places(name):
    """j and q unknown to the compiler, as they are where lanes share a row."""
    fmt = FORMATS[name]
    levels, _, _, quarter, pairs = fmt.unpack(CPU, *tile.loads(fmt, CPU.jit))[:5]

    @numba.njit(error_model="numpy")
    def fill(words, row, quarters, all_levels):
        t = words, 0, row
        for j in range(8):
            for q in range(4):
                quarters[j, q, 0], quarters[j, q, 1] = quarter(t, j, q)
            w = levels(t, j)
            for k in range(8):
                all_levels[j, k] = w[k]

    words = tile.pack(random_bytes(fmt, 32, CHUNK), fmt, 32, CHUNK).reshape(-1).view(np.uint32)
    quarters, all_levels = np.empty((8, 4, 2), np.int32), np.empty((8, 8), np.int32)
    for row in range(32):
        fill(words, row, quarters, all_levels)
        assert_levels_of_quarters(fmt, pairs, quarters, all_levels.view(np.int8).reshape(CHUNK))


# Primitives

def test_f16_of_every_pattern():
    to_f32 = primitives(plain).f16
    ours = np.array([to_f32(np.uint32(h)) for h in range(1 << 16)])
    with np.errstate(invalid="ignore"):
        theirs = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    assert_same_values(FORMATS["F16"], np.arange(1 << 16, dtype=np.uint16).view(np.uint8)[None], ours[None], theirs[None])


def as_bytes(word):
    return np.array([word], np.int32).view(np.int8).tolist()


def test_levels_of_codes():
    """Every code and zero, in each byte beside the extremes; codes of zero 0 are taken as they are."""
    for zero in (0, 1, 8, 32, 127):
        for code in range(128):
            words = np.array([code, 0, 127, code, 127, code, 127, 0], np.uint8).view(np.int32)
            with np.errstate(over="raise"):
                levels = unpacker(primitives(plain), zero,
                                  Parts(lambda t, j, q: (words[0], words[1]), None, None)).levels(None, 0)
            expected = [code - zero, -zero, 127 - zero, code - zero], [127 - zero, code - zero, 127 - zero, -zero]
            assert [as_bytes(w) for w in levels] == [expected[k >> 2] for k in range(8)]


def test_signs():
    p, values = primitives(plain), (1, 62, 43, 127)
    negate, word = negated(p), np.array(values, np.uint8).view(np.uint32)[0]
    with np.errstate(over="raise"):
        for parity in (False, True):
            signs = signs8(p, parity)
            for s in range(256):
                bits = [s >> k & 1 for k in range(8)]
                if parity:
                    bits[7] = sum(bits[:7]) & 1
                low, high = signs(np.uint32(s | 0xabc00))
                assert np.array([low, high]).view(np.uint8).tolist() == bits
                assert as_bytes(negate(word, low)) == [-v if sign else v for v, sign in zip(values, bits)]


def test_signed_entries():
    levels = codebook("IQ2_XS")
    with np.errstate(over="raise"):
        for parity in (False, True):
            eight = primitives(plain).signed8(levels, parity)
            for i in (0, 1, 311, 511):
                for s in range(0, 256, 5):
                    bits = np.array([s >> k & 1 for k in range(8)])
                    if parity:
                        bits[7] = bits[:7].sum() & 1
                    assert [*chain(*map(as_bytes, eight(None, i, np.uint32(s))))] == (levels[i] * (1 - 2 * bits)).tolist()


@pytest.mark.parametrize("n", [4, 8, 16])
def test_lookup_of_every_nibble(n):
    levels, last = tuple(range(-128, 112, 15))[:n], n - 1
    lookup = primitives(plain).lookup_nibbles(levels)
    for low in range(n):
        for high in range(n):
            word = np.array([low | high << 4, last << 4, last, high | low << 4], np.uint8).view(np.uint32)[0]
            a, b = lookup(word)
            assert as_bytes(a) == [levels[low], levels[0], levels[last], levels[high]]
            assert as_bytes(b) == [levels[high], levels[last], levels[0], levels[low]]


def test_native_primitives_reach_those_built_on_them():
    calls = []

    def shr(w, s):
        calls.append(s)
        return np.uint32(w) >> np.uint32(s)

    p = primitives(plain, shr=shr)
    word = np.uint32(0x12345678)
    assert p.shr is shr and p.byte(word, 2) == 0x34 and p.half(word, 1) == 0x1234 and calls == [16, 16]
    with pytest.raises(TypeError, match=f"^primitives: unknown shl; known: {', '.join(Primitives._fields)}$"):
        primitives(plain, shl=shr)


# Compiled for CUDA, which needs no GPU

@pytest.fixture(scope="module")
def cuda_target():
    """(cuda, jit, primitives): numba-cuda asks the current device for its compute capability when one device function calls
    another."""
    cuda = pytest.importorskip("numba.cuda")
    dispatcher = pytest.importorskip("numba.cuda.dispatcher")
    from numba import config
    if config.ENABLE_CUDASIM:
        pytest.skip("the CUDA simulator compiles nothing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=(9, 0)))
        jit = cuda.jit(device=True)
        yield cuda, jit, primitives(jit)


@pytest.mark.parametrize("name", QUANTIZED + FLOATS)
def test_ptx_has_no_float64_and_no_local_memory(name, cuda_target):
    from numba import float32, int32, types, uint32
    cuda, jit, p = cuda_target
    fmt = FORMATS[name]
    loads = tile.loads(fmt, jit)
    if fmt.is_quantized:
        unpack = fmt.unpack(p, *loads)
        functions = {"levels": (unpack.levels, types.UniTuple(int32, 8)), "quarter": (unpack.quarter, types.UniTuple(int32, 2)),
                     "sub": (unpack.sub, types.UniTuple(int32, 2)), "group": (unpack.group, types.UniTuple(float32, 2))}
    else:
        functions = {"values": (fmt.values(p, loads[0]), types.UniTuple(float32, 8))}
    t = types.Tuple((uint32[::1], int32, int32))
    for part, (function, result) in functions.items():
        ptx, returned = cuda.compile_ptx(function.py_func, (t, *[int32] * (2 if part == "quarter" else 1)), device=True,
                                         cc=(9, 0))
        assert returned == result, part
        for fragment in (".f64", "__local_depot", "call.uni", "div.", "add.f32", "fma."):
            assert fragment not in ptx, (part, fragment)
