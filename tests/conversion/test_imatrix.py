"""Importance matrices: sums against float64 numpy, the same bytes by every setting; files that are read, or refused."""
import io
import struct
import time
from collections import defaultdict

import gguf
import numpy as np
import numpy_transformer
import pytest
import tiny_delta_net_models
import tiny_hybrid_models
import tiny_layer_models
from fake_model import FakeTokenizer
from tiny_models import write_model
from tiny_moe_models import ARCHITECTURES, write_moe_model

from ggml_py.base.errors import UserError
from ggml_py.conversion import collect as collect_module
from ggml_py.conversion.collect import collect
from ggml_py.conversion.convert import convert
from ggml_py.conversion.imatrix import ImportanceMatrix, Sums
from ggml_py.conversion.mixes import is_kept
from ggml_py.conversion.plan import Asked, keys_of, plan
from ggml_py.engine.model import Model
from ggml_py.engine.settings import Settings
from ggml_py.files.gguf import GGUFFile
from ggml_py.base.placement import PlacementOptions
from ggml_py.quant.quantize import quantize

N_CTX, N_WINDOWS = 24, 2
TOKENS = np.random.default_rng(5).integers(0, 70, N_CTX * N_WINDOWS)


def made(path, to, placement=None, process_output=False, **settings) -> ImportanceMatrix:
    with Model.load(path, "cpu", placement=placement) as model:
        model._tokenizer = FakeTokenizer(add_bos=False)
        found = collect(model, TOKENS, Settings(n_ctx=N_CTX, **settings), "text", to, io.StringIO(), process_output)
    found.write(to)
    return found


def expected(path):
    """By name: sums float64 [n_matrices, n_cols] and counts."""
    sums, counts = defaultdict(lambda: defaultdict(float)), defaultdict(lambda: defaultdict(int))

    def seen(name, expert, x):
        sums[name][expert] += np.square(x).sum(axis=0)
        counts[name][expert] += len(x)
    for window in TOKENS.reshape(N_WINDOWS, N_CTX):
        numpy_transformer.logits(path, window, seen)
    return sums, counts


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_sums_are_those_of_numpy(tmp_path, kind):
    path = tmp_path / "m.gguf"
    write_model(path, "qwen3") if kind == "dense" else write_moe_model(path, "qwen3moe")
    found, (sums, counts) = made(path, tmp_path / "imatrix", type_k="f32", type_v="f32"), expected(path)
    assert (found.chunk_count, found.chunk_size, found.datasets) == (N_WINDOWS, N_CTX, ["text"])
    assert set(found.entries) == set(sums)
    for name, (values, n) in found.entries.items():
        assert n.tolist() == [counts[name][e] for e in range(len(n))], name
        rows = values.reshape(len(n), -1)
        for e in range(len(n)):
            assert np.allclose(rows[e], sums[name][e], rtol=2e-5, atol=1e-7), (name, e)
    counts = [n for _, n in found.entries.values() if len(n) > 1]
    assert len(counts) == 6 * (kind == "experts") and all(n.sum() == 2 * len(TOKENS) and n.min() < n.max() for n in counts)


@pytest.mark.parametrize("arch", ["llama", "qwen3moe", "gpt-oss", "deepseek2-mla"])
def test_no_setting_changes_a_byte(tmp_path, monkeypatch, arch):
    """Nor that inputs are added later, beside a device that goes on."""
    path, types = tmp_path / "m.gguf", ("Q8_0", "F16")
    write_model(path, types=types, fused_qkv=True) if arch == "llama" else write_moe_model(path, arch, types)
    found = []
    for i, settings in enumerate([{}, dict(n_ubatch=1), dict(n_ubatch=7), dict(n_batch=5), dict(kv_write="cpy"),
                                  dict(placement=PlacementOptions(("cpu", "cpu:1"), tensor_split=(1, 1)))]):
        matrix = made(path, tmp_path / f"{i}.imatrix", **settings)
        found.append((tmp_path / f"{i}.imatrix").read_bytes())
    slowly = lambda *args, add=collect_module.add_squares: (time.sleep(0.001), add(*args))
    monkeypatch.setattr(collect_module, "add_squares", slowly)
    monkeypatch.setattr(collect_module, "is_elsewhere", lambda model: True)
    made(path, tmp_path / "later.imatrix")
    found.append((tmp_path / "later.imatrix").read_bytes())
    assert len(set(found)) == 1
    with GGUFFile.open(path) as file:  # each matrix of the layers, of its size
        matrix.check(file)
        matrices = {name for name, tensor in file.tensors.items() if name.startswith("blk.") and len(tensor.shape) > 1
                    and name.endswith("weight") and "norm" not in name}
        assert set(matrix.entries) == matrices
        for name in matrices:
            tensor = file.tensors[name]
            assert matrix.weights(tensor).shape == ((*tensor.shape[2:], 1)[0], tensor.shape[0])


