"""Synthetic models: files that load and give logits of ordinary size, with the tensors that real conversions have."""
import itertools
import re
import sys
from collections import Counter
from dataclasses import replace
from math import prod

import gguf
import numpy as np
import pytest

import smollm2
from ik_reference import dequantized

synth = pytest.importorskip("synth", reason="needs the checkout")

from ggml_py.files.gguf import GGUFFile
from ggml_py.engine.model import Model
from ggml_py.base.placement import PlacementOptions
from ggml_py.models import ARCHITECTURES
from ggml_py.quant.formats import FORMATS

TINY = [name for name in synth.SHAPES if name.startswith("tiny-")]
# of the originals
N_PARAMS = {"llama-3-8b": 8_030_261_248, "smollm2-135m": 134_515_008, "qwen3-30b-a3b": 30_532_122_624,
            "deepseek-v2-lite": 15_706_484_224, "qwen3.6-35b-a3b": 34_660_610_688, "qwen3-next-80b-a3b": 79_674_391_296,
            "mistral-small-24b": 23_572_403_200, "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
            "llama-4-scout": 107_769_861_120, "gemma-3-27b": 27_009_346_304, "minimax-m2": 228_689_764_864,
            "nemotron-3-nano-30b-a3b": 31_577_940_288, "granite-4.0-h-small": 32_207_337_984}


@pytest.mark.parametrize("name, type_", [*itertools.product(TINY, ["Q4_K", "Q8_0", "Q4_1"]), ("tiny-gpt-oss", "MXFP4_MOE"),
                                         ("tiny-llama", "MXFP4")])
def test_logits_are_finite_and_of_ordinary_size(name, type_, tmp_path):
    with Model.load(synth.write(tmp_path / "m.gguf", synth.SHAPES[name], type_),
                    device="cpu") as model, model.new_context(64) as context:
        assert model.tokenizer.model == "no_vocab" and not model.tokenizer.add_bos
        logits = context.decode(np.random.default_rng(0).integers(0, model.n_vocab, 40), logits="all")
    # no logit that is the same whatever the tokens
    assert np.isfinite(logits).all() and 0.3 < logits.std() < 3 and np.ptp(logits, axis=0).min() > 0.01


@pytest.mark.parametrize("name", TINY)
def test_tensors_are_those_of_the_architecture(name, tmp_path):
    shape = synth.SHAPES[name]
    arch = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == shape.arch)
    known = {re.sub(r"\{bid\}", r"\\d+", gguf.TENSOR_NAMES[tensor]) + r"(\.weight|\.bias|)"
             for tensor in gguf.MODEL_TENSORS[arch]}
    with GGUFFile.open(synth.write(tmp_path / "m.gguf", shape, "Q4_K")) as file:
        assert all(any(re.fullmatch(pattern, name) for pattern in known) for name in file.tensors)
        found = {t.name: (tuple(reversed(t.shape)), t.type.name) for t in file.tensors.values()}
        assert found == {t.name: (t.shape, synth.tensor_type(t, "Q4_K")) for t in synth.tensors(shape)}
        assert file.get("general.architecture", "str") == shape.arch
        assert file.get(f"{shape.arch}.block_count", "u32") == shape.n_layer
        assert all(FORMATS[type_].name == "F32" for (dims, type_) in found.values() if len(dims) == 1)


