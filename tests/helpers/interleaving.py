"""Interleaves rows of a plain type: the inverse of `Interleaved.plain_rows`, solved bit by bit."""
import numpy as np

from ggml_py.quant.interleaved import HEADER, Interleaved


def equations(t: Interleaved):
    """(plain bit, group bits): bits of a group's plain rows and of its bytes, of rows of one block."""
    starts, at = {HEADER: 0}, t.n_rows * t.header_bytes
    for field, size in t.fields:
        starts[field], at = at, at + size
    target = 0
    for k in range(t.n_rows):
        for field, size in (*t.plain.header, *t.plain.fields):
            for i in range(size):
                for bit in range(8):
                    yield target, [8 * (starts[source] + byte) + place for source, byte, place in t.source(k, field, i, bit)]
                    target += 1


def interleaved(rows: np.ndarray, t: Interleaved, n_cols: int) -> np.ndarray:
    """uint8 [n_rows, plain row bytes] -> uint8 [n_rows, row bytes], groups as in a file."""
    n_groups, n_blocks = len(rows) // t.n_rows, n_cols // t.plain.block_size
    header, blocks = rows[:, :t.plain.header_bytes], rows[:, t.plain.header_bytes:].reshape(len(rows), n_blocks, -1)
    # [group, block, row, header and block]
    whole = np.concatenate([np.broadcast_to(header[:, None], (len(rows), n_blocks, header.shape[1])), blocks], axis=2)
    whole = whole.reshape(n_groups, t.n_rows, n_blocks, -1).swapaxes(1, 2).reshape(n_groups, n_blocks, -1)
    bits = np.unpackbits(whole, axis=2, bitorder="little")
    found, left = {}, list(equations(t))
    while left:
        still = []
        for target, places in left:
            unknown = [place for place in places if place not in found]
            if len(unknown) == 1:
                found[unknown[0]] = bits[..., target] ^ sum(found[place] for place in places if place in found) % 2
            elif unknown:
                still.append((target, places))
        assert len(still) < len(left), t.name
        left = still
    n_header = t.n_rows * t.header_bytes
    assert len(found) == 8 * (n_header + t.n_rows * t.type_size), f"{t.name}: {len(found)} bits"
    group = np.packbits(np.stack([found[i] for i in range(len(found))], axis=-1).astype(np.uint8), axis=2, bitorder="little")
    return np.concatenate([group[:, 0, :n_header], group[:, :, n_header:].reshape(n_groups, -1)], axis=1).reshape(len(rows), -1)
