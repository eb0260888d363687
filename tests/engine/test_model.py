"""Models end to end on the CPU: logits against float64, the same bits on every axis, contexts and their errors."""
import pickle
import re
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

import numpy_transformer
from ggml_py.kernels import threads
from ggml_py.backends import present_devices
from ggml_py.base.errors import ParameterError, UserError
from ggml_py.engine.model import Model
from ggml_py.testing import assert_bitwise_equal, digest
from places import REFERENCE
from tiny_models import run, write_model

MIXED = ("Q4_1", "Q8_0", "F16", "Q4_0", "BF16", "Q5_1", "F32", "Q5_0")


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(1).integers(0, 70, 150).astype(np.int32)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A model whose matrices are of all the types that tests can write."""
    with Model.load(write_model(tmp_path_factory.mktemp("models") / "mixed.gguf", "llama", MIXED), device="cpu") as model:
        yield model


@pytest.mark.parametrize("arch, settings", [
    ("llama", dict(rope_freqs=True)), ("llama", dict(tied=True, head=16)), ("qwen2", dict(qkv_bias=True)),
    ("qwen2", dict(qkv_bias=True, fused_qkv=False, n_head=6, n_head_kv=1)),
    ("qwen3", dict(n_head=2, n_head_kv=1, head=48)),
], ids=str)
def test_f32_models_against_float64(arch, settings, tokens, tmp_path):
    """Logits are of size 1 here; a forward pass in float32 is off by some 1e-6 of that, a wrong op by 1e-1."""
    path = write_model(tmp_path / "m.gguf", arch, **settings)
    with Model.load(path, device="cpu") as model:
        got = run(model, tokens, type_k="f32", type_v="f32")
    assert np.abs(got - numpy_transformer.logits(path, tokens)).max() < 5e-5


def test_fused_qkv_is_three_matrices(tokens, tmp_path):
    """attn_qkv.weight and its bias are the rows of Q, K and V one after the other: the same bits."""
    apart = write_model(tmp_path / "apart.gguf", "qwen2", n_layer=1, qkv_bias=True)
    parts = {t.name: t.data for t in gguf.GGUFReader(apart).tensors}
    fused = write_model(tmp_path / "fused.gguf", "qwen2", n_layer=1, qkv_bias=True, fused_qkv=True)
    reader = gguf.GGUFReader(fused, "r+")
    for tensor in reader.tensors:
        if "qkv" in tensor.name:
            tensor.data[:] = np.concatenate([parts[tensor.name.replace("qkv", part)] for part in "qkv"])
        else:
            tensor.data[:] = parts[tensor.name]
    reader.data.flush()
    with Model.load(apart, device="cpu") as a, Model.load(fused, device="cpu") as b:
        assert_bitwise_equal(run(b, tokens), run(a, tokens), "fused qkv")


def logits_on(device, path, tokens):
    with Model.load(path, device=device) as model:
        return run(model, tokens, type_k="f32", type_v="f32")


@pytest.mark.parametrize("arch",
                         ["llama", "qwen2", "qwen3", "qwen3moe", "gpt-oss", "deepseek2-lite", "deepseek2", "glm4moe",
                          "bailingmoe2"])
def test_recorded_logits_of_llama_cpp(arch, tmp_path):
    if not REFERENCE.is_dir():
        pytest.skip("needs ../shared/reference, which is not here")
    path = tmp_path / f"{arch}.gguf"
    subprocess.run([sys.executable, REFERENCE / "tiny_gguf.py", arch, path, "--seed", "1"], check=True)
    expected = np.load(REFERENCE / "logits" / f"{arch}.npy")
    *on_gpus, on_cpu = (logits_on(device, path, np.load(REFERENCE / "logits" / "tokens.npy").ravel())
                        for device in present_devices())
    assert np.abs(on_cpu - expected).max() <= 2e-4
    for on_gpu in on_gpus:
        assert_bitwise_equal(on_gpu, on_cpu, f"{arch} on a GPU")


CACHES = [("f16", "f16"), ("f32", "f32"), ("q8_0", "q8_0"), ("f16", "q8_0"), ("q8_0", "f32")]


@pytest.mark.parametrize("type_k, type_v", CACHES)
def test_same_bits_on_every_axis(mixed, tokens, type_k, type_v):
    types = dict(type_k=type_k, type_v=type_v)
    expected = run(mixed, tokens, **types)
    for n_ubatch in 1, 7, 32, 512:
        assert_bitwise_equal(run(mixed, tokens, n_ubatch=n_ubatch, **types), expected, f"n_ubatch={n_ubatch}")
    with mixed.new_context(n_ctx=256, **types) as context:
        pieces = [context.decode(tokens[i:i + 50], logits="all") for i in range(0, 150, 50)]
        assert_bitwise_equal(np.concatenate(pieces), expected, "pieces of 50")
    with mixed.new_context(n_ctx=4 * 160, n_seq_max=4, n_ubatch=64, **types) as context:
        lengths = {2: 80, 0: 150, 3: 1, 1: 149}
        together = context.decode_batch([(seq, tokens[:n]) for seq, n in lengths.items()], logits="all")
        for (seq, n), got in zip(lengths.items(), together):
            assert_bitwise_equal(got, expected[:n], f"sequence {seq} of four")
    before = threads.get_num_threads()
    try:
        threads.set_num_threads(1)
        assert_bitwise_equal(run(mixed, tokens, **types), expected, "1 thread")
    finally:
        threads.set_num_threads(before)


def test_cache_types_differ(mixed, tokens):
    """Else the test above would not test them."""
    assert len({digest(run(mixed, tokens, type_k=k, type_v=v)) for k, v in CACHES}) == len(CACHES)


def test_logits_last_and_none(mixed, tokens):
    everything = run(mixed, tokens)
    assert_bitwise_equal(run(mixed, tokens, logits="last"), everything[-1:], "last")
    with mixed.new_context(n_ctx=256) as context:
        assert context.decode(tokens[:100], logits="none").shape == (0, 70)
        assert_bitwise_equal(context.decode(tokens[100:], logits="all"), everything[100:], "after none")


def test_argmax_is_that_of_the_logits(mixed, tokens):
    expected = run(mixed, tokens).argmax(1)
    with mixed.new_context(n_ctx=2 * 256, n_seq_max=2, n_ubatch=64) as context:
        found = [context.decode(tokens[:100], logits="argmax"),
                 *(context.decode(tokens[i:i + 1], logits="argmax") for i in range(100, 110))]
        assert all(ids.dtype == np.int32 for ids in found) and np.concatenate(found).tolist() == expected[99:110].tolist()
        both = context.decode_batch([(1, tokens[:7]), (0, tokens[110:150])], logits="argmax")
        assert [ids.tolist() for ids in both] == [[expected[6]], [expected[149]]]


def test_seq_rm_and_clear(mixed, tokens):
    expected = run(mixed, tokens)
    with mixed.new_context(n_ctx=256) as context:
        context.decode(tokens[::-1], logits="none")
        context.clear()
        context.decode(tokens[:60], logits="none")
        context.decode(tokens[:30], logits="none")
        context.seq_rm(0, 60)
        assert_bitwise_equal(context.decode(tokens[60:], logits="all"), expected[60:], "after seq_rm of the tail")
        context.clear()
        context.decode(tokens[:60], logits="none")
        context.seq_rm(0, 10, 20)
        assert digest(context.decode(tokens[60:], logits="all")) != digest(expected[60:])  # ten keys are gone


def test_a_failed_decode_leaves_the_sequence_as_it_was(mixed, tokens, monkeypatch):
    expected = run(mixed, tokens)
    with mixed.new_context(n_ctx=256, n_ubatch=20) as context:
        context.decode(tokens[:50], logits="none")
        original, calls = context._queue, []

        def failing(*args):
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return original(*args)
        monkeypatch.setattr(context, "_queue", failing)
        with pytest.raises(KeyboardInterrupt):
            context.decode(tokens[50:], logits="none")
        monkeypatch.undo()
        assert_bitwise_equal(context.decode(tokens[50:], logits="all"), expected[50:], "after an interrupt")


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_arena_that_cannot_grow_leaves_a_context_that_works(mixed, tokens, monkeypatch, error):
    """For shapes that were bound before and for new ones: logits are right, in memory that the arenas hold;
    and it can grow later."""
    expected = run(mixed, tokens[:70])

    def fails(n_bytes):
        raise error
    with mixed.new_context(n_ctx=256) as context:
        for i in range(2):
            context.decode(tokens[i:i + 1])
        with monkeypatch.context() as patch:
            patch.setattr(mixed.backend, "empty", fails)
            for _ in range(2):
                with pytest.raises(error):
                    context.decode(tokens[2:70])
        for first, n in (2, 1), (3, 2), (5, 1), (6, 64):
            assert_bitwise_equal(context.decode(tokens[first:first + n]), expected[first + n - 1:first + n],
                                 f"{n} tokens behind {first}")
            arena = context.arenas.buffers["cpu"]
            assert context.arenas.sizes == {"cpu": arena.size}
            assert all(storage is arena for storage, _ in (tensor.memory for tensor in context.program(n, 1).inputs))


def test_closing_twice_is_closing_once(tmp_path):
    model = Model.load(write_model(tmp_path / "m.gguf"), device="cpu")
    with model, model.new_context(n_ctx=8) as context:
        context.decode([1])
        context.close()


@pytest.mark.parametrize("call, message", [
    (lambda c: c.decode([]), "tokens: must be a one-dimensional list of ids, at least one, got"),
    (lambda c: c.decode([70]), "tokens: must be 0 to 69, got 70"),
    (lambda c: c.decode([-1]), "tokens: must be 0 to 69, got -1"),
    (lambda c: c.decode([1.5]), "tokens: must be a one-dimensional list of ids"),
    (lambda c: c.decode([1], seq_id=1), "seq_id: must be 0 to 0, got 1"),
    (lambda c: c.decode([1] * 257), "context: sequence 0 has 0 of 256 positions in use, 257 more do not fit"),
    (lambda c: c.decode([1], logits="some"), "logits: 'some' is not allowed; allowed: all, last, argmax, argmaxes, none"),
    (lambda c: c.decode_batch([(0, [1]), (0, [2])]), "decode_batch: a sequence may occur once"),
])
def test_bad_calls(mixed, call, message):
    with mixed.new_context(n_ctx=256) as context, pytest.raises(UserError) as error:
        call(context)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("settings, message", [
    (dict(type_k="q4_0"), "^type_k: 'q4_0' is not a cache type; allowed: f32, f16, q8_0"),
    (dict(n_ubatch=0), "n_ubatch: must be at least 1, got 0"),
    (dict(n_ctx=2, n_seq_max=3), "n_ctx: 2 positions do not give each of 3 sequences one"),
])
def test_bad_contexts(mixed, settings, message):
    with pytest.raises(UserError, match=message):
        mixed.new_context(**settings)


@pytest.mark.parametrize("device, message", [
    ("gpu", "^device: 'gpu' is not a device; allowed: auto, cpu, cpu:N, cuda, cuda:N$"), ("cuda:99", "^device: cuda:99: "),
    ("cpu:x", "is not a device"), ("cuda:x", "is not a device")])
def test_bad_devices(device, message):
    with pytest.raises(ParameterError, match=message) as error:
        Model.load("none.gguf", device=device)
    assert error.value.parameter == "device" and isinstance(error.value, ValueError)
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_a_closed_model_says_so(mixed):
    model = Model.load(mixed.file.path, device="cpu")
    model.close()
    for call in (lambda: model.generate([1]), lambda: model.chat([{"role": "user", "content": "x"}]),
                 lambda: model.score([1], [2]), lambda: model.new_context(n_ctx=8)):
        with pytest.raises(RuntimeError, match=r"^model: it is closed, its memory is gone; allowed: Model\.load\(\)$"):
            call()


def test_a_model_by_its_name(mixed, monkeypatch, capsys):
    """What is pulled is told by logging, since no stream is named."""
    pulled = []
    monkeypatch.setattr("ggml_py.files.pull.pull", lambda name, log: pulled.append((name, log)) or mixed.file.path)
    with Model.load("smollm2", device="cpu") as model:
        assert model.file.path == mixed.file.path
    assert pulled == [("smollm2", None)] and capsys.readouterr() == ("", "")
    with pytest.raises(UserError, match="^smollm2: cannot be opened: No such file"):
        Model.load(Path("smollm2"), device="cpu")  # a path is a path


def test_positions_are_shared(mixed):
    """The docstring says so, and the README."""
    with mixed.new_context(64, n_seq_max=2) as context:
        assert context.n_ctx == 32
    assert "new_context(64, n_seq_max=2) has two sequences of 32" in " ".join(mixed.new_context.__doc__.split())


def test_repr(mixed):
    path = mixed.file.path
    assert repr(mixed) == f"<Model {str(path)!r}: llama, 2 layers, 70 tokens, on cpu>"
    assert re.fullmatch(rf"<GGUFFile '{path}': \d+ keys, \d+ tensors>", repr(mixed.file))
    assert re.fullmatch(rf"<Metadata of '{path}': \d+ keys>", repr(mixed.file.metadata))
    assert repr(mixed.tokenizer) == "<Tokenizer no_vocab: 70 tokens>"
    with mixed.new_context(64, n_seq_max=2, type_k="q8_0") as context:
        assert repr(context) == "<Context: 2 sequences of 32 positions, K q8_0, V f16, on cpu>"
    assert repr(context) == "<Context: 2 sequences of 32 positions, K q8_0, V f16, on cpu, closed>"
    with mixed.new_context(64) as context:
        assert repr(context) == "<Context: 1 sequence of 64 positions, K f16, V f16, on cpu>"


def test_what_a_cache_takes_is_known_without_it(mixed):
    for type_k, type_v in ("f16", "q8_0"), ("f32", "f16"):
        with mixed.new_context(64, type_k=type_k, type_v=type_v) as context:
            assert mixed.architecture.cache_bytes(64, type_k, type_v) == context.memory.n_bytes


@pytest.mark.parametrize("arch, settings, message", [
    ("mamba", {}, "architecture 'mamba' is unknown; known: llama, qwen2, qwen3, qwen3moe, qwen3next, qwen35, qwen35moe, "
                  "gpt-oss, deepseek2, glm4moe, bailingmoe2"),
    ("llama", dict(keys={"expert_count": ("uint32", 8)}), "llama with 8 experts is not supported"),
    ("llama", dict(head=30), "cache_k-0: q8_0 rows must be a multiple of 32 values, got 60"),
    ("llama", dict(keys={"rope.scaling.type": ("string", "magic")}),
     "rope.scaling.type is 'magic', must be one of none, linear, yarn, longrope$"),
])
def test_models_that_cannot_be_used(arch, settings, message, tmp_path):
    path = write_model(tmp_path / "m.gguf", arch, **settings)
    with pytest.raises(UserError, match=message), Model.load(path, device="cpu") as model:
        model.new_context(type_k="q8_0")


def test_missing_and_misshapen_tensors(tmp_path):
    path = write_model(tmp_path / "m.gguf", "qwen3")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_ux.weight"))
    with pytest.raises(UserError, match="tensor blk.1.ffn_up.weight is missing"):
        Model.load(path, device="cpu")
    path = write_model(tmp_path / "n.gguf", "qwen3", keys={"expert_used_count": ("uint32", 0)}, n_ff=64)
    path.write_bytes(path.read_bytes().replace(b"attention.head_count_kv\x04\x00\x00\x00\x02",
                                               b"attention.head_count_kv\x04\x00\x00\x00\x01"))
    with pytest.raises(UserError, match=r"tensor blk.0.attn_k.weight has shape \[64, 64\], expected \[32, 64\]: "
                       "qwen3.attention.head_count_kv is 1, qwen3.attention.key_length is 32, qwen3.embedding_length is 64$"):
        Model.load(path, device="cpu")


@pytest.mark.parametrize("settings", [dict(), dict(type_k="q8_0", type_v="f32"), dict(kv_write="cpy")], ids=str)
@pytest.mark.parametrize("n", [1, 40, -1])
def test_a_sequence_that_begins_with_another(mixed, tokens, settings, n):
    """Its logits are those of the same tokens decoded in it; what it had before does not count, and both go on apart."""
    with mixed.new_context(n_ctx=3 * 64, n_seq_max=3, **settings) as context:
        context.decode(tokens[:50], 0)
        context.decode(tokens[60:75], 2)
        context.seq_cp(0, 2, n)
        kept = tokens[:50][:n] if n > 0 else tokens[:50]
        assert context.memory.length(2) == len(kept) and context.memory.length(0) == 50
        expected = context.decode([*kept, *tokens[100:110]], 1, "all")[len(kept):]
        assert_bitwise_equal(context.decode(tokens[100:110], 2, "all"), expected, "of the copy")
        found = context.decode(tokens[50:55], 0, "all")
    with mixed.new_context(n_ctx=64, **settings) as context:
        assert_bitwise_equal(found, context.decode(tokens[:55], logits="all")[50:], "of the sequence that was copied")


@pytest.mark.parametrize("source, seq_id, n, message", [
    (0, 0, 2, "seq_cp: sequence 0 cannot begin with 2 positions of sequence 0, which has 5; allowed: up to 5, of another "
              "sequence"),
    (0, 1, 6, "seq_cp: sequence 1 cannot begin with 6 positions of sequence 0, which has 5; allowed: up to 5, of another "
              "sequence"),
    (0, 2, 1, "seq_id: must be 0 to 1, got 2"), (-1, 0, 1, "seq_id: must be 0 to 1, got -1")])
def test_copies_that_cannot_be(mixed, tokens, source, seq_id, n, message):
    with mixed.new_context(n_ctx=64, n_seq_max=2) as context:
        context.decode(tokens[:5])
        with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
            context.seq_cp(source, seq_id, n)
        assert (context.memory.length(0), context.memory.length(1)) == (5, 0)
