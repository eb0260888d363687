"""Random bytes of any format with scales of ordinary size, so that sums stay finite and every bit of a result counts."""
import numpy as np

from ggml_py.quant.formats import Format

EXPONENTS = {"F16": 0x3fff, "BF16": 0x3fff, "F32": 0x3fffffff}  # bits kept: values below 2 in magnitude


def random_weight(fmt: Format, n_rows: int, n_cols: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [n_rows, bytes of a row]: blocks of random bytes; float16 fields d, dmin and m, and the scale of a row's header,
    between 2^-7 and 2^-3 with random signs, exponents of MXFP4 2^-7 to 2^0."""
    fmt.row_bytes(n_cols, "random weight")
    if not fmt.is_quantized:
        x = rng.standard_normal((n_rows, n_cols)).astype(np.float32)
        if fmt.name == "BF16":
            return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return x.astype(fmt.dtype).view(np.uint8)
    blocks = rng.integers(0, 256, (n_rows, n_cols // fmt.block_size, fmt.type_size), dtype=np.uint8)
    first = 0
    for field, size in fmt.fields:
        if field in ("d", "dmin", "m") and size == 2:
            scale = np.exp2(rng.uniform(-7, -3, blocks.shape[:2])) * rng.choice([-1, 1], blocks.shape[:2])
            blocks[..., first:first + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
        elif field == "e":
            blocks[..., first] = rng.integers(120, 128, blocks.shape[:2])
        elif fmt.name == "NVFP4" and field == "d":
            blocks[..., first:first + size] = rng.integers(0x20, 0x50, (*blocks.shape[:2], size))
        elif fmt.name == "IQ1_M" and field == "scales":  # the float16 scale lies in the top nibbles of four 16-bit words
            words = blocks[..., first:first + size].view("<u2")
            d = np.exp2(rng.uniform(-7, -3, blocks.shape[:2])).astype(np.float16).view(np.uint16)
            for i in range(4):
                words[..., i] = words[..., i] & 0x0fff | (d >> (4 * i) & 0xf) << 12
        first += size
    blocks = blocks.reshape(n_rows, -1)
    if not fmt.header_bytes:
        return blocks
    d = (np.exp2(rng.uniform(-7, -3, n_rows)) * rng.choice([-1, 1], n_rows)).astype(np.float32 if fmt.header_bytes == 4 else
                                                                                      np.float16)
    return np.concatenate([d[:, None].view(np.uint8), blocks], axis=1)
