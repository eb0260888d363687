"""Hyperparameters that a file states are compared with bounds and with its tensors, before a loop runs or memory is asked for."""
import re
import time
import tracemalloc

import gguf
import numpy as np
import pytest

from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.errors import UserError
from ggml_py.base.rope_table import RopeSettings, rope_table
from ggml_py.engine import model as engine
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile
from ggml_py.models import ARCHITECTURES as CLASSES
from ggml_py.models.hparams import Stated, because
from ggml_py.base.placement import PlacementOptions
from tiny_models import write_model
from tiny_moe_models import ARCHITECTURES as MOE, write_moe_model

KINDS = ["llama", "qwen2", "qwen3", *MOE]
GIB = 1 << 30


def write(path, kind, **settings):
    return write_moe_model(path, kind, **settings) if kind in MOE else write_model(path, kind, **settings)


def with_value(path, key, value, method="uint32"):
    """The file once more, with one key changed, added or, for None, left out."""
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    w = gguf.GGUFWriter(path.with_name("changed.gguf"), arch)
    key = key if key.startswith("tokenizer.") else f"{arch}.{key}"
    for field in reader.fields.values():
        if field.name not in ("general.architecture", key) and not field.name.startswith("GGUF."):
            w.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    if value is not None:
        getattr(w, f"add_{method}")(key, value)
    for t in reader.tensors:
        w.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    return path.with_name("changed.gguf")


def refused(path, message, nextn=False):
    """Loading ends at once in this one line."""
    CPUBackend()  # imports what it needs
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with pytest.raises(UserError) as caught:
            Model.load(path, device="cpu", nextn=nextn)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - start < 5 and peak < 64 << 20, "a refusal must be quick and take no memory"
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and text.isprintable()
    assert re.fullmatch(message, text.removeprefix(f"{path}: ")), text


@pytest.mark.parametrize("n_block", [0, 1, 3, 10**6, 2**31, 2**32 - 1])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_those_of_the_tensors(kind, n_block, tmp_path):
    n = MOE.get(kind, {}).get("n_layer", 2)
    if n_block == n:
        return
    says = f"must be the number of blocks that have tensors: there are {n}, (and none is blk.{n}|up to blk.{n - 1})"
    refused(with_value(write(tmp_path / "m.gguf", kind), "block_count", n_block),
            rf"[a-z0-9-]+\.block_count is {n_block}, {says}")


def test_a_block_in_between_has_no_tensors(tmp_path):
    path = write_model(tmp_path / "m.gguf", n_layer=3)
    path.write_bytes(path.read_bytes().replace(b"blk.1.", b"blk.9."))
    refused(path, "llama.block_count is 3, must be the number of blocks that have tensors: there are 3, and none is blk.1")


@pytest.mark.parametrize("n_block", [0, 513])
def test_files_of_no_blocks_and_of_very_many(n_block, tmp_path):
    w = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    w.add_block_count(n_block)
    w.add_tensor("token_embd.weight", np.ones(1, np.float32))
    for i in range(n_block):
        w.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(1, np.float32))
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    refused(tmp_path / "m.gguf", f"llama.block_count is {n_block}, must be 1 to 512")