def layer(file, i: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Of a layer's matrices: dimensions as in the file, contiguous first, and type."""
    return {t.name.removeprefix(f"blk.{i}.").removesuffix(".weight"): (t.shape, t.type.name) for t in file.tensors.values()
            if t.name.startswith(f"blk.{i}.") and len(t.shape) > 1}


def test_qwen3moe(tmp_path):
    with GGUFFile.open(synth.write(tmp_path / "m.gguf", synth.SHAPES["tiny-qwen3moe"], "Q4_K")) as file:
        assert layer(file, 1) == {
            "attn_q": ((256, 256), "Q4_K"), "attn_k": ((256, 128), "Q4_K"), "attn_v": ((256, 128), "Q4_K"),
            "attn_output": ((256, 256), "Q4_K"),
            "ffn_gate_inp": ((256, 8), "F32"), "ffn_gate_exps": ((256, 256, 8), "Q4_K"), "ffn_up_exps": ((256, 256, 8), "Q4_K"),
            "ffn_down_exps": ((256, 256, 8), "Q4_K")}
        assert file.tensors["blk.0.attn_q_norm.weight"].shape == file.tensors["blk.0.attn_k_norm.weight"].shape == (64,)
        assert [file.get(f"qwen3moe.{key}", "u32")
                for key in ("expert_count", "expert_used_count", "expert_feed_forward_length")] == [8, 2, 256]


def test_deepseek2(tmp_path):
    """Layer 0 is dense; rows of 96 and 64 values are no whole blocks of Q4_K."""
    with GGUFFile.open(synth.write(tmp_path / "m.gguf", synth.SHAPES["tiny-deepseek2"], "Q4_K")) as file:
        attention = {"attn_q": ((256, 4 * 64), "Q4_K"), "attn_kv_a_mqa": ((256, 64 + 32), "Q4_K"),
                     "attn_kv_b": ((64, 4 * (32 + 32)), "Q5_0"),
                     "attn_output": ((4 * 32, 256), "Q5_0")}
        assert layer(file, 0) == attention | {"ffn_gate": ((256, 512), "Q4_K"), "ffn_up": ((256, 512), "Q4_K"),
                                              "ffn_down": ((512, 256), "Q4_K")}
        assert layer(file, 1) == attention | {
            "ffn_gate_inp": ((256, 8), "F32"), "ffn_gate_exps": ((256, 96, 8), "Q4_K"), "ffn_up_exps": ((256, 96, 8), "Q4_K"),
            "ffn_down_exps": ((96, 256, 8), "Q5_0"), "ffn_gate_shexp": ((256, 192), "Q4_K"), "ffn_up_shexp": ((256, 192), "Q4_K"),
            "ffn_down_shexp": ((192, 256), "Q5_0")}
        assert file.tensors["blk.0.attn_kv_a_norm.weight"].shape == (64,)
        u32 = {key: file.get(f"deepseek2.{key}", "u32") for key in (
            "block_count", "leading_dense_block_count", "attention.kv_lora_rank", "attention.key_length",
            "attention.value_length", "attention.head_count_kv",
            "rope.dimension_count", "expert_shared_count", "expert_feed_forward_length", "expert_gating_func",
            "rope.scaling.original_context_length")}
        assert list(u32.values()) == [27, 1, 64, 64, 32, 4, 32, 2, 96, 1, 4096]
        assert file.get("deepseek2.rope.scaling.type", "str") == "yarn" and file.get("deepseek2.rope.scaling.factor", "f32") == 40
        assert file.get("deepseek2.rope.scaling.yarn_log_multiplier", "f32") == np.float32(0.0707)


@pytest.mark.parametrize("name", N_PARAMS)
def test_number_of_parameters(name):
    assert sum(prod(t.shape) for t in synth.tensors(synth.SHAPES[name])) == N_PARAMS[name]


def nothing(rows, file) -> None:
    """In the place of `Repeated.tofile`: a hole."""
    file.truncate(file.seek(rows.nbytes, 1))


@pytest.mark.parametrize("name", [name for name in synth.SHAPES if name not in TINY])
def test_files_load_on_paper(name, tmp_path, monkeypatch):
    monkeypatch.setattr(synth, "pool", lambda fmt, n_cols, rng: np.zeros((1, fmt.row_bytes(n_cols)), np.uint8))
    monkeypatch.setattr(synth.Repeated, "tofile", nothing)
    shape = synth.SHAPES[name]
    with GGUFFile.open(synth.write(tmp_path / "m.gguf", shape, "Q4_K")) as file:
        model = ARCHITECTURES[shape.arch](file, PlacementOptions(("cpu",)))
        model.check_tensors(nextn=False)
        assert model.weight_bytes()["cpu"] >= sum(t.n_bytes for t in file.tensors.values())


@pytest.mark.parametrize("name, counts", [("gpt-oss-20b", {"F32": 289, "Q8_0": 98, "MXFP4": 72}),
                                          ("gpt-oss-120b", {"F32": 433, "Q8_0": 146, "MXFP4": 108})])
def test_gpt_oss_has_the_types_of_the_published_files(name, counts):
    found = {t.name: synth.tensor_type(t, "MXFP4_MOE") for t in synth.tensors(synth.SHAPES[name])}
    assert Counter(found.values()) == counts and found["token_embd.weight"] == found["output.weight"] == "Q8_0"
    assert found["blk.0.ffn_gate_inp.weight"] == "F32" and found["blk.0.ffn_down_exps.weight"] == "MXFP4"


def test_types_of_the_8b_models():
    """Q4_K and Q8_0 with an output head of Q6_K."""
    for type_ in "Q4_K", "Q8_0":
        types = {t.name: synth.tensor_type(t, type_) for t in synth.tensors(synth.SHAPES["llama-3-8b"]) if len(t.shape) == 2}
        assert types.pop("output.weight") == "Q6_K" and set(types.values()) == {type_}


def test_smollm2_has_the_tensors_of_the_real_file(tmp_path):
    with GGUFFile.open(smollm2.require()) as file:
        real = {(t.name, tuple(reversed(t.shape)), t.type.name) for t in file.tensors.values()}
        assert {(t.name, t.shape, synth.tensor_type(t, "Q4_1")) for t in synth.tensors(synth.SHAPES["smollm2-135m"])} == real
        u32 = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
               "attention.head_count_kv",
               "rope.dimension_count")
        with GGUFFile.open(synth.write(tmp_path / "m.gguf", synth.SHAPES["smollm2-135m"], "Q4_1")) as ours:
            assert all(file.get(f"llama.{key}", "u32") == ours.get(f"llama.{key}", "u32") for key in u32)
            assert all(file.get(f"llama.{key}", "f32") == ours.get(f"llama.{key}", "f32")
                       for key in ("rope.freq_base", "attention.layer_norm_rms_epsilon"))


