"""Architectures whose layers are declared: against llama.cpp's logits, and one set of bits however the tokens are computed."""
import subprocess
import sys

import numpy as np
import pytest

from ggml_py.backends import present_devices
from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.errors import UserError
from ggml_py.base.placement import PlacementOptions
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile
from ggml_py.models import model_class
from ggml_py.testing import assert_bitwise_equal
from places import REFERENCE
from tiny_layer_models import BIASES, KINDS, write_layer_model
from tiny_models import run


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_llama_cpp(kind, tmp_path):
    """In micro-batches of all sizes, on every device that is here."""
    if not REFERENCE.exists():
        pytest.skip(f"{REFERENCE} is not there")
    if not (REFERENCE / f"logits/{kind}.npy").exists():
        pytest.skip(f"there are none of {kind}, a form of {KINDS[kind].arch}")
    path = tmp_path / "m.gguf"
    subprocess.run([sys.executable, REFERENCE / "tiny_gguf.py", kind, path, "--seed", "1"], check=True)
    expected, tokens = np.load(REFERENCE / f"logits/{kind}.npy"), np.load(REFERENCE / "logits/tokens.npy")
    found = {}
    for device in present_devices():
        with Model.load(path, device=device) as model:
            for n_ubatch in 512, 7, 1:
                found[device, n_ubatch] = run(model, tokens, n_ubatch=n_ubatch, type_k="f32", type_v="f32")
    logits = found["cpu", 512]
    assert np.abs(logits - expected).max() < 3e-4 * expected.std()
    for setting, other in found.items():
        assert_bitwise_equal(other, logits, f"{kind} {setting}")


NEEDED_KEYS = "block_count context_length embedding_length attention.head_count expert_count expert_used_count".split()
SECTIONS = "rope.dimension_sections"
GEMMA4 = ("attention.sliding_window attention.sliding_window_pattern attention.key_length_swa attention.value_length_swa "
          "embedding_length_per_layer_input")
NEEDED = {"qwen2vl": SECTIONS, "qwen3vl": SECTIONS, "qwen3vlmoe": SECTIONS, "minimax-m2": "expert_gating_func",
          "granite": "logit_scale", "granitemoe": "logit_scale", "cohere2": "logit_scale attention.sliding_window",
          "gemma4": GEMMA4, "gemma4-moe": GEMMA4,
          **dict.fromkeys(("llama4", "llama4-two"), "interleave_moe_layer_step expert_feed_forward_length")}
OPTIONAL = {"output.weight", *(f"blk.1.{name}" for name in [*BIASES.split(), "exp_probs_b.bias"])}
NEEDED_TENSORS = {"olmo2": {"output.weight"}, "olmo3": {"output.weight"}, "olmoe": {"output.weight"},
                  "minimax-m2": {"output.weight", "blk.1.exp_probs_b.bias"},
                  "starcoder2": {f"blk.1.{name}" for name in BIASES.split()}}
LEFT_OUT = {"gemma4": {"blk.1.attn_v.weight", "blk.1.layer_output_scale.weight"},  # that some files do not have
            "gemma4-moe": {"blk.1.ffn_down_exps.scale"}}


def refusal(path) -> str:
    """What is said of a file, behind its path; "" where nothing is."""
    with GGUFFile.open(path) as file:
        try:
            model_class(file)(file, PlacementOptions(("cpu",))).check_tensors(nextn=False)
        except UserError as error:
            return str(error).removeprefix(f"{path}: ")
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_missing_is_named(kind, tmp_path):
    """In one line: a key, or the tensor whose shape follows from it; and a tensor that is not there."""
    arch, path = KINDS[kind].arch or kind, tmp_path / "m.gguf"
    with GGUFFile.open(write_layer_model(path, kind)) as file:
        keys = [key.removeprefix(f"{arch}.") for key in file.metadata if key.startswith(f"{arch}.")]
        tensors = [name for name in file.tensors if name.startswith("blk.1.") or not name.startswith("blk.")]
    for key in keys:
        said = refusal(write_layer_model(path, kind, keys={key: None}))
        is_needed = key in [*NEEDED_KEYS, KINDS[kind].eps, *NEEDED.get(kind, "").split()]
        assert f"{arch}.{key}" in said if is_needed else said == "" or said.startswith((f"{arch}.", "tensor ")), (key, said)
        assert not said or said.isprintable()
    for name in tensors:
        said = refusal(write_layer_model(path, kind, without=name))
        is_optional = name in (OPTIONAL | LEFT_OUT.get(kind, set())) - NEEDED_TENSORS.get(kind, set())
        assert said == ("" if is_optional else f"tensor {name.replace('_gate_up_exps', '_gate_exps')} is missing")


@pytest.mark.parametrize("kind", KINDS)
def test_one_set_of_bits(kind, tmp_path):
    """By the definition and by the kernels; fused or not, in micro-batches of all sizes, two sequences together."""
    path = write_layer_model(tmp_path / "m.gguf", kind, ("Q8_0", "Q4_1", "F16"))
    tokens = np.random.default_rng(2).integers(0, 70, 60)
    with Model(GGUFFile.open(path), CPUBackend("reference")) as model:
        expected = run(model, tokens[:25])
    with Model.load(path, device="cpu") as model:
        logits = run(model, tokens)
        assert np.isfinite(logits).all() and logits.std() > 0.1
        assert_bitwise_equal(logits[:25], expected, f"{kind}: the definition")
        for settings in dict(n_ubatch=1), dict(n_ubatch=7), dict(no_fuse="all"), dict(kv_write="cpy", n_ubatch=33):
            assert_bitwise_equal(run(model, tokens, **settings), logits, f"{kind} {settings}")
        assert_bitwise_equal(run(model, tokens, logits="last"), logits[-1:], f"{kind} last")
        with model.new_context(n_ctx=2 * 80, n_seq_max=2, n_ubatch=32) as context:
            for rows, n in zip(context.decode_batch([(1, tokens[:41]), (0, tokens)], logits="all"), (41, 60)):
                assert_bitwise_equal(rows, logits[:n], f"{kind} beside another sequence")