# kind, key, value (None: the key is missing), what the error says behind the path
NUMBERS = [
    ("llama", "embedding_length", 2**31 - 1,
     r"tensor token_embd.weight has shape \[70, 64\], expected \[70, 2147483647\]: llama.embedding_length is 2147483647"),
    ("llama", "embedding_length", 0, "llama.embedding_length is 0, must be 1 to 2147483647"),
    ("llama", "attention.head_count", 0, "llama.attention.head_count is 0, must be 1 or more in layer 0"),
    ("llama", "attention.head_count", None,
     "llama.attention.head_count is missing, which stands for 0, must be 1 or more in layer 0"),
    ("llama", "attention.head_count", 2**31 - 2,
     r"tensor blk.0.attn_q.weight has shape \[128, 64\], expected \[68719476672, 64\]: "
     "llama.attention.head_count is 2147483646, llama.attention.key_length is 32, llama.embedding_length is 64"),
    ("llama", "attention.head_count_kv", 3, "llama.attention.head_count_kv is 3, must be a divisor of the 4 heads of layer 0"),
    ("qwen3", "attention.head_count_kv", 4,
     r"tensor blk.0.attn_k.weight has shape \[64, 64\], expected \[128, 64\]: qwen3.attention.head_count_kv is 4, "
     "qwen3.attention.key_length is 32, qwen3.embedding_length is 64"),
    ("qwen2", "attention.key_length", 2**31 - 1,
     r"tensor blk.0.attn_q.weight has shape \[128, 64\], expected \[8589934588, 64\]: qwen2.attention.head_count is 4, "
     "qwen2.attention.key_length is 2147483647, qwen2.embedding_length is 64"),
    ("qwen2", "attention.key_length", 2**32 - 1, "qwen2.attention.key_length is 4294967295, must be 1 to 2147483647"),
    ("qwen2", "attention.value_length", 10**6,
     r"tensor blk.0.attn_v.weight has shape \[64, 64\], expected \[2000000, 64\]: qwen2.attention.head_count_kv is 2, "
     "qwen2.attention.value_length is 1000000, qwen2.embedding_length is 64"),
    ("qwen3", "feed_forward_length", 97,
     r"tensor blk.0.ffn_gate.weight has shape \[96, 64\], expected \[97, 64\]: qwen3.feed_forward_length is 97, "
     "qwen3.embedding_length is 64"),
    ("qwen3", "rope.dimension_count", 64,
     "qwen3.rope.dimension_count is 64, must be even and 2 to 32, the channels of a head: qwen3.attention.key_length is 32"),
    ("qwen3", "rope.dimension_count", 0, "qwen3.rope.dimension_count is 0, must be even and 2 to 32, .*"),
    ("qwen3", "rope.dimension_count", 31, "qwen3.rope.dimension_count is 31, must be even and 2 to 32, .*"),
    ("llama", "context_length", 0, "llama.context_length is 0, must be 1 to 2147483647"),
    ("llama", "context_length", 2**31, "llama.context_length is 2147483648, must be 1 to 2147483647"),
    ("llama", "rope.dimension_count", 16,
     "llama.attention.key_length is 32, must be 16, since all channels of heads are rotated: "
     "llama.rope.dimension_count is 16"),
    ("llama", "attention.value_length", 64,
     "llama.attention.value_length is 64, must be 32, since all channels of heads are rotated: llama.rope.dimension_count is 32"),
    ("llama", "vocab_size", 71, "token_embd.weight has 70 rows, must have one for each of 71 tokens: llama.vocab_size is 71"),
    ("qwen3moe", "expert_count", 2**31 - 1, r"tensor blk.0.ffn_gate_inp.weight has shape \[6, 64\], expected \[2147483647, 64\]: "
     "qwen3moe.expert_count is 2147483647, qwen3moe.embedding_length is 64"),
    ("qwen3moe", "expert_count", 0, "qwen3moe.expert_count is 0, must be 1 to 2147483647"),
    ("qwen3moe", "expert_used_count", 7, "qwen3moe.expert_used_count is 7, must be 1 to 6: qwen3moe.expert_count is 6"),
    ("gpt-oss", "expert_feed_forward_length", 10**6,
     r"tensor blk.0.ffn_gate_exps.weight has shape \[6, 64, 64\], expected \[6, 1000000, 64\]: "
     "gpt-oss.expert_count is 6, gpt-oss.expert_feed_forward_length is 1000000, gpt-oss.embedding_length is 64"),
    ("gpt-oss", "attention.sliding_window", 2**32 - 1, "gpt-oss.attention.sliding_window is 4294967295, must be 1 to 2147483647"),
    ("glm4moe", "expert_shared_count", 10**6,
     r"tensor blk.1.ffn_gate_shexp.weight has shape \[64, 64\], expected \[64000000, 64\]: glm4moe.expert_feed_forward_length "
     "is 64, glm4moe.expert_shared_count is 1000000, glm4moe.embedding_length is 64"),
    ("glm4moe", "leading_dense_block_count", 3,
     "glm4moe.leading_dense_block_count is 3, must be 0 to 2: glm4moe.block_count is 2"),
    ("glm4moe", "nextn_predict_layers", 2, "glm4moe.nextn_predict_layers is 2, must be 0 to 1: glm4moe.block_count is 2"),
    ("bailingmoe2", "expert_shared_feed_forward_length", 65,
     r"tensor blk.1.ffn_gate_shexp.weight has shape \[64, 64\], expected \[65, 64\]: "
     "bailingmoe2.expert_shared_feed_forward_length is 65, .*"),
    ("bailingmoe2", "expert_group_count", 3,
     "bailingmoe2.expert_group_count is 3, must be a number of equal groups of two or more of the 8 experts"),
    ("deepseek2", "attention.kv_lora_rank", 2**31 - 1,
     r"tensor blk.0.attn_kv_a_mqa.weight has shape \[96, 64\], expected \[2147483679, 64\]: "
     "deepseek2.attention.kv_lora_rank is 2147483647, deepseek2.rope.dimension_count is 32, deepseek2.embedding_length is 64"),
    ("deepseek2", "attention.kv_lora_rank", 0, "deepseek2.attention.kv_lora_rank is 0, must be 1 to 2147483647"),
    ("deepseek2", "attention.head_count_kv", 2,
     "deepseek2.attention.head_count_kv is 2, must be 4: deepseek2.attention.head_count is 4"),
    ("deepseek2-mla", "attention.kv_lora_rank", 10**6, "deepseek2.attention.key_length is 96, must be 1000032: "
     "deepseek2.attention.kv_lora_rank is 1000000, deepseek2.rope.dimension_count is 32"),
    ("deepseek2-mla", "attention.q_lora_rank", 10**6,
     r"tensor blk.0.attn_q_a.weight has shape \[48, 64\], expected \[1000000, 64\]: "
     "deepseek2.attention.q_lora_rank is 1000000, deepseek2.embedding_length is 64"),
    ("deepseek2-mla", "attention.key_length_mla", 10**6,
     r"tensor blk.0.attn_q_b.weight has shape \[256, 48\], expected \[4000000, 48\]: deepseek2.attention.head_count is 4, "
     "deepseek2.attention.key_length_mla is 1000000, deepseek2.attention.q_lora_rank is 48"),
    ("deepseek2-mla", "attention.key_length_mla", 32,
     "deepseek2.rope.dimension_count is 32, must be less than the 32 channels of a head: "
     "deepseek2.attention.key_length_mla is 32"),
    ("deepseek2-mla", "attention.value_length_mla", 10**6,
     r"tensor blk.0.attn_v_b.weight has shape \[4, 32, 64\], expected \[4, 1000000, 64\]: "
     "deepseek2.attention.head_count is 4, deepseek2.attention.value_length_mla is 1000000, .*"),
    ("deepseek2-mla", "attention.head_count_kv", 2, "deepseek2.attention.head_count_kv is 2, must be 1"),
]


