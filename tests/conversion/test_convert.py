"""New files: bytes, metadata, errors; the same for any number of threads and any slabs; whole or not there."""
import gguf
import numpy as np
import pytest
from gguf_tensors import add_tensor
from random_weights import random_weight
from tiny_models import run, write_model
from tiny_moe_models import write_moe_model

from ggml_py.base.errors import UserError
from ggml_py.conversion import convert as module
from ggml_py.conversion.convert import convert
from ggml_py.conversion.plan import Asked, keys_of, plan
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile
from ggml_py.files.gguf_writer import Entry, write_gguf
from ggml_py.quant.dequantize import dequantize
from ggml_py.quant.formats import FORMATS

NAME = "blk.1.ffn_down.weight"


def converted(source, path, type_, n_threads=1, **asked):
    with GGUFFile.open(source) as file:
        wanted = Asked(type_, **asked)
        return convert(file, plan(file, wanted), keys_of(file, wanted), path, n_threads=n_threads)


def test_a_file_is_written_again_to_the_byte(tmp_path):
    """Every kind of value, tensors of several types, an alignment of its own."""
    source = tmp_path / "source.gguf"
    w = gguf.GGUFWriter(source, "llama")
    w.add_custom_alignment(64)
    for kind, value in dict(uint8=1, int8=-1, uint16=2, int16=-2, uint32=3, int32=-3, uint64=4, int64=-4, float32=0.5,
                            float64=0.25, bool=True, string="é").items():
        getattr(w, f"add_{kind}")(f"a.{kind}", value)
    w.add_array("a.strings", ["x", "", "yy"]); w.add_array("a.numbers", [1, 2, 3]); w.add_array("a.bools", [True, False])
    w.add_tensor("one", np.arange(5, dtype=np.float32)); w.add_tensor("two", np.ones((2, 3, 64), np.float16))
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    with GGUFFile.open(source) as file:
        entries = [Entry(t.name, t.shape, t.type.name) for t in file.tensors.values()]
        n_bytes = write_gguf(tmp_path / "copy.gguf", {key: file.metadata.raw(key) for key in file.metadata}, entries,
                             [np.array_split(file.data(e.name), 3) for e in entries])
    assert (tmp_path / "copy.gguf").read_bytes() == source.read_bytes() and n_bytes == source.stat().st_size


@pytest.mark.parametrize("type_", ["Q8_0", "Q4_0", "BF16", "F16"])
def test_what_gguf_reads(tmp_path, type_):
    """The bytes are those of gguf's own quantizers, metadata is what it was, and the model loads."""
    source, path = write_model(tmp_path / "f32.gguf", n_layer=2), tmp_path / "new.gguf"
    n_bytes, errors = converted(source, path, type_, pure=True)
    assert path.stat().st_size == n_bytes
    before, after = gguf.GGUFReader(source), gguf.GGUFReader(path)
    made = {"general.file_type": gguf.LlamaFileType[f"MOSTLY_{type_}"], "general.quantization_version": 2}
    fields = lambda reader: {name: field.contents() for name, field in reader.fields.items()
                             if not name.startswith("GGUF.")}
    assert fields(after) == fields(before) | made
    values = {tensor.name: tensor.data for tensor in before.tensors}
    found = {tensor.name: tensor for tensor in after.tensors}
    assert set(found) == set(values)
    for name, x in values.items():
        kept = x.ndim == 1
        expected = x if kept else gguf.quants.quantize(x, gguf.GGMLQuantizationType[type_])
        assert np.array_equal(found[name].data.view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)), name
        assert (name in errors) is not kept
    off = gguf.quants.dequantize(found[NAME].data, gguf.GGMLQuantizationType[type_]).astype(np.float64) - values[NAME]
    expected = np.sqrt(np.square(off).sum() / np.square(values[NAME].astype(np.float64)).sum())
    assert errors[NAME] == pytest.approx(expected, rel=1e-12)


def test_threads_and_slabs_change_nothing(tmp_path, monkeypatch):
    source, found = write_model(tmp_path / "f32.gguf"), []
    for n_threads, slab_values in (1, 1 << 18), (2, 1 << 18), (2, 1), (3, 1000):
        monkeypatch.setattr(module, "SLAB_VALUES", slab_values)
        path = tmp_path / "new.gguf"
        converted(source, path, "Q4_0", n_threads)
        found.append(path.read_bytes())
    assert len(set(found)) == 1