@pytest.mark.parametrize("type_", [*synth.TYPES, "F32"])
def test_weights_have_mean_0_and_variance_1_over_columns(type_):
    rows = synth.pool(FORMATS[type_], 512, np.random.default_rng(0))
    fmt = FORMATS[type_]
    values = dequantized(rows[::7], fmt) if fmt.own_id is not None else gguf.quants.dequantize(rows[::7], fmt.type_id)
    values = values * np.sqrt(512)
    assert len(rows) % 2 and np.isfinite(values).all() and abs(values.mean()) < 0.1 and 0.7 < values.std() < 1.4


def test_rows_come_from_a_pool_again_and_again(tmp_path, monkeypatch):
    """A pool of 5 rows: each tensor from a row of its own, two experts never the same."""
    monkeypatch.setattr(synth, "POOL_BYTES", 4 * 272)
    shape = synth.SHAPES["tiny-qwen3moe"]
    rows = {n_cols: synth.pool(FORMATS["Q8_0"], n_cols, np.random.default_rng(0)) for n_cols in (256,)}
    assert rows[256].shape == (5, 272)
    with GGUFFile.open(synth.write(tmp_path / "m.gguf", shape, "Q8_0")) as file:
        starts = set()
        for name, tensor in file.tensors.items():
            if tensor.type.name == "Q8_0":
                found = file.data(name).reshape(-1, 272)
                assert np.array_equal(found[5:], found[:-5]) and len(np.unique(found[:5], axis=0)) == 5
                starts.add(found[0].tobytes())
        assert len(starts) == 5
        experts = file.data("blk.0.ffn_up_exps.weight").reshape(8, -1)
        assert all((a != b).any() for a, b in itertools.pairwise(experts))


def test_the_same_seed_is_the_same_file(tmp_path):
    shape = synth.SHAPES["tiny-llama"]
    a, b, c = (synth.write(tmp_path / f"{i}.gguf", shape, "Q4_K", seed).read_bytes() for i, seed in enumerate((0, 0, 1)))
    assert a == b and len(a) == len(c) and a != c


def test_command(tmp_path, monkeypatch, capsys):
    path = tmp_path / "m.gguf"
    monkeypatch.setattr(sys, "argv", ["synth.py", "tiny-llama", "Q4_K", "-o", str(path), "--layers", "3"])
    assert synth.main() == 0 and re.fullmatch(r".*m\.gguf: 0\.00 GB in \d+\.\d s, \d+\.\d\d GB/s\n", capsys.readouterr().out)
    with GGUFFile.open(path) as file:
        assert file.get("llama.block_count", "u32") == 3 and "blk.2.ffn_up.weight" in file.tensors
    monkeypatch.setattr(sys, "argv", ["synth.py", "tiny-llama", "Q4_K", "-o", str(path), "--layers", "0"])
    with pytest.raises(SystemExit):
        synth.main()
    assert "--layers: must be at least 1, got 0" in capsys.readouterr().err


def test_a_type_that_gguf_cannot_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match="type: 'Q1_0' is not one of F16, Q4_0, Q4_1.*, MXFP4_MOE"):
        synth.write(tmp_path / "m.gguf", synth.SHAPES["tiny-llama"], "Q1_0")
    assert not list(tmp_path.iterdir())


def test_rows_that_are_no_whole_blocks(tmp_path):
    shape = replace(synth.SHAPES["tiny-llama"], n_embd=224, n_layer=1)
    assert synth.tensor_type(synth.TensorShape("w", (4, 224)), "Q2_K") == "IQ4_NL"
    with Model.load(synth.write(tmp_path / "m.gguf", shape, "Q6_K"), device="cpu") as model, model.new_context(8) as context:
        assert np.isfinite(context.decode([1, 2, 3])).all()