@pytest.mark.parametrize("kind, key, value, message", NUMBERS, ids=lambda value: str(value)[:40])
def test_numbers_that_no_tensor_confirms(kind, key, value, message, tmp_path):
    refused(with_value(write(tmp_path / "m.gguf", kind), key, value), message)


YARN = dict(keys={"rope.scaling.type": ("string", "yarn"), "rope.scaling.factor": ("float32", 4.0)})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 3e38])
@pytest.mark.parametrize("kind, key, bounds", [
    ("llama", "attention.layer_norm_rms_epsilon", "0 to 1"), ("llama", "rope.freq_base", r"2 to 1e\+30"),
    ("qwen2", "rope.scaling.factor", r"0 or 0.001 to 1e\+06"),
    ("qwen2", "rope.scale_linear", r"0 or 0.001 to 1e\+06"), ("qwen3", "rope.scaling.attn_factor", r"0.001 to 1e\+06"),
    ("deepseek2", "rope.scaling.yarn_log_multiplier", r"0 or 0.001 to 1e\+06"),
    ("glm4moe", "expert_weights_scale", r"0 or 0.001 to 1e\+06")])
def test_reals_out_of_bounds(kind, key, value, bounds, tmp_path):
    value = float(np.float32(value))
    path = write(tmp_path / "m.gguf", kind, **YARN if kind == "qwen3" else {})
    refused(with_value(path, key, value, "float32"), re.escape(f"{key} is {value}, must be ").join([r"[a-z0-9]+\.", ""]) + bounds)


def test_a_base_of_0(tmp_path):
    refused(with_value(write_model(tmp_path / "m.gguf"), "rope.freq_base", 0.0, "float32"),
            r"llama.rope.freq_base is 0.0, must be 2 to 1e\+30")


@pytest.mark.parametrize("kind, key, value", [("llama", "rope.scaling.factor", 0.0),
                                              ("llama", "attention.layer_norm_rms_epsilon", 0.0),
                                              ("glm4moe", "expert_weights_scale", 0.0)])
def test_zeros_that_stand_for_none(kind, key, value, tmp_path):
    with Model.load(with_value(write(tmp_path / "m.gguf", kind), key, value, "float32"), device="cpu") as model:
        assert model.architecture.hp.rope.freq_scale == 1


