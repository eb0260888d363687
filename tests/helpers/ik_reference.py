"""The types of ik_llama.cpp by their formulas, a column at a time in numpy: an independent definition for tests."""
import numpy as np

from ggml_py.quant.ik_quants import (FIVE_BIT_LEVELS, FIVE_BIT_SHIFT, FOUR_BIT_SHIFT, MULTIPLIER, PAIR_LEVELS, SIX_BIT_LEVELS,
                                     SIX_BIT_SHIFT, THREE_BIT_LEVELS, THREE_BIT_SHIFT, TWO_BIT_LEVELS, TWO_BIT_SHIFT)
from ggml_py.quant.i_quants import codebook
from ggml_py.quant.legacy import IQ4_LEVELS

C = np.arange(256)
BY_SUB = {16: C // 16, 32: C // 32}


def bits(x, shift, n=1):
    return x.astype(np.int64) >> shift & ((1 << n) - 1)


def of_table(levels, shift, code, selected):
    return np.array(levels)[code] + shift * selected


def two_bits(qs):
    return bits(qs[:, 32 * (C // 128) + C % 32], 2 * (C // 32 % 4), 2)


def five_bit_nibbles(qs):
    return bits(qs[:, 32 * (C // 64) + C % 32], 4 * (C // 32 % 2), 4)


def four_bits(qs):
    return bits(qs[:, 16 * (C // 32) + C % 16], 4 * (C // 16 % 2), 4)


def top_bit(qh):
    return bits(qh[:, C % 32], C // 32)


def nibble_scales(b, s):
    """Two neighbours in a byte."""
    return bits(b[:, s // 2], 4 * (s % 2), 4)


def far_nibble_scales(b, s):
    """s and s + 4 in a byte."""
    return bits(b[:, s % 4], 4 * (s // 4), 4)


def trellis(start, k):
    y = start.astype(np.uint64) * np.uint64(pow(MULTIPLIER, 1, 1 << 32)) & np.uint64(0xffffffff)
    found = [y]
    for _ in range(7):
        found.append(found[-1] * np.uint64(MULTIPLIER) & np.uint64(0xffffffff))
    y = np.choose(np.broadcast_to(k, start.shape), found) & np.uint64(0x3f3f3f3f)
    return sum((y >> np.uint64(8 * i) & np.uint64(255)).astype(np.int64) for i in range(4)) - 126


def parts(name, f):
    """(isc, level), int [n, 256] of the fields uint8 [n, bytes] of blocks."""
    s = BY_SUB[16 if name in ("IQ2_K", "IQ3_K", "IQ4_K", "IQ5_K", "IQ6_K") else 32]
    word = lambda field: f[field].copy().view("<u2").reshape(len(f[field]), -1)
    x = lambda first=0: bits(word("x")[:, :1], first + s)
    match name:
        case "IQ2_K":
            return nibble_scales(f["sc"], s) - 8, of_table(TWO_BIT_LEVELS, TWO_BIT_SHIFT, two_bits(f["qs"]), x())
        case "IQ2_KS":
            return ((nibble_scales(f["sc"], s) | x(8) << 4) - 16,
                    of_table(TWO_BIT_LEVELS, TWO_BIT_SHIFT, two_bits(f["qs"]), x()))
        case "IQ2_KL":
            isc = (far_nibble_scales(f["sc"], s) | bits(word("x")[:, :1], 2 * s, 2) << 4) - 32
            j = C % 32 // 2
            code = bits(f["qs"][:, 16 * (C // 64) + j], 4 * (C // 32 % 2), 4) | bits(f["qh"][:, j], C // 32) << 4
            return isc, np.array(PAIR_LEVELS)[code, C % 2]
        case "IQ3_K" | "IQ3_KS":
            code = two_bits(f["qs"]) | top_bit(f["qh"]) << 2
            if name == "IQ3_KS":
                return (far_nibble_scales(f["sc"], s) | x() << 4) - 16, of_table(THREE_BIT_LEVELS, THREE_BIT_SHIFT, code, x(8))
            sign = bits(word("sh")[:, :1], s)
            return (2 * nibble_scales(f["sl"], s) + 1) * (1 - 2 * sign), of_table(THREE_BIT_LEVELS, THREE_BIT_SHIFT, code, x())
        case "IQ4_K" | "IQ5_K":
            isc = (nibble_scales(f["sl"], s) | bits(f["sh"][:, s // 4], 2 * (s % 4), 2) << 4) - 32
            if name == "IQ4_K":
                return isc, of_table(IQ4_LEVELS, FOUR_BIT_SHIFT, four_bits(f["qs"]), x())
            return isc, of_table(FIVE_BIT_LEVELS, FIVE_BIT_SHIFT, five_bit_nibbles(f["qs"]) | top_bit(f["qh"]) << 4, x())
        case "IQ6_K":
            code = five_bit_nibbles(f["qs"]) | bits(f["qh"][:, 32 * (C // 128) + C % 32], 2 * (C // 32 % 4), 2) << 4
            return f["sc"].view(np.int8).astype(int)[:, s], of_table(SIX_BIT_LEVELS, SIX_BIT_SHIFT, code, x())
        case "IQ4_KS" | "IQ5_KS":
            isc, selected = (f["sc"][:, s].astype(int) & 254) - 127, f["sc"][:, s].astype(int) & 1
            if name == "IQ4_KS":
                return isc, of_table(IQ4_LEVELS, FOUR_BIT_SHIFT, four_bits(f["qs"]), selected)
            return isc, of_table(FIVE_BIT_LEVELS, FIVE_BIT_SHIFT, five_bit_nibbles(f["qs"]) | top_bit(f["qh"]) << 4, selected)
        case "IQ4_KSS":
            words = word("qs").astype(int)
            scale = sum((words[:, 8 * s + k] & 1) << k for k in range(8))
            v = words & 0xfffe
            plain = (v ^ v >> 1).astype("<u2").view(np.uint8)
            return (scale & 254) - 127, of_table(IQ4_LEVELS, FOUR_BIT_SHIFT, four_bits(plain), scale & 1)
        case "IQ1_M_R1":
            h = bits(f["qh"][:, C // 16], 4 * (C // 8 % 2), 4)
            level = codebook("IQ1_M")[f["qs"][:, C // 8] | (h & 7) << 8, C % 8]
            return nibble_scales(f["scales"], C // 16), 8 * level + 1 - 2 * (h >> 3)
    table, k = np.array(IQ4_LEVELS), C % 8
    match name:
        case "IQ1_KT":
            g = C // 8
            i = (bits(f["ql"][:, g], 0, 8) | bits(f["qh"][:, g % 16], 4 * (g // 16), 4) << 8
                 | bits(f["sh"][:, g // 4], 4 + g % 4) << 12)
            return table[bits(f["sh"][:, s], 0, 4)], trellis(i + 4096, k)
        case "IQ2_KT":
            return table[far_nibble_scales(f["sc"], s)], trellis(word("ql")[:, C // 8].astype(int) + 4096, k)
        case "IQ3_KT":
            level = abs(trellis(word("ql")[:, C // 8].astype(int) + 4096, k))
            return far_nibble_scales(f["sc"], s), level * (1 - 2 * top_bit(f["qh"]))
    g, w = C // 4, f["w"].copy().view("<u4").astype(np.int64)[:, s]
    i = (bits(f["ql"][:, g], 0, 8) | bits(f["qh"][:, g % 32], 4 * (g // 32), 4) << 8 | (w >> (8 + 3 * (g % 8)) & 7) << 12)
    return ((w & 255) >> 1) - 64, trellis(i + 4096 + 32768 * (w & 1), C % 4)


def dequantized(data, fmt) -> np.ndarray:
    """float32 of rows uint8 [n, row bytes]: mul(mul(d, isc), level), each rounded."""
    if fmt.name == "Q6_0":
        blocks, c = data.reshape(-1, 26), np.arange(32)
        upper = bits(blocks[:, 2 + c % 8], 4 * (c // 8 % 2) + 2 * (c // 16), 2)
        code = bits(blocks[:, 10 + c % 16], 4 * (c // 16), 4) | upper << 4
        return (blocks[:, :2].copy().view(np.float16).astype(np.float32) * (code - 32).astype(np.float32)).reshape(len(data), -1)
    header, blocks = data[:, :fmt.header_bytes], data[:, fmt.header_bytes:].reshape(-1, fmt.type_size)
    at, fields = 0, {}
    for field, size in fmt.fields:
        fields[field], at = blocks[:, at:at + size], at + size
    d = np.repeat(header, len(blocks) // len(data), axis=0) if fmt.header_bytes else fields["d"]
    d = np.ascontiguousarray(d).view("<f4" if fmt.header_bytes == 4 else "<f2").astype(np.float32)
    d = d * np.float32({"IQ2_KT": 1.05, "IQ3_KT": 1.01, "IQ1_M_R1": 1 / 8}.get(fmt.name, 1))
    isc, level = parts(fmt.name, fields)
    return (d * isc.astype(np.float32) * level.astype(np.float32)).reshape(len(data), -1)
