"""Weights of random blocks."""
import checkout  # noqa: F401
import numpy as np

from ggml_py.quant import tile
from ggml_py.quant.formats import format_of
from random_weights import random_weight


def random_tiles(type_: str, m: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """uint8: tiles of [m, k] random blocks of finite values. A row is whole blocks: 576 columns become 768 where blocks are of
    256."""
    fmt = format_of(type_)
    k = -(-k // fmt.block_size) * fmt.block_size
    return tile.pack(random_weight(fmt, m, k, rng), fmt, m, k).reshape(-1)