def test_an_original_context_of_0_is_that_of_the_key(tmp_path):
    """As in llama.cpp."""
    tables = []
    for n_ctx_orig in 0, 256:
        path = write_model(tmp_path / f"{n_ctx_orig}.gguf", "qwen3", n_ctx=256,
                           keys={**YARN["keys"], "rope.scaling.original_context_length": ("uint32", n_ctx_orig)})
        with Model.load(path, device="cpu") as model:
            tables.append(model.backend.data(model.architecture.new_rope_tables(20)["full", "cpu"]))
    assert np.array_equal(*tables) and np.isfinite(tables[0]).all()


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
def test_frequency_factors_must_be_positive(factor, tmp_path):
    factors = np.ones(16, np.float32)
    factors[5] = factor
    path = write_model(tmp_path / "m.gguf", rope_freqs=True)
    path.write_bytes(path.read_bytes().replace(np.linspace(1, 4, 16, dtype=np.float32).tobytes(), factors.tobytes()))
    refused(path, f"tensor rope_freqs.weight has the value {factor}, all must be positive")


@pytest.mark.parametrize("key, tokens, message", [
    ("tokenizer.ggml.tokens", ["a"] * 71,
     "token_embd.weight has 70 rows, must have one for each of 71 tokens: the length of tokenizer.ggml.tokens is 71"),
    ("tokenizer.ggml.tokens", [1, 2, 3], r"key 'tokenizer.ggml.tokens' is of type arr\[i32\], must be of type arr\[str\]")])
def test_vocabularies_of_another_length(key, tokens, message, tmp_path):
    refused(with_value(write_model(tmp_path / "m.gguf"), key, tokens, "array"), message)


# Types and shapes.

def with_tensor(path, name, data, type_=None):
    """The file once more, with another tensor under a name."""
    reader = gguf.GGUFReader(path)
    w = gguf.GGUFWriter(path.with_name("changed.gguf"), reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name != "general.architecture" and not field.name.startswith("GGUF."):
            w.add_key_value(field.name, field.contents(), field.types[0])
    for t in reader.tensors:
        if t.name != name:
            w.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    w.add_tensor(name, data, raw_dtype=type_)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    return path.with_name("changed.gguf")


FLOATS = "F32, F16, BF16"


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.float64])
@pytest.mark.parametrize("name, shape, allowed", [("blk.0.ffn_up.weight", (96, 64), f"{FLOATS}, Q4_0, .*, Q4_K_R4, .*"),
                                                  ("token_embd.weight", (70, 64), f"{FLOATS}, Q4_0, .*, Q4_K_R4, .*"),
                                                  ("blk.1.attn_norm.weight", (64,), FLOATS), ("rope_freqs.weight", (16,), FLOATS),
                                                  ("blk.0.attn_q.bias", (128,), FLOATS)])
def test_types_that_weights_cannot_have(name, shape, allowed, dtype, tmp_path):
    type_ = {np.float64: "F64"}.get(dtype, f"I{8 * np.dtype(dtype).itemsize}")
    path = with_tensor(write_model(tmp_path / "m.gguf"), name, np.ones(shape, dtype))
    refused(path, rf"tensor {name} is of type {type_}, must be one of {allowed}")


def test_quantized_norms_are_refused(tmp_path):
    from ggml_py.quant.quantize import quantize
    data = quantize(np.ones((1, 64), np.float32), "Q8_0").reshape(-1)
    path = with_tensor(write_model(tmp_path / "m.gguf"), "output_norm.weight", data, gguf.GGMLQuantizationType.Q8_0)
    refused(path, f"tensor output_norm.weight is of type Q8_0, must be one of {FLOATS}")


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_float_norms_are_taken(dtype, tmp_path):
    path = with_tensor(write_model(tmp_path / "m.gguf"), "output_norm.weight", np.ones(64, dtype))
    with Model.load(path, device="cpu") as model, model.new_context(n_ctx=4) as context:
        assert np.isfinite(context.decode([1])).all()


def test_a_row_of_ones_is_no_column(tmp_path):
    """Ones in front of a shape do not count, others do: a quantized row could not be cut into columns."""
    from ggml_py.quant.quantize import quantize
    path = write_model(tmp_path / "m.gguf", n_ff=1)
    flat = quantize(np.ones((1, 64), np.float32), "Q8_0")
    refused(with_tensor(path, "blk.0.ffn_down.weight", flat, gguf.GGMLQuantizationType.Q8_0),
            r"tensor blk.0.ffn_down.weight has shape \[1, 64\], expected \[64, 1\]: llama.embedding_length is 64, "
            r"llama.feed_forward_length is 1")
    with Model.load(with_tensor(path, "blk.0.ffn_gate.weight", flat, gguf.GGMLQuantizationType.Q8_0), device="cpu"):
        pass


