"""Architectures with gated delta nets: against llama.cpp's logits, one set of bits however the tokens are computed, and files
that are refused."""
import subprocess
import sys

import numpy as np
import pytest

from composing_cpu import ComposingCPU
from ggml_py.backends import present_devices
from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.errors import UserError
from ggml_py.cli.info import memory_bytes
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile
from ggml_py.testing import assert_bitwise_equal
from places import REFERENCE
from tiny_delta_net_models import KINDS, write_delta_net_model
from tiny_models import run

TYPES = "Q8_0", "Q4_1", "F16"


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(1).integers(0, 70, 90)


@pytest.mark.parametrize("arch", ["qwen3next", "qwen35", "qwen35moe"])
@pytest.mark.parametrize("nextn", [0, 1])
def test_logits_are_those_of_llama_cpp(arch, nextn, tmp_path):
    """Also of a file with a block that predicts further tokens, which is left alone."""
    if not REFERENCE.exists():
        pytest.skip(f"{REFERENCE} is not there")
    subprocess.run([sys.executable, REFERENCE / "tiny_gguf.py", arch, tmp_path / "m.gguf", "--seed", "1", "--set",
                    f"nextn={nextn}"], check=True)
    expected = (np.load(REFERENCE / f"logits/{arch}-mtp.npz")["logits"] if nextn
                else np.load(REFERENCE / f"logits/{arch}.npy"))
    found = {}
    for device in present_devices():
        with Model.load(tmp_path / "m.gguf", device=device) as model:
            found[device] = run(model, np.load(REFERENCE / "logits/tokens.npy"), type_k="f32", type_v="f32")
    assert np.abs(found["cpu"] - expected).max() < 1e-4 * expected.std()
    for device, logits in found.items():
        assert_bitwise_equal(logits, found["cpu"], device)


@pytest.mark.parametrize("device", present_devices())
@pytest.mark.parametrize("kind", KINDS)
def test_one_set_of_bits(kind, device, tokens, tmp_path):
    """By the definition and by the device's kernels; in micro-batches and pieces of all sizes; three sequences of different
    lengths together; taken back and gone on; restored from a checkpoint; begun with another sequence."""
    path = write_delta_net_model(tmp_path / "m.gguf", kind, TYPES)
    with Model(GGUFFile.open(path), CPUBackend("reference")) as model:
        expected = run(model, tokens)
    with Model.load(path, device=device) as model:
        for n_ubatch in 1, 7, 32, 512:
            assert_bitwise_equal(run(model, tokens, n_ubatch=n_ubatch), expected, f"micro-batches of {n_ubatch}")
        for piece in 1, 2, 3, 17, 89:
            with model.new_context(90, n_rollback=5) as context:
                rows = [context.decode(tokens[i:i + piece], logits="all") for i in range(0, 90, piece)]
                assert_bitwise_equal(np.concatenate(rows), expected, f"pieces of {piece}")
        with model.new_context(300, n_seq_max=3, n_ubatch=20) as context:
            lengths = 90, 1, 41
            together = context.decode_batch([(i, tokens[:n]) for i, n in enumerate(lengths)], logits="all")
            for rows, n in zip(together, lengths):
                assert_bitwise_equal(rows, expected[:n], f"{n} beside others")
            context.seq_cp(2, 1)
            together = context.decode_batch([(2, tokens[41:60]), (1, tokens[41:])], logits="all")
            assert_bitwise_equal(together[0], expected[41:60], "gone on beside its copy")
            assert_bitwise_equal(together[1], expected[41:], "the copy")
        with model.new_context(90, n_rollback=6) as context:
            context.decode(tokens[:30])
            context.checkpoint()
            for first, wrong in (30, 4), (35, 5), (40, 1):
                if (length := context.memory.length(0)) < first:
                    context.decode(tokens[length:first], logits="none")
                context.decode((tokens[first:first + wrong] + 1) % 70)
                context.keep(0, first)
            assert_bitwise_equal(context.decode(tokens[40:], logits="all"), expected[40:], "taken back")
            context.keep(0, 30)
            assert_bitwise_equal(context.decode(tokens[30:], logits="all"), expected[30:], "from a checkpoint")


@pytest.mark.parametrize("kind", KINDS)
def test_fused(kind, tokens, tmp_path):
    """What a GPU would fuse is made, and changes no bit."""
    path = write_delta_net_model(tmp_path / "m.gguf", kind, ("Q8_0",))
    with Model(GGUFFile.open(path), ComposingCPU()) as model:
        expected, made = run(model, tokens, no_fuse="all"), set()
        for n_ubatch in 1, 64:
            with model.new_context(90, n_ubatch=n_ubatch) as context:
                assert_bitwise_equal(context.decode(tokens, logits="all"), expected, f"micro-batches of {n_ubatch}")
                made |= {node.op for program in context.programs.values() for node in program.nodes}
    assert made >= {"gated_delta_net_gates", "rms_norm_swiglu_act", "mul_sigmoid_act"}
    assert ("weighted_sum_gated" in made) == (kind != "qwen35")


