"""Architectures with short convolutions and Mamba 2 layers: against llama.cpp's logits, one set of bits however the tokens are
computed, and files that are refused."""
import subprocess
import sys

import numpy as np
import pytest

from composing_cpu import ComposingCPU
from ggml_py.backends import present_devices
from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.errors import UserError
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile
from ggml_py.testing import assert_bitwise_equal
from places import REFERENCE
from tiny_hybrid_models import KINDS, write_hybrid_model
from tiny_models import run

TYPES = "Q8_0", "Q4_1", "F16"
N = 50
TOKENS = np.random.default_rng(1).integers(0, 70, N)


@pytest.mark.parametrize("arch", ["lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "granitehybrid"])
def test_logits_are_those_of_llama_cpp(arch, tmp_path):
    if not REFERENCE.exists():
        pytest.skip(f"{REFERENCE} is not there")
    subprocess.run([sys.executable, REFERENCE / "tiny_gguf.py", arch, tmp_path / "m.gguf", "--seed", "1"], check=True)
    expected, tokens, found = np.load(REFERENCE / f"logits/{arch}.npy"), np.load(REFERENCE / "logits/tokens.npy"), {}
    for device in present_devices():
        with Model.load(tmp_path / "m.gguf", device=device) as model:
            found[device] = run(model, tokens, type_k="f32", type_v="f32")
            for n_ubatch in 1, 7:
                assert_bitwise_equal(run(model, tokens, type_k="f32", type_v="f32", n_ubatch=n_ubatch), found[device], device)
    assert np.abs(found["cpu"] - expected).max() < 3e-4 * expected.std()
    for device, logits in found.items():
        assert_bitwise_equal(logits, found["cpu"], device)


@pytest.mark.parametrize("device", present_devices())
@pytest.mark.parametrize("kind", KINDS)
def test_one_set_of_bits(kind, device, tmp_path):
    """By the definition and by the device's kernels; in micro-batches and pieces of several sizes; three sequences of different
    lengths together; a copy; taken back and gone on; restored from a checkpoint."""
    path = write_hybrid_model(tmp_path / "m.gguf", kind, TYPES)
    with Model(GGUFFile.open(path), CPUBackend("reference")) as model:
        expected = run(model, TOKENS)
    with Model.load(path, device=device) as model:
        for n_ubatch in 1, 7, 512:
            assert_bitwise_equal(run(model, TOKENS, n_ubatch=n_ubatch), expected, f"micro-batches of {n_ubatch}")
        assert_bitwise_equal(run(model, TOKENS, no_fuse="all"), expected, "nothing fused")
        for piece in 2, 3, 17:
            with model.new_context(N, n_rollback=5) as context:
                rows = [context.decode(TOKENS[i:i + piece], logits="all") for i in range(0, N, piece)]
                assert_bitwise_equal(np.concatenate(rows), expected, f"pieces of {piece}")
        with model.new_context(200, n_seq_max=3, n_ubatch=20) as context:
            lengths = N, 1, 31
            together = context.decode_batch([(i, TOKENS[:n]) for i, n in enumerate(lengths)], logits="all")
            for rows, n in zip(together, lengths):
                assert_bitwise_equal(rows, expected[:n], f"{n} beside others")
            context.seq_cp(2, 1)
            together = context.decode_batch([(2, TOKENS[31:40]), (1, TOKENS[31:])], logits="all")
            assert_bitwise_equal(together[0], expected[31:40], "gone on beside its copy")
            assert_bitwise_equal(together[1], expected[31:], "the copy")
        with model.new_context(N, n_rollback=6) as context:
            context.decode(TOKENS[:30])
            context.checkpoint()
            for first, wrong in (30, 4), (35, 5), (40, 1):
                if (length := context.memory.length(0)) < first:
                    context.decode(TOKENS[length:first], logits="none")
                context.decode((TOKENS[first:first + wrong] + 1) % 70)
                context.keep(0, first)
            assert_bitwise_equal(context.decode(TOKENS[40:], logits="all"), expected[40:], "taken back")
            context.keep(0, 30)
            assert_bitwise_equal(context.decode(TOKENS[30:], logits="all"), expected[30:], "from a checkpoint")


@pytest.mark.parametrize("kind", KINDS)
def test_fused(kind, tmp_path):
    """What a GPU would fuse is made, the rows of a mixer's first matrix among it, and changes no bit."""
    with Model(GGUFFile.open(write_hybrid_model(tmp_path / "m.gguf", kind, ("Q8_0",))), ComposingCPU()) as model:
        expected, made = run(model, TOKENS, no_fuse="all"), set()
        for n_ubatch in 1, 64:
            with model.new_context(N, n_ubatch=n_ubatch) as context:
                assert_bitwise_equal(context.decode(TOKENS, logits="all"), expected, f"micro-batches of {n_ubatch}")
                made |= {(node.op, node.name) for program in context.programs.values() for node in program.nodes}
    assert any(op == "mul_mat_qkv" and "-0" in name for op, name in made), made


def test_latent_experts(tmp_path):
    """Through matrices that change nothing they are those that see the row itself; through others they are not."""
    written: dict[str, np.ndarray] = {}
    path = write_hybrid_model(tmp_path / "a.gguf", "nemotron_h_moe", tensors=written, n_latent=64)
    with Model.load(path, device="cpu") as model:
        other = run(model, TOKENS)
    for name in written:
        if "latent" in name:
            written[name] = np.eye(64, dtype=np.float32)
    latent = write_hybrid_model(tmp_path / "b.gguf", "nemotron_h_moe", tensors=written, n_latent=64)
    plain = write_hybrid_model(tmp_path / "c.gguf", "nemotron_h_moe", tensors=written, n_latent=0)
    with Model.load(latent, device="cpu") as a, Model.load(plain, device="cpu") as b:
        found = run(a, TOKENS)
        assert_bitwise_equal(found, run(b, TOKENS), "identity")
    assert np.abs(found - other).max() > 0.1 * found.std()


def test_what_files_may_lack(tmp_path):
    """A bias of zeros is as good as none."""
    written: dict[str, np.ndarray] = {}
    path = write_hybrid_model(tmp_path / "a.gguf", "nemotron_h", tensors=written)
    for name in written:
        if name.endswith("conv1d.bias"):
            written[name] = np.zeros_like(written[name])
    zeros = write_hybrid_model(tmp_path / "b.gguf", "nemotron_h", tensors=written)
    none = write_hybrid_model(tmp_path / "c.gguf", "nemotron_h", tensors=written, conv_bias=False)
    with Model.load(path, device="cpu") as a, Model.load(zeros, device="cpu") as b, Model.load(none, device="cpu") as c:
        assert_bitwise_equal(run(b, TOKENS), run(c, TOKENS), "zeros")
        assert not np.array_equal(run(a, TOKENS), run(c, TOKENS))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_what_was_reckoned(kind, tmp_path):
    """Attention has caches, recurrent blocks have states, feed-forward blocks neither."""
    path = write_hybrid_model(tmp_path / "m.gguf", kind)
    with Model.load(path, device="cpu") as model, model.new_context(64, n_seq_max=2, type_v="q8_0", n_rollback=4) as context:
        architecture = model.architecture
        assert context.memory.n_bytes == architecture.cache_bytes(64, "f16", "q8_0") + 2 * architecture.state_bytes(4)
        blocks = {"blocks": "rar", **KINDS[kind]}["blocks"]
        assert [*architecture.state_sizes()] == [i for i, block in enumerate(blocks) if block == "r"]
        assert [i for i, sizes in enumerate(architecture.cache_sizes()) if any(sizes)] == [blocks.index("a")]


SSM = ["ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"]
REQUIRED = {"lfm2": ["shortconv.l_cache"], "lfm2moe": ["shortconv.l_cache", "expert_gating_func", "expert_count"],
            "nemotron_h": SSM, "nemotron_h_moe": [*SSM, "expert_count", "expert_shared_feed_forward_length"],
            "granitehybrid": SSM}
EVERYWHERE = ["embedding_length", "block_count", "context_length", "attention.head_count", "attention.layer_norm_rms_epsilon"]


@pytest.mark.parametrize("kind, key", [(kind, key) for kind, keys in REQUIRED.items() for key in [*keys, *EVERYWHERE]])
def test_keys_that_are_missing(kind, key, tmp_path):
    path = write_hybrid_model(tmp_path / "m.gguf", kind, keys={key: ("", None)})
    with pytest.raises(UserError, match=f"{kind}.{key}|metadata") as error:
        Model.load(path, device="cpu")
    assert "\n" not in str(error.value)


WRONG = [
    ("lfm2", dict(keys={"attention.head_count_kv": ("array", [0, 3, 0])}),
     "attention.head_count_kv is 3, must be 0 or a divisor of the 4 heads of layer 1"),
    ("lfm2", dict(keys={"attention.head_count_kv": ("array", [0, 2])}), "lfm2.attention.head_count_kv"),
    ("lfm2", dict(keys={"attention.head_count_kv": ("array", [2, 2, 0])}), "tensor blk.0.attn_q.weight is missing"),
    ("lfm2", dict(keys={"shortconv.l_cache": ("uint32", 1)}), "lfm2.shortconv.l_cache is 1, must be 2 to"),
    ("lfm2", dict(keys={"shortconv.l_cache": ("uint32", 5)}), r"blk.0.shortconv.conv.weight has shape \[64, 3\], expected "
                                                              r"\[64, 5\].*shortconv.l_cache is 5"),
    ("lfm2", dict(without=["token_embd_norm.weight"]), "tensor token_embd_norm.weight is missing"),
    ("lfm2moe", dict(without=["blk.1.exp_probs_b.bias"]), "tensor blk.1.exp_probs_b.bias is missing"),
    ("lfm2moe", dict(keys={"expert_gating_func": ("uint32", 9)}), "lfm2moe.expert_gating_func is 9, must be one of"),
    ("nemotron_h", dict(keys={"ssm.inner_size": ("uint32", 94)}), "ssm.inner_size is 94, must be a multiple of the 4 heads"),
    ("nemotron_h", dict(keys={"ssm.group_count": ("uint32", 3)}), "ssm.time_step_rank is 4, must be a multiple of the 3 groups"),
    ("nemotron_h", dict(n_state=12), "ssm.state_size is 12, must be a multiple of 8"),
    ("nemotron_h", dict(keys={"ssm.conv_kernel": ("uint32", 1)}), "ssm.conv_kernel is 1, must be 2 to"),
    ("nemotron_h", dict(keys={"ssm.inner_size": ("uint32", 192)}), "blk.0.ssm_in.weight has shape .*ssm.inner_size is 192"),
    ("nemotron_h", dict(without=["blk.3.ssm_a"]), "tensor blk.3.ssm_a is missing"),
    ("nemotron_h", dict(without=["blk.0.ssm_norm.weight"]), "tensor blk.0.ssm_norm.weight is missing"),
    ("nemotron_h_moe", dict(without=["blk.1.exp_probs_b.bias"]), "tensor blk.1.exp_probs_b.bias is missing"),
    ("nemotron_h_moe", dict(keys={"moe_latent_size": ("uint32", 16)}), "moe_latent_size is 16"),
]


@pytest.mark.parametrize("kind, settings, message", WRONG)
def test_models_that_cannot_be_used(kind, settings, message, tmp_path):
    path = write_hybrid_model(tmp_path / "m.gguf", kind, **settings)
    with pytest.raises(UserError, match=message) as error:
        Model.load(path, device="cpu")
    assert "\n" not in str(error.value)