WRITERS = {**dict.fromkeys(tiny_layer_models.QUICK, tiny_layer_models.write_layer_model),
           **dict.fromkeys(tiny_hybrid_models.KINDS, tiny_hybrid_models.write_hybrid_model),
           **dict.fromkeys(tiny_delta_net_models.KINDS, tiny_delta_net_models.write_delta_net_model),
           **dict.fromkeys(ARCHITECTURES, write_moe_model)}
UNUSED = {"gemma4": ["blk.2.attn_k.weight", "blk.2.attn_v.weight", "blk.3.attn_k.weight", "blk.3.attn_v.weight"]}  # shared caches


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITERS)
def test_every_token_reaches_every_matrix(tmp_path, kind):
    """Of every architecture; also behind the last layer's attention, and to as many experts as it is sent to."""
    path = WRITERS[kind](tmp_path / "m.gguf", kind)
    found, n = made(path, tmp_path / "imatrix"), len(TOKENS)
    assert all(counts.sum() == n if len(counts) == 1 else counts.sum() % n == 0 for _, counts in found.entries.values())
    with GGUFFile.open(path) as file:
        arch = file.get("general.architecture", "str")
        matrices = {name for name, t in file.tensors.items() if name.startswith("blk.") and not is_kept(arch, name, t.shape)}
        found.check(file)
    assert sorted(matrices - set(found.entries)) == UNUSED.get(kind, [])


def test_the_output_head(tmp_path):
    path = write_model(tmp_path / "m.gguf")
    without, with_it = (made(path, tmp_path / "imatrix", process_output=on).entries for on in (False, True))
    assert set(with_it) - set(without) == {"output.weight"} and with_it["output.weight"].counts.tolist() == [len(TOKENS)]
    assert all(np.array_equal(with_it[name].values, values) for name, (values, _) in without.items())


def test_devices_that_share_columns_are_refused(tmp_path):
    with pytest.raises(UserError, match="split_mode: devices that share columns have parts of a product's inputs"):
        made(write_model(tmp_path / "m.gguf"), tmp_path / "x", PlacementOptions(("cpu", "cpu:1"), split_mode="column"))


def test_weights_reach_the_quantizer(tmp_path):
    """Of each expert its own: rows are what `quantize` makes of them with their means; 1 where no token was."""
    path, name = write_moe_model(tmp_path / "m.gguf", "qwen3moe", n_ff_exp=64), "blk.1.ffn_down_exps.weight"
    matrix = made(path, tmp_path / "imatrix")
    values, counts = matrix.entries[name]
    counts[2] = 0
    with GGUFFile.open(path) as file:
        x = file.data(name).view(np.float32).reshape(6, 64, 64)
        changes = plan(file, Asked("Q4_1", pure=True), matrix)
        _, errors = convert(file, changes, keys_of(file, Asked("Q4_1"), matrix), tmp_path / "q.gguf", matrix, 2)
    means = values.reshape(6, 64) / np.float32(np.maximum(counts, 1))[:, None]
    means[2] = 1
    rows = np.stack([quantize(each, "Q4_1", name, w) for each, w in zip(x, means)])
    plain = quantize(x, "Q4_1")
    keys = gguf.GGUFReader(tmp_path / "q.gguf")
    found = next(tensor for tensor in keys.tensors if tensor.name == name).data.reshape(rows.shape)
    assert np.array_equal(found, rows) and not np.array_equal(found, plain)
    off = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q4_1).astype(np.float64) - x
    of = lambda a: (np.square(a, dtype=np.float64) * means[:, None]).sum()
    assert errors[name] == pytest.approx(np.sqrt(of(off) / of(x)), rel=1e-9)
    written = {"file": str(tmp_path / "imatrix"), "dataset": "text", "entries_count": len(matrix.entries),
               "chunks_count": N_WINDOWS}
    assert {key: keys.fields[f"quantize.imatrix.{key}"].contents() for key in written} == written


# Files

