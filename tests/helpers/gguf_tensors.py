"""Tensors of any type of the format table in a file that `gguf.GGUFWriter` writes, which knows its own types alone."""
import gguf

from ggml_py.quant.formats import format_of


def add_tensor(writer: gguf.GGUFWriter, name: str, data, type_, shape: tuple[int, ...]) -> None:
    """data: uint8, the bytes of the rows, with `nbytes`; shape: numpy's, of values."""
    writer.tensors[-1][name] = gguf.gguf_writer.TensorInfo(shape, format_of(type_).type_id, data.nbytes, data)