def test_weights_that_are_mostly_padding(tmp_path):
    """A tile is 32 KiB, of which a matrix of 1 x 1 fills four bytes."""
    path = write_model(tmp_path / "m.gguf", n_embd=1, n_vocab=50_000, head=32)
    refused(path,
            r"the weights, [\d,]+ bytes, would take 10\d,\d{3},\d{3} bytes as tiles of 32 rows and 256 columns, allowed: "
            r"4 times as many and 33,554,432; the matrices are too small")


def test_nothing_is_read_before_everything_fits(tmp_path, monkeypatch):
    """The last matrix of the last layer is missing: no tensor was read, and no memory of the device was asked for."""
    path = write_model(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_down.weight", b"blk.1.ffn_xxxx.weight"))
    asked = []
    monkeypatch.setattr(GGUFFile, "data", lambda self, name: asked.append(name))
    monkeypatch.setattr(CPUBackend, "empty", lambda self, n_bytes: asked.append(n_bytes))
    with pytest.raises(UserError, match="tensor blk.1.ffn_down.weight is missing$"):
        Model.load(path, device="cpu")
    assert not asked


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_on_paper_asks_for_what_the_loaded_one_holds(kind, tmp_path):
    path = write(tmp_path / "m.gguf", kind, types=("F32", "Q8_0"))
    with GGUFFile.open(path) as file, Model.load(path, device="cpu") as model:
        paper = CLASSES[model.architecture.name](file, PlacementOptions(("cpu",)))
        paper.check_tensors(nextn=False)
        described = lambda weights: {key: (t.dtype, t.shape) for key, t in weights.loaded.items()}
        assert described(paper.w) == described(model.architecture.w) and len(paper.w.loaded) > 10
        assert all(t.buffer is None for t in paper.w.loaded.values()) and paper.w.n_bytes == model.architecture.w.n_bytes


# Contexts.

def test_a_context_that_memory_cannot_hold(tmp_path, monkeypatch):
    """512 bytes of f16 a position, 128 of the table, a mark."""
    with Model.load(write_model(tmp_path / "m.gguf"), device="cpu") as model:
        assert model.architecture.context_bytes(1000, 1, "f16", "f16").total() == 1000 * (2 * 2 * 64 * 2 + 128 + 1)
        held = CPUBackend.memory_bytes(model.backend)
        assert GIB / 4 < held < 2**60
        with pytest.raises(UserError,
                           match="^n_ctx: 1 sequences of 2147483647 positions take 1,376,537,017,727 bytes, "
                                 r"more than cpu has, [\d,]+$"):
            model.new_context(2**31 - 1)
        with pytest.raises(UserError, match="^n_ctx: 5000000000 positions for each of 2 sequences, allowed: up to 2147483647$"):
            model.new_context(10**10, n_seq_max=2)
        monkeypatch.setattr(CPUBackend, "memory_bytes", lambda self: 64100)
        model.new_context(100).close()
        with pytest.raises(UserError, match="^n_ctx: 1 sequences of 101 positions take 64,741 bytes, more than cpu has, 64,100$"):
            model.new_context(101)


def test_memory_that_is_not_to_be_had_after_all(tmp_path, monkeypatch):
    with Model.load(write_model(tmp_path / "m.gguf"), device="cpu") as model:
        def fails(backend, n_bytes):
            raise MemoryError
        monkeypatch.setattr(CPUBackend, "empty", fails)
        with pytest.raises(UserError, match="^n_ctx: 1 sequences of 100 positions take 64,100 bytes, more than cpu has$"):
            model.new_context(100)


def test_memory_of_a_gpu_that_is_not_to_be_had():
    """What cuda-core raises, whose class is not public, becomes a MemoryError; other errors stay what they are."""
    from ggml_py.backends.cuda_driver import CUDADriver
    driver = object.__new__(CUDADriver)

    class Device:
        def __init__(self, ordinal):
            pass

        def allocate(self, n_bytes, stream):
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: unable to allocate" if n_bytes > 1 << 30 else "CUDA_ERROR_UNKNOWN")
    driver.ordinal, driver._device = 1, Device
    with pytest.raises(MemoryError, match="^cuda:1: 2147483648 bytes are not to be had$"):
        driver.allocate(2 << 30, None)
    with pytest.raises(RuntimeError, match="^CUDA_ERROR_UNKNOWN$"):
        driver.allocate(1, None)


def test_weights_that_memory_cannot_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(CPUBackend, "memory_bytes", lambda self: 10_000)
    with pytest.raises(UserError, match=r"m.gguf: the weights take [\d,]+ bytes, more than cpu has, 10,000$"):
        Model.load(write_model(tmp_path / "m.gguf"), device="cpu")


@pytest.mark.parametrize("n_ctx_train", [2**21, 2**31 - 1])
def test_a_long_default_context_must_be_asked_for(n_ctx_train, tmp_path):
    path = write_model(tmp_path / "m.gguf", n_ctx=n_ctx_train)
    with Model.load(path, device="cpu") as model:
        tracemalloc.start()
        with pytest.raises(UserError,
                           match=f"^n_ctx: must be given: {n_ctx_train} positions, which {path} says it was trained for, "
                                 r"take [\d,]+ bytes for 1 sequences; .* 1,073,741,824 without being asked for$"):
            model.new_context()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()
        with model.new_context(8) as context:
            assert context.n_ctx == 8


def test_a_default_context_is_as_long_as_the_model_was_trained_for(tmp_path, monkeypatch):
    with Model.load(write_model(tmp_path / "m.gguf", n_ctx=100), device="cpu") as model:
        monkeypatch.setattr(engine, "MOST_DEFAULT_CONTEXT", 64_100 + 3 * 51_300)
        with model.new_context(n_seq_max=4) as context:
            assert context.n_ctx == 100 and context.memory.n_seq_max == 4
        with pytest.raises(UserError, match="^n_ctx: must be given: 100 positions"):
            model.new_context(n_seq_max=5)


def test_angles_that_the_table_cannot_hold(tmp_path):
    """Of positions, or of frequencies that a file states."""
    tracemalloc.start()
    with pytest.raises(UserError,
                       match="^n_ctx: in a context of 1048577 positions rotary angles would reach 1.04858e.06 radians, "
                             "must be below 1048576; "
     "they grow by up to 1 a position$"):
        rope_table(RopeSettings(32), 2**20 + 1)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    with Model.load(with_value(write_model(tmp_path / "m.gguf"), "rope.scaling.factor", 0.001, "float32"), device="cpu") as model:
        with pytest.raises(UserError,
                           match="^n_ctx: in a context of 2000 positions rotary angles would reach 1.999e.06 radians, "
                                 "must be below 1048576; they grow by up to 1000 a position$"):
            model.new_context(2000)
        model.new_context(1000).close()


# Numbers that remember their keys.

def test_stated_numbers_remember_their_keys():
    heads, head, width = Stated(4, {"heads": 4}), Stated(32, {"head": 32}), Stated(100, {"width": 100})
    for value, expected, keys in [
            (heads * head, 128, "heads head"), (2 * heads, 8, "heads"), (heads + 1, 5, "heads"), (1 + heads, 5, "heads"),
        (heads * head + 2 * width, 328, "heads head width"),
            (width // heads, 25, "width heads"), (1000 // width, 10, "width"), (width % heads, 0, "width heads"),
        (head - 1, 31, "head"), (33 - head, 1, "head"),
            (sum([heads, head]), 36, "heads head")]:
        assert value == expected and type(value) is Stated and sorted(value.keys) == sorted(keys.split())
    assert heads / 8 == 0.5 and head**0.5 == 32**0.5 and f"{heads} {heads!r}" == "4 4" and np.float32(heads) == 4
    assert because(heads * 2, 7, head) == ": heads is 4, head is 32" and because(7, 8) == ""


def test_a_loaded_model_has_plain_numbers(tmp_path):
    """What remembers is for errors; kernels and graphs get int."""
    def numbers(value):
        return [n for v in value for n in numbers(v)] if isinstance(value, (list, tuple)) else [value]
    for kind in KINDS:
        with Model.load(write(tmp_path / f"{kind}.gguf", kind), device="cpu") as model:
            found = [n for held in (model.architecture, model.architecture.hp, getattr(model.architecture, "experts", None))
                     if held
                     for value in vars(held).values() for n in numbers(value)]
            assert len(found) > 20 and not any(isinstance(n, Stated) for n in found)
            shapes = [n for t in model.architecture.w.loaded.values() for n in t.shape]
            assert not any(isinstance(n, Stated) for n in shapes)