def test_a_file_comes_back(tmp_path):
    entries = {"blk.0.a.weight": Sums(np.arange(6, dtype=np.float32), np.array([5])),
               "blk.0.b.weight": Sums(np.arange(8, dtype=np.float32), np.array([1, 0, 7, 2]))}
    ImportanceMatrix(tmp_path / "x", entries, ["é", "y"], 3, 512).write(tmp_path / "x")
    found = ImportanceMatrix.read(tmp_path / "x")
    assert (found.datasets, found.chunk_count, found.chunk_size) == (["é", "y"], 3, 512)
    assert {name: [a.tolist() for a in sums] for name, sums in found.entries.items()} == {
        name: [a.tolist() for a in sums] for name, sums in entries.items()}
    reader = gguf.GGUFReader(tmp_path / "x")
    assert [(t.name, t.shape.tolist(), t.tensor_type.name) for t in reader.tensors] == [
        ("blk.0.a.weight.in_sum2", [6], "F32"), ("blk.0.a.weight.counts", [1], "F32"),
        ("blk.0.b.weight.in_sum2", [2, 4], "F32"), ("blk.0.b.weight.counts", [1, 4], "F32")]
    assert reader.fields["general.type"].contents() == "imatrix"


def dat(*parts) -> bytes:
    """i32 numbers, texts behind their length, and arrays."""
    return b"".join(struct.pack("<i", p) if isinstance(p, int) else struct.pack("<i", len(p)) + p.encode() if isinstance(p, str)
                    else p.tobytes() for p in parts)


def test_the_older_format(tmp_path):
    path, values = tmp_path / "x.dat", np.float32([2, 4, 6])
    for more in [], [7, "text"]:
        path.write_bytes(dat(2, "a", 2, 3, values, "b", 0, 3, values, *more))
        found = ImportanceMatrix.read(path)
        values_of_a, calls = found.entries["a"]
        assert (values_of_a / calls).tolist() == [1, 2, 3]
        assert found.entries["b"].counts.tolist() == [1]
        assert (found.chunk_count, found.datasets) == ((7, ["text"]) if more else (0, []))


def gguf_file(path, tensors, drop=()):
    w = gguf.GGUFWriter(path, "x")
    keys = {"imatrix.datasets": lambda: w.add_array("imatrix.datasets", ["t"]),
            "imatrix.chunk_count": lambda: w.add_uint32("imatrix.chunk_count", 1),
            "imatrix.chunk_size": lambda: w.add_uint32("imatrix.chunk_size", 2)}
    for key, add in keys.items():
        if key not in drop:
            add()
    for name, array in tensors.items():
        w.add_tensor(name, array)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()


ONES = np.ones(4, np.float32)
GOOD = {"a.in_sum2": ONES, "a.counts": ONES[:1]}


@pytest.mark.parametrize("content, said", [
    (b"", "not an importance matrix: neither GGUF nor entries that end in its 0 bytes"),
    (dat(0), "not an importance matrix: neither GGUF nor at least one entry, got 0"),
    (dat(1, "a", 2, 3, np.float32([1])), "not an importance matrix: neither GGUF nor entries that end in its 21 bytes"),
    (dat(1, -5), "not an importance matrix: neither GGUF nor entries that end in its 8 bytes"),
    (dat(1, "a", 1, 1, np.float32([np.nan])), "the entry of 'a' has a value that is negative or not finite"),
    (dat(1, "a", 1, 1, np.float32([-1])), "the entry of 'a' has a value that is negative or not finite"),
    ({}, "not an importance matrix: it has no tensors; allowed are NAME.in_sum2 and NAME.counts"),
    ({"other": ONES}, "not an importance matrix: it has the tensor 'other'; allowed are NAME.in_sum2 and NAME.counts"),
    ({"a.in_sum2": ONES}, "tensor 'a.counts' is missing, must be there as F32"),
    ({**GOOD, "a.counts": ONES.astype(np.float16)}, "tensor 'a.counts' is of type F16, must be there as F32"),
    ({"a.in_sum2": ONES, "a.counts": ONES[:3]}, "tensor 'a.in_sum2' has 4 values, must have a multiple of the 3 of 'a.counts'"),
    ({**GOOD, "a.counts": -ONES[:1]}, "tensor 'a.counts' has a value that is no count"),
    ({**GOOD, "drop": ["imatrix.chunk_size"]}, "key 'imatrix.chunk_size' is missing, must be there"),
])
def test_files_that_are_refused(tmp_path, content, said):
    path = tmp_path / "x"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        content = dict(content)
        gguf_file(path, content, content.pop("drop", ()))
    with pytest.raises(UserError) as error:
        ImportanceMatrix.read(path)
    assert str(error.value) == f"{path}: {said}"