def test_own_types_interleaved_ones_and_stacks(tmp_path):
    """As they are where nothing is asked for, and made floats row by row."""
    shapes = {"Q6_0": (3, 10, 64), "IQ4_KS": (3, 512), "IQ4_K_R4": (2, 12, 256)}
    source, rng = tmp_path / "source.gguf", np.random.default_rng(0)
    w, data = gguf.GGUFWriter(source, "llama"), {}
    for i, (type_, shape) in enumerate(shapes.items()):
        plain = FORMATS[type_.removesuffix("_R4")]
        rows = np.ascontiguousarray(random_weight(plain, int(np.prod(shape[:-1])), shape[-1], rng))
        data[f"blk.{i}.attn_q.weight"] = type_, rows, shape
        if type_ == "IQ4_K_R4":  # any bytes are rows of it
            w.tensors[-1][f"blk.{i}.attn_q.weight"] = gguf.gguf_writer.TensorInfo(shape, 339, rows.nbytes, rows)
        else:
            add_tensor(w, f"blk.{i}.attn_q.weight", rows, type_, shape)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    converted(source, tmp_path / "copy.gguf", "COPY")
    converted(source, tmp_path / "f32.gguf", "F32", allow_requantize=True)
    with GGUFFile.open(tmp_path / "copy.gguf") as copy, GGUFFile.open(tmp_path / "f32.gguf") as f32:
        for name, (type_, rows, shape) in data.items():
            assert copy.tensors[name].type.name == type_ and np.array_equal(copy.data(name), rows.reshape(-1))
            assert f32.tensors[name].shape == tuple(reversed(shape))
            assert np.array_equal(f32.data(name).view(np.float32).reshape(shape), dequantize(rows, type_, shape), equal_nan=True)


def test_parts_become_one_file(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=1)
    for i in range(3):
        writer.add_tensor(f"blk.{i}.attn_q.weight", np.full((2, 32), i, np.float32))
    writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file(); writer.close()
    converted(tmp_path / "m-00001-of-00003.gguf", tmp_path / "one.gguf", "COPY")
    with GGUFFile.open(tmp_path / "one.gguf") as file:
        assert [*file.metadata] == ["general.architecture", "general.quantization_version"] and len(file.paths) == 1
        assert [file.data(f"blk.{i}.attn_q.weight").view(np.float32)[0] for i in range(3)] == [0, 1, 2]


def test_a_value_that_cannot_be_leaves_no_file(tmp_path):
    w = gguf.GGUFWriter(tmp_path / "nan.gguf", "llama")
    x = np.ones((2, 20, 32), np.float32)
    x[1, 19, 3] = np.nan
    w.add_tensor("blk.0.attn_q.weight", x)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    path = tmp_path / "new.gguf"
    path.write_bytes(b"before")
    with pytest.raises(UserError, match=r"nan.gguf: tensor blk.0.attn_q.weight: Q8_0 needs finite values, got nan at \[19, 3\], "
                                        r"in rows 20 to 39"):
        converted(tmp_path / "nan.gguf", path, "Q8_0", n_threads=2)
    assert path.read_bytes() == b"before" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("type_, experts, found", [("IQ4_KS", False, {"F32", "IQ4_KS", "IQ4_NL", "Q8_0"}),
                                                   ("MXFP4_MOE", True, {"F32", "MXFP4", "Q8_0"})])
def test_new_files_run(tmp_path, type_, experts, found):
    """Also those of types that gguf does not know; logits stay near those of the source."""
    source, path = tmp_path / "f32.gguf", tmp_path / "new.gguf"
    write_moe_model(source, "qwen3moe") if experts else write_model(source, n_ff=256)
    converted(source, path, type_)
    logits = []
    for each in source, path:
        with Model.load(each, "cpu") as model:
            logits.append(run(model, list(range(20))).ravel())
    with GGUFFile.open(path) as file:
        assert {tensor.type.name for tensor in file.tensors.values()} == found
    assert np.corrcoef(*logits)[0, 1] > 0.95
