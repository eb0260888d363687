"""Micro-batches that are filled up to a size: no bit depends on it, few programs are made, and what fills one up is in no
sequence."""
import numpy as np
import pytest
from hypothesis import given, strategies as st
from queueing_backend import QueueingBackend
from tiny_delta_net_models import write_delta_net_model
from tiny_hybrid_models import write_hybrid_model
from tiny_layer_models import write_layer_model
from tiny_models import write_model
from tiny_moe_models import write_moe_model

from ggml_py.base.errors import UserError
from ggml_py.backends.cpu import CPUBackend
from ggml_py.check.recording import RecordedContext
from ggml_py.engine.batch import size_of
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile
from ggml_py.state.kv_cache import KVCache
from ggml_py.state.recurrent import RecurrentMemory
from ggml_py.testing import assert_bitwise_equal

WRITERS = {"llama": lambda path: write_model(path, "llama", ("Q8_0", "F16", "Q4_0"), n_vocab=70),
           "experts": lambda path: write_moe_model(path, "qwen3moe", ("Q8_0", "F32")),
           "latent attention": lambda path: write_moe_model(path, "deepseek2", ("Q8_0", "F32")),
           "gated delta nets": lambda path: write_delta_net_model(path, "qwen35"),
           "mamba": lambda path: write_hybrid_model(path, "granitehybrid"),
           "short convolutions": lambda path: write_hybrid_model(path, "lfm2"),
           "windows": lambda path: write_layer_model(path, "gemma3"),
           "chunks": lambda path: write_layer_model(path, "llama4")}
N_SEQ, N_CTX, N_UBATCH = 3, 384, 72


@pytest.fixture(scope="module", params=WRITERS)
def model(request, tmp_path_factory):
    path = WRITERS[request.param](tmp_path_factory.mktemp("models") / "m.gguf")
    with Model(GGUFFile.open(path), QueueingBackend()) as model:
        yield model


@given(st.integers(1, 5000))
def test_sizes(n):
    size = size_of(n)
    assert size_of(size) == size >= n and (size == n or n > 16)
    assert size - n <= max(7, n / 8)


def test_few_sizes():
    assert [size_of(n) for n in (1, 16, 17, 24, 25, 64, 65, 127, 128, 129, 255, 256, 257, 512, 513, 2047)] == [
        1, 16, 24, 24, 32, 64, 72, 128, 128, 144, 256, 256, 288, 512, 576, 2048]
    assert len({size_of(n) for n in range(17, 2049)}) == 7 + 5 * 8 - 1


def played(model, seed: int, fills: bool, **settings) -> tuple[list[np.ndarray], set[int]]:
    """The results of calls that a seed gives, and the sizes of the micro-batches."""
    rng, found = np.random.default_rng(seed), []
    with model.new_context(n_ctx=N_SEQ * N_CTX, n_seq_max=N_SEQ, n_ubatch=N_UBATCH, **settings) as context:
        context.fills &= fills
        for _ in range(14):
            seq_ids = rng.permutation(N_SEQ)[:rng.integers(1, N_SEQ + 1)].tolist()
            batch = [(i, rng.integers(0, model.n_vocab, rng.integers(1, 50))) for i in seq_ids]
            batch = [(i, tokens) for i, tokens in batch if context.memory.length(i) + len(tokens) < N_CTX - 4]
            kind = rng.integers(7)
            if not batch:
                context.keep(seq_ids[0], 0)
            elif kind < 3:
                found += context.decode_batch(batch, ("all", "last", "argmax")[kind])
            elif kind == 3:
                found += [each for one in context.likelihoods([(i, tokens, tokens[1:] if len(tokens) > 1 else ())
                                                               for i, tokens in batch]) for each in one]
            elif kind == 4:
                i, n = seq_ids[0], context.memory.length(seq_ids[0])
                context.keep(i, context.reachable(i, max(n - int(rng.integers(3)), 0)))
            elif kind == 5 and context.memory.length(seq_ids[0]):
                context.seq_cp(seq_ids[0], (seq_ids[0] + 1) % N_SEQ)
            else:
                context.decode_batch(batch, "none")
                found.append(np.array([*context.greedy_batch([(i, 5) for i, _ in batch], 3)]))
            found.append(np.array([context.memory.length(i) for i in range(N_SEQ)]))
        return found, {size for key in context.programs for size in key[:2]}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kv_write", ["set_rows", "cpy"])
def test_no_bit_depends_on_it(model, seed, kv_write):
    found, sizes = played(model, seed, True, kv_write=kv_write)
    expected, other_sizes = played(model, seed, False, kv_write=kv_write)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_bitwise_equal(a, b, f"{i}")
    assert all(size_of(size) == size for size in sizes) and any(size_of(size) != size for size in other_sizes)
    assert len(sizes) < len(other_sizes)


@pytest.mark.parametrize("memory", [KVCache, RecurrentMemory])
def test_a_fault_is_seen(model, memory, monkeypatch):
    """What fills up would be taken for tokens of the sequence."""
    values = memory.values
    monkeypatch.setattr(memory, "values", lambda memory, seq, pos, n: values(memory, seq, pos, len(seq)))
    with model.new_context(N_CTX) as context:
        if memory is RecurrentMemory and not hasattr(context.memory, "states"):
            pytest.skip("no recurrent layers")
        tokens = np.arange(21) % model.n_vocab
        with pytest.raises((AssertionError, UserError, KeyError)):
            first = context.decode(tokens), context.decode([3])
            context.clear()
            context.fills = False
            assert_bitwise_equal(np.array(first), np.array([context.decode(tokens), context.decode([3])]), "a planted fault")


def test_where_there_is_no_room(model):
    """A sequence that is full but for less than is missing is not filled up, nor a micro-batch that would be too large."""
    with model.new_context(N_CTX, n_ubatch=100) as context:
        tokens = np.arange(N_CTX - 1) % model.n_vocab
        whole = context.decode(tokens, logits="all")
        assert {key[0] for key in context.programs} == {100, 83}
        context.clear()
        parts = [context.decode(part, logits="all") for part in np.split(tokens, [97, 150, 171])]
        assert_bitwise_equal(np.concatenate(parts), whole, "in parts")
        assert {key[0] for key in context.programs} == {100, 83, 97, 56, 24, 12}
        assert context.decode([1]).shape == (1, model.n_vocab) and context.memory.length(0) == N_CTX


def test_who_is_told_of_each_token_is_told_of_no_other(model):
    seen = []
    with model.new_context(N_CTX) as context:
        context.observer = lambda *rows: seen.append(rows)
        context.decode(np.arange(19))
        (tokens, seq, pos, hidden), = seen
        assert tokens.tolist() == pos.tolist() == [*range(19)] and len(seq) == len(hidden) == 19
        assert [key[0] for key in context.programs] == [24]


def test_who_fills_up(model):
    """Where a device is a CPU, and where rows of results are looked at, none is."""
    with RecordedContext(lambda *_: None, model, n_ctx=N_CTX) as context:
        context.decode(np.arange(19), logits="all")
        assert [key[0] for key in context.programs] == [19]
    with Model(GGUFFile.open(model.file.path), CPUBackend()) as other, other.new_context(N_CTX) as context:
        context.decode(np.arange(19))
        assert [key[0] for key in context.programs] == [19]
