"""The real model, where it is to be had: tests that need it skip with the reason when it cannot be pulled."""
import io
from functools import lru_cache
from pathlib import Path

import gguf
import pytest


@lru_cache(None)
def path():
    from ggml_py.base.errors import UserError
    from ggml_py.files.pull import pull
    try:
        return pull("smollm2", io.StringIO())
    except UserError as error:
        return error


def require():
    found = path()
    if isinstance(found, Exception):
        pytest.skip(f"needs SmolLM2-135M, which cannot be pulled: {found}")
    return found


def write_f32_copy(source: Path, path: Path) -> Path:
    """The same model with every tensor dequantized to F32, without its tokenizer."""
    from ggml_py.files.gguf import GGUFFile
    from ggml_py.quant.dequantize import dequantize
    with GGUFFile.open(source) as file:
        arch = file.get("general.architecture", "str")
        w = gguf.GGUFWriter(path, arch)
        for key, value in file.metadata.items():
            if key.startswith(f"{arch}."):
                {"UINT32": w.add_uint32, "FLOAT32": w.add_float32}[file.metadata_types[key].name](key, value)
        w.add_tokenizer_model("no_vocab")
        for name, info in file.tensors.items():
            w.add_tensor(name, dequantize(file.data(name), info.type.name, tuple(reversed(info.shape)), name))
        w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    return path
