"""kernels/cuda/weights: the unpackings with the device's own primitives equal the portable ones;
words of a tile are loaded with constant offsets."""
import re
from zlib import crc32

import numpy as np
import pytest

from cuda_simulator import run_in_simulator
from ggml_py.quant import tile
from ggml_py.quant.formats import CHUNK, FORMATS
from ggml_py.quant.fp4 import E2M1_LEVELS
from ggml_py.quant.ik_quants import (FIVE_BIT_CUBIC, FIVE_BIT_LEVELS, PAIR_LEVELS, SIX_BIT_CUBIC, SIX_BIT_LEVELS,
                                     THREE_BIT_LEVELS, TWO_BIT_LEVELS)
from ggml_py.quant.legacy import IQ4_LEVELS
from ggml_py.quant.words import ONES, SUMMED, primitives

QUANTIZED = [fmt.name for fmt in FORMATS.values() if fmt.is_quantized]


def test_in_the_simulator():
    run_in_simulator(__file__)


def random_tile(fmt):
    rng = np.random.default_rng(crc32(fmt.name.encode()))
    return tile.pack(rng.integers(0, 256, (32, fmt.row_bytes(CHUNK)), dtype=np.uint8), fmt, 32, CHUNK).reshape(-1).view(np.uint32)


@pytest.mark.parametrize("name", QUANTIZED)
def simulate_shared_unpacker(name):
    """A tile behind the codebooks and a gap, in shared memory."""
    from ggml_py.kernels.cuda.weights import shared_unpacker
    fmt, words = FORMATS[name], random_tile(FORMATS[name])
    portable, t = fmt.unpack(primitives(lambda function: function), *tile.loads(fmt, lambda function: function)), (words, 0)
    device, n_entries, entry = shared_unpacker(name)
    shared = np.concatenate([np.array([entry(i) for i in range(n_entries)], np.uint32), np.zeros(4, np.uint32), words])
    assert device.pairs == portable.pairs
    for row in (0, 1, 17, 31):
        ours, t = (shared, n_entries + 4, row), (words, 0, row)
        for j in range(8):
            assert device.levels(ours, j) == portable.levels(t, j), (row, j)
            for q in range(4):
                assert device.quarter(ours, j, q) == portable.quarter(t, j, q), (row, j, q)
        for i in range(CHUNK // fmt.sub):
            assert device.sub(ours, i) == portable.sub(t, i), (row, i)
        if device.packed:
            pairs = np.array([portable.sub(t, i) for i in range(CHUNK // fmt.sub)]).T[:2 if fmt.has_min else 1]
            assert pairs.astype(np.uint8).tobytes() == np.array(device.packed(ours)).tobytes(), row
            assert device.packed(ours) == portable.packed(t), row
        if device.bit_fields:
            check_fields(fmt, device, ours)
            check_fields(fmt, portable, t)
        for g in range(CHUNK // fmt.group):
            a, b = device.group(ours, g), portable.group(t, g)
            assert np.array_equal(np.array(a), np.array(b), equal_nan=True), (row, g)


def check_fields(fmt, unpack, t):
    """Codes and scales of `BitFields` are those of `quarter` and `sub`."""
    width, words, scales, offset, tops = unpack.bit_fields
    as_bytes = lambda words: np.array(words, np.int64).astype(np.uint32).view(np.uint8)
    for j in range(8):
        for q in range(4):
            codes = as_bytes(words(t, j & 6, q)) >> width * (j % (8 // width)) & (1 << width) - 1
            if tops:
                codes |= (as_bytes(tops(t, q)) >> j & 1) << width
            assert np.array_equal(codes, as_bytes(unpack.quarter(t, j, q))), (j, q)
    pairs = np.array([unpack.sub(t, i) for i in range(CHUNK // fmt.sub)])
    found = as_bytes(scales(t, 0)) if width == 4 else np.concatenate([as_bytes(scales(t, k)) for k in range(4)])
    if width == 2 and fmt.has_min:
        found = np.concatenate([found & 15, found >> 4])
    assert np.array_equal(found, np.concatenate([pairs[:, 0] - offset, pairs[:, 1][:len(found) - len(pairs)]]))


def of_bytes(*codes):
    return np.array(codes, np.uint8).view(np.uint32)[0]


@pytest.mark.parametrize("levels", [TWO_BIT_LEVELS, THREE_BIT_LEVELS, IQ4_LEVELS, E2M1_LEVELS],
                         ids=["2 bits", "3 bits", "IQ4", "E2M1"])
def simulate_nibbles(levels):
    """Each pair of nibbles, beside the last level: the device's words, and its terms in the order of the nibbles."""
    from ggml_py.kernels.cuda.weights import lookup_nibbles, terms
    portable, ours, of_terms = primitives(lambda f: f).lookup_nibbles(levels), lookup_nibbles(levels), terms(levels)
    last = len(levels) - 1
    for low in range(len(levels)):
        for high in range(len(levels)):
            nibbles = low, high, last, low, high, last, 0, high
            w = of_bytes(*(a | b << 4 for a, b in zip(nibbles[::2], nibbles[1::2])))
            assert ours(w) == portable(w)
            words = np.array(of_terms.of_nibbles(w), np.int32).view(np.int8).reshape(of_terms.n, 8)
            assert (words.sum(axis=0, dtype=int) + of_terms.constant).tolist() == [levels[i] for i in nibbles]


@pytest.mark.parametrize("n", range(8))
def simulate_each_nibble(n):
    """Nibble n among others, by the portable primitives and on the device."""
    from ggml_py.kernels.cuda.weights import lookup_each
    for lookup, level in (primitives(lambda f: f).lookup_each(IQ4_LEVELS), lookup_each(IQ4_LEVELS)):
        for code in range(16):
            w = np.uint32(0x5a0f91c3 & ~(15 << 4 * n) | code << 4 * n)
            assert level(lookup(w), n) == IQ4_LEVELS[code], code


@pytest.mark.parametrize("levels, cubic", [(FIVE_BIT_LEVELS, FIVE_BIT_CUBIC), (SIX_BIT_LEVELS, SIX_BIT_CUBIC)],
                         ids=["5 bits", "6 bits"])
def simulate_codes(levels, cubic):
    """The cubic is each level."""
    from ggml_py.kernels.cuda.weights import lookup_codes
    lookup = lookup_codes(levels, cubic)
    for code in range(len(levels)):
        others = 0, len(levels) - 1, code ^ 5
        for k in range(4):
            codes = *others[:k], code, *others[k:]
            for word in lookup(of_bytes(*codes), of_bytes(*codes)):
                assert np.array([word], np.int32).view(np.int8).tolist() == [levels[i] for i in codes]


def five_bit_codes(code, k):
    """Eight codes, this one in place k: (they, their nibbles, their fifth bits beside other bits)."""
    codes = [(code + 11 * (i - k)) % 32 for i in range(8)]
    pairs = list(zip(codes[::2], codes[1::2]))
    return (codes, of_bytes(*((a & 15) | (b & 15) << 4 for a, b in pairs)),
            of_bytes(*(0x37 | (a >> 4) << 3 | (b >> 4) << 7 for a, b in pairs)))


def simulate_pairs():
    """Each code of pairs, in each place: its levels."""
    from ggml_py.kernels.cuda.weights import pairs_of_codes
    of_codes = pairs_of_codes(PAIR_LEVELS)
    for code in range(32):
        for k in range(8):
            codes, nibbles, fifths = five_bit_codes(code, k)
            levels = np.array(of_codes(nibbles, fifths), np.int32).view(np.int8).reshape(8, 2)
            assert levels.tolist() == [list(PAIR_LEVELS[i]) for i in codes]


def simulate_five_bits():
    """Each code of five bits, in each place: the sum of the terms is its level."""
    from ggml_py.kernels.cuda.weights import five_bit_terms
    of_codes = five_bit_terms(FIVE_BIT_LEVELS)
    for code in range(32):
        for k in range(8):
            codes, nibbles, fifths = five_bit_codes(code, k)
            low, high = np.array(of_codes(nibbles, fifths), np.int32).view(np.int8).reshape(2, 4, 4).sum(axis=1, dtype=int)
            assert [*low, *high] == [FIVE_BIT_LEVELS[i] for i in codes]


WITH_SCALES = [name for name in QUANTIZED
               if FORMATS[name].unpack(primitives(lambda f: f), *tile.loads(FORMATS[name], lambda f: f)).scales]


@pytest.mark.parametrize("name", WITH_SCALES)
def simulate_scales(name):
    """Several scales at once are what the sub-blocks' own functions say, on the device and by the portable primitives."""
    from ggml_py.kernels.cuda.weights import shared_unpacker
    fmt, words = FORMATS[name], random_tile(FORMATS[name])
    portable = fmt.unpack(primitives(lambda function: function), *tile.loads(fmt, lambda function: function))
    device, n_entries, _ = shared_unpacker(name)
    far = getattr(portable.source, "blocks", None) is not None and fmt.sub == 16
    shared = np.concatenate([np.zeros(n_entries + 4, np.uint32), words])
    for row in (0, 5, 31):
        for p in range(4):
            first = 4 * (p % 2) + p // 2 if far else p
            behind = (0, 2, 8, 10) if far else range(0, CHUNK // fmt.sub, 4)
            for unpack, t in (portable, (words, 0, row)), (device, (shared, n_entries + 4, row)):
                loaded = unpack.scales.load(t, first)
                for n, i in enumerate(first + each for each in behind):
                    shift = portable.shift((words, 0, row), i) if portable.shift else 0
                    assert unpack.scales.take(loaded, n) == (portable.sub((words, 0, row), i)[0], shift), (row, i)


def simulate_bytes():
    """Bytes and fields of words: the device's as the portable ones."""
    from ggml_py.kernels.cuda.weights import PRIMITIVES
    portable, rng = primitives(lambda f: f), np.random.default_rng(0)
    for a, b, c, d in rng.integers(0, 1 << 32, (50, 4), dtype=np.uint32):
        assert PRIMITIVES.top_bytes(a, b, c, d) == portable.top_bytes(a, b, c, d)
        for s in range(8):
            assert PRIMITIVES.field(a, s, ONES, 4) == portable.field(a, s, ONES, 4)
        assert PRIMITIVES.bytes_of(a, b, c & 0x77777777) == portable.bytes_of(a, b, c & 0x77777777)
        for i in range(4):
            assert PRIMITIVES.signed_byte(a, i) == portable.signed_byte(a, i) == np.array([a]).view(np.int8)[i]
            for factor in 1, 16, 128, 255:
                expected = factor * int(np.array([a]).view(np.uint8)[i]) - 127
                assert PRIMITIVES.weighed(a, i, factor, -127) == portable.weighed(a, i, factor, -127) == expected
        for i, half in enumerate(np.array([a]).view(np.uint16).tolist()):
            assert PRIMITIVES.half_plus(a, i, 4096) == portable.half_plus(a, i, 4096) == half + 4096
    for first in range(0, 2 * SUMMED + 1, 4):
        sums = [min(first + i, 2 * SUMMED) for i in range(4)]
        for p in portable, PRIMITIVES:
            assert np.array([p.distances(of_bytes(*sums))]).view(np.uint8).tolist() == [abs(x - SUMMED) for x in sums]


def test_constants_are_offsets_of_loads():
    """A lane's words of a tile have one address, of what is known at run time;
    without that each load has an addition of its own."""
    from numba import cuda, types
    from numba.cuda.core import config
    from ggml_py.kernels.cuda.launch import I32, Kernel, N, compile_ptx
    from ggml_py.kernels.cuda.ptx import i32, ld, st, sts
    from ggml_py.kernels.cuda.weights import shared_unpacker
    if config.ENABLE_CUDASIM:
        pytest.skip("the CUDA simulator compiles nothing")
    quarter = shared_unpacker("Q8_0").unpacker.quarter

    def kernel(x, out, base):
        shared = cuda.shared.array(0, types.uint32)
        lane = cuda.threadIdx.x
        sts(shared, lane, ld(x, lane))
        cuda.syncthreads()
        t = shared, i32(base), lane >> 2
        a, b = quarter(t, 0, lane & 3)
        c, d = quarter(t, 5, lane & 3)
        st(out, lane, i32(a ^ b ^ c ^ d))

    ptx = compile_ptx(Kernel(kernel, (I32, I32, N), 128), (9, 0))
    loads = re.findall(r"ld\.shared\.[bu]32\s+%r\d+, \[(%rd?\d+)(?:\+(\d+))?\]", ptx)
    assert len(loads) == 4 and len({register for register, _ in loads}) == 1, ptx
    assert sorted(int(offset or 0) for _, offset in loads) == [0, 512, 5120, 5632]
