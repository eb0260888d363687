"""Rows for the encoders, and digests of their bytes."""
from hashlib import sha256
from zlib import crc32

import numpy as np

import ggml_py.kernels.compile  # noqa: F401 (keeps what is compiled on disk)
from ggml_py.quant.encode import ENCODERS
from ggml_py.quant.formats import FORMATS
from ggml_py.quant.quantize import quantize

QUANTIZED = [name for name in ENCODERS if FORMATS[name].is_quantized]


def random_rows(name, n_rows=3, n_cols=512):
    return np.random.default_rng(crc32(name.encode())).standard_normal((n_rows, n_cols)).astype(np.float32)


def random_importance(name, n_cols=512):
    x = np.random.default_rng(crc32(f"{name} importance".encode())).random(n_cols, np.float32)
    return x * x * x  # numpy's power would depend on the CPU


def digests() -> dict[str, str]:
    """Of each type's bytes, without and with an importance matrix."""
    found = {}
    for name in QUANTIZED:
        x = random_rows(name)
        both = quantize(x, name), quantize(x, name, imatrix=random_importance(name))
        found[name] = sha256(b"".join(data.tobytes() for data in both)).hexdigest()
    return found
