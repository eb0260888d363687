"""What encoders found to what the fields of a block hold: arrays by the names that `layouts` has, or those of fields of bytes.

codes: of columns, pairs or codebook entries; j: numbers of the integer scales; selected: of the table of each sub-block. All are
unsigned [n_blocks, items of a block].
"""
import numpy as np

from .packing import base_three, bit_fields, little_endian


# Types of levels: (codes, j, selected)

def as_they_are(codes, j, selected):
    return {"codes": codes, "scales": j, "selected": selected}


def signed_bytes(codes, j, selected):
    return {"codes": codes, "scales": j ^ 128, "sc": j ^ 128, "selected": selected}


def odd_with_signs(codes, j, selected):
    """isc = 2 j - 31: a sign, and (|isc| - 1) / 2 in four bits."""
    minus = j < 16
    return {"codes": codes, "scales": np.where(minus, 15 - j, j - 16), "signs": minus.astype(np.uint8), "selected": selected}


def odd_and_selected(codes, j, selected):
    return {"codes": codes, "sc": 2 * j | selected}


def upper_twos(codes, j, selected):
    return {"codes": codes, "scales": j, "x": little_endian(bit_fields(j >> 4, 2, 8), 2)}


def bits(a):
    """A byte of the lowest bits of eight."""
    return np.packbits(a & 1, axis=1, bitorder="little")


def selected_and_fifth_bits(codes, j, selected):
    return {"codes": codes, "scales": j, "x": np.concatenate([bits(selected), bits(j >> 4)], axis=1)}


def fifth_bits_and_selected(codes, j, selected):
    return {"codes": codes, "scales": j, "x": np.concatenate([bits(j >> 4), bits(selected)], axis=1)}


def in_base_three(codes, j, selected):
    """The bytes of TQ1_0 (`ternary.tq1_0`): digits of columns [n_blocks, 256], five in a byte, four in the last ones."""
    last = codes[:, 240:].reshape(-1, 4, 4)
    qs = [base_three(codes[:, :160].reshape(-1, 5, 32)), base_three(codes[:, 160:240].reshape(-1, 5, 16))]
    return {"qs": np.concatenate(qs, axis=1), "qh": base_three(np.concatenate([last, np.zeros_like(last[:, :1])], axis=1))}


def gray(codes, j, selected):
    """The words of IQ4_KSS (`ik_quants.iq4_kss`): [n_blocks, 8, 8] of 16 bits, four codes as w = v ^ v >> 1, whose lowest bit of
    v is 0 and makes room for a bit of the sub-block's byte."""
    low, high = codes.reshape(-1, 8, 2, 8, 2).astype(np.uint16).transpose(2, 0, 1, 3, 4)  # [n_blocks, sub-block, word, byte]
    v = (low | high << 4) @ np.array([1, 256], np.uint16)
    for shift in 1, 2, 4, 8:
        v ^= v >> shift
    sc = 2 * j | selected
    bit = sc[:, :, None] >> np.arange(8, dtype=np.uint8) & 1
    return {"qs": little_endian((v | bit).reshape(len(codes), -1), 2)}


# Codebooks: (codes, j, selected, signs, bytes of d)

def low_bytes(codes):
    return (codes & 255).astype(np.uint8)


def sign_words(signs, j):
    """Four times seven signs, then the scale in four bits: uint64 [n_blocks, subs]."""
    return bit_fields(signs & 127, 7, 4) | j.astype(np.uint64) << np.uint64(28)


def iq2_xxs(codes, j, selected, signs, d):
    words = bit_fields(codes, 8, 4) | sign_words(signs, j) << np.uint64(32)
    return {"qs": little_endian(words, 8)}


def iq2_xs(codes, j, selected, signs, d):
    return {"qs": little_endian(codes | (signs & 127).astype(np.uint16) << 9, 2), "scales": little_endian(bit_fields(j, 4, 2), 1)}


def iq2_s(codes, j, selected, signs, d):
    return {"qs": low_bytes(codes), "qh": little_endian(bit_fields(codes >> 8, 2, 4), 1), "signs": signs,
            "scales": little_endian(bit_fields(j, 4, 2), 1)}


def iq3_xxs(codes, j, selected, signs, d):
    return {"qs": low_bytes(codes), "scales": little_endian(sign_words(signs, j), 4)}


def iq3_s(codes, j, selected, signs, d):
    return {"qs": low_bytes(codes), "qh": little_endian(bit_fields(codes >> 8, 1, 8), 1), "signs": signs, "scales": j}


def iq1_s(codes, j, selected, signs, d):
    upper = bit_fields(codes >> 8, 3, 4) | j.astype(np.uint64) << np.uint64(12) | selected.astype(np.uint64) << np.uint64(15)
    return {"qs": low_bytes(codes), "qh": little_endian(upper, 2)}


def iq1_m(codes, j, selected, signs, d):
    """Entries from 2048 on are those with minus; d's bits are in the tops of four words."""
    bits = d.view("<u2").astype(np.uint64) >> np.array([0, 4, 8, 12], np.uint64) & np.uint64(15)
    return {"qs": low_bytes(codes), "qh": little_endian(bit_fields(codes >> 8, 4, 2), 1),
            "scales": little_endian(bit_fields(j, 3, 4) | bits << np.uint64(12), 2)}