def test_value_heads_and_their_key_heads(tokens, tmp_path):
    """Heads of v in the order of their key heads, or dealt to them in turn: a model whose v heads are permuted is the same."""
    written: dict[str, np.ndarray] = {}
    path = write_delta_net_model(tmp_path / "a.gguf", "qwen35", tensors=written, n_head_v=4)
    tiled = dict(written)
    order = [0, 2, 1, 3]  # [r, key head] -> [key head, r] of 2 x 2
    for i in (0, 2):
        p, heads = f"blk.{i}.", lambda x: x.reshape(4, -1, *x.shape[1:])[order].reshape(x.shape)
        for name in "attn_gate.weight", "ssm_beta.weight", "ssm_alpha.weight", "ssm_a", "ssm_dt.bias":
            tiled[p + name] = heads(written[p + name])
        for name in "attn_qkv.weight", "ssm_conv1d.weight":
            tiled[p + name] = np.concatenate([written[p + name][:64], heads(written[p + name][64:])])
        tiled[p + "ssm_out.weight"] = heads(written[p + "ssm_out.weight"].T.copy()).T.copy()
    other = write_delta_net_model(tmp_path / "b.gguf", "qwen35", tensors=tiled, n_head_v=4)
    with Model.load(path, device="cpu") as a, Model.load(other, device="cpu") as b:
        expected = run(a, tokens)
        b.architecture.tiled = False
        found = run(b, tokens)
    assert np.abs(found - expected).max() < 1e-4 * expected.std() and np.abs(found - expected).max() > 0


def test_older_files_have_one_matrix(tokens, tmp_path):
    """ssm_in has, of each key head, rows of q, k, v and z."""
    written: dict[str, np.ndarray] = {}
    path = write_delta_net_model(tmp_path / "a.gguf", "qwen3next-legacy", tensors=written)
    new = {name: x for name, x in written.items() if "ssm_in" not in name}
    for i in (0, 2):
        q, k, v, z = np.split(written[f"blk.{i}.ssm_in.weight"].reshape(2, -1, 64), [32, 64, 128], axis=1)
        new[f"blk.{i}.attn_qkv.weight"] = np.concatenate([part.reshape(-1, 64) for part in (q, k, v)])
        new[f"blk.{i}.attn_gate.weight"] = z.reshape(-1, 64)
    other = write_delta_net_model(tmp_path / "b.gguf", "qwen3next", tensors=new, dim=32)
    with Model.load(path, device="cpu") as a, Model.load(other, device="cpu") as b:
        assert_bitwise_equal(run(a, tokens), run(b, tokens), "ssm_in")


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_what_was_reckoned(kind, tmp_path):
    path = write_delta_net_model(tmp_path / "m.gguf", kind, TYPES)
    with GGUFFile.open(path) as file, Model.load(path, device="cpu") as model:
        reckoned = memory_bytes(file, 64, "f16", "q8_0")[0]
        with model.new_context(64, type_v="q8_0") as context:
            assert len(reckoned) == 2 and sum(reckoned.values()) == context.memory.n_bytes
        with model.new_context(64, n_seq_max=2, type_v="q8_0", n_rollback=4) as context:
            assert context.memory.n_bytes == (model.architecture.cache_bytes(64, "f16", "q8_0")
                                              + 2 * model.architecture.state_bytes(4))


WRONG = [
    ("qwen35", dict(keys={"ssm.inner_size": ("uint32", 64)}), r"qwen35.ssm.inner_size is 64, must be 96, 6 heads of 16"),
    ("qwen35", dict(n_head_v=5, n_head_k=2), r"qwen35.ssm.time_step_rank is 5, must be a multiple of the 2 key heads"),
    ("qwen35", dict(dim=12), r"qwen35.ssm.state_size is 12, must be a multiple of 8"),
    ("qwen35", dict(taps=1), r"qwen35.ssm.conv_kernel is 1, must be 2 to"),
    ("qwen35", dict(interval=1), r"qwen35: no layer is recurrent, at least one must be"),
    ("qwen35moe", dict(keys={"attention.recurrent_layers": ("array", [0, 1])}), "attention.recurrent_layers"),
    ("qwen3next", dict(keys={"attention.recurrent_layers": ("array", [1, 1, 1])}), "tensor blk.1.attn_qkv.weight is missing"),
]


@pytest.mark.parametrize("kind, settings, message", WRONG)
def test_models_that_cannot_be_used(kind, settings, message, tmp_path):
    path = write_delta_net_model(tmp_path / "m.gguf", kind, **settings)
    with pytest.raises(UserError, match=message) as error:
        Model.load(path, device="cpu")
    assert "\n" not in str(error.value)
