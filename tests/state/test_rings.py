"""Layers with a window keep the positions that they need, in rings of cells that are used again and again: no bit depends on it,
and sequences go back as far as is promised."""
from pathlib import Path

import numpy as np
import pytest

from ggml_py.base.errors import UserError
from ggml_py.base.placement import PlacementOptions
from ggml_py.engine.context import Context
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile
from ggml_py.models import model_class
from ggml_py.state.kv_cache import ring_of
from ggml_py.testing import assert_bitwise_equal
from tiny_layer_models import write_layer_model
from tiny_moe_models import write_moe_model

WINDOW, TOKENS = 40, np.random.default_rng(0).integers(0, 70, 600)
RING = 128  # of 40 positions, 64 or 7 at a time, and 2 to go back


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = write_moe_model(tmp_path_factory.mktemp("rings") / "m.gguf", "gpt-oss", ("Q8_0",), n_ctx=1024, window=WINDOW)
    with Model.load(path, device="cpu") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def expected(model):
    """Of a cache that keeps all positions."""
    with model.new_context(n_ctx=640, n_ubatch=640) as context:
        assert context.memory.rings == [640] * 3
        return context.decode(TOKENS, logits="all")


def with_rings(model, **settings) -> Context:
    context = model.new_context(**{"n_ctx": 640, "n_ubatch": 64, **settings})
    assert context.memory.rings == [RING, context.n_ctx, RING]
    return context


@pytest.mark.parametrize("window, n_others, ring", [(0, 5, 1000), (100, 28, 128), (100, 29, 256), (900, 100, 1000), (1, 0, 128)])
def test_cells_of_a_ring(window, n_others, ring):
    assert ring_of(window, 1000, n_others) == ring


@pytest.mark.parametrize("settings", [{}, dict(n_ubatch=7), dict(kv_write="cpy"), dict(n_ubatch=86), dict(no_fuse="all")],
                         ids=str)
def test_no_bit_depends_on_it(model, expected, settings):
    with with_rings(model, **settings) as context:
        assert_bitwise_equal(context.decode(TOKENS, logits="all"), expected, str(settings))


def test_sequences_beside_each_other(model, expected):
    with with_rings(model, n_ctx=2 * 640, n_seq_max=2) as context:
        for first, last in (0, 100), (100, 350), (350, 600):
            rows = context.decode_batch([(0, TOKENS[first:last]), (1, TOKENS[first // 2:last // 2])], "all")
            assert_bitwise_equal(rows[0], expected[first:last], "0")
            assert_bitwise_equal(rows[1], expected[first // 2:last // 2], "1")


@pytest.mark.parametrize("n", [130, 200, 383])
def test_back_across_the_edge_of_a_window(model, expected, n):
    """After other tokens were there, two positions at a time and where a call began."""
    with with_rings(model, n_rollback=8) as context:
        context.decode(TOKENS[:n])
        for back in 8, 3, 1:
            context.decode(69 - TOKENS[n:n + back])
            context.keep(0, n)
        assert_bitwise_equal(context.decode(TOKENS[n:n + 50], logits="all"), expected[n:n + 50], f"behind {n}")


def test_what_has_been_written_over_is_refused(model, expected):
    with with_rings(model) as context:
        context.decode(TOKENS[:400])
        least = 400 - RING + WINDOW - 1
        assert context.reachable(0, 400) == 400 and context.reachable(0, least) == least and context.reachable(0, least - 1) == 0
        with pytest.raises(UserError, match=f"^sequence 0: its layers with a window do not hold what {least - 1} positions see; "
                                            f"allowed: 0, {least} to 400, and where there is a checkpoint$"):
            context.seq_rm(0, least - 1)
        assert_bitwise_equal(context.decode(TOKENS[400:420], logits="all"), expected[400:420], "as it was")
        least += 20
        context.keep(0, least)
        assert_bitwise_equal(context.decode(TOKENS[least:], logits="all"), expected[least:], "from the least")
        context.seq_rm(0)
        assert_bitwise_equal(context.decode(TOKENS, logits="all"), expected, "anew")


def test_holes_stay_holes(model):
    found = []
    for settings in dict(n_ubatch=640), dict(n_ubatch=64):
        with model.new_context(n_ctx=640, **settings) as context:
            context.decode(TOKENS[:300])
            context.seq_rm(0, 270, 280)
            found.append(context.decode(TOKENS[300:350], logits="all"))
    assert_bitwise_equal(*found, "with a hole")


def test_back_to_checkpoints(model, expected):
    with with_rings(model, n_ctx=2 * 640, n_seq_max=2) as context:
        context.decode(TOKENS[:200])
        context.checkpoint()
        context.decode(TOKENS[200:500])
        assert context.reachable(0, 300) == 200
        context.seq_cp(0, 1, 200)
        assert_bitwise_equal(context.decode(TOKENS[200:260], 1, "all"), expected[200:260], "a copy of the checkpoint")
        for _ in range(2):
            context.keep(0, 200)
            assert_bitwise_equal(context.decode(TOKENS[200:], logits="all"), expected[200:], "behind the checkpoint")
        context.drop_checkpoints()
        assert context.reachable(0, 300) == 0 and not context.memory.checkpoints[0]


def test_copies_of_a_sequence_go_on(model, expected):
    with with_rings(model, n_ctx=2 * 640, n_seq_max=2) as context:
        context.decode(TOKENS[:400])
        for n in 400, 390, 60:
            if n == 60:
                context.seq_rm(0)
                context.decode(TOKENS[:60])
            context.seq_cp(0, 1, n)
            assert_bitwise_equal(context.decode(TOKENS[n:n + 150], 1, "all"), expected[n:n + 150], f"of {n}")
        assert_bitwise_equal(context.decode(TOKENS[60:100], 0, "all"), expected[60:100], "the source")


@pytest.mark.parametrize("fails_at", [1, 2, 5])
def test_a_call_that_fails_leaves_the_sequence_as_it_was(model, expected, fails_at, monkeypatch):
    """However many positions of its windows the call has written over."""
    with with_rings(model) as context:
        context.decode(TOKENS[:150])
        queue, calls = context._queue, []

        def failing(*args):
            calls.append(args)
            if len(calls) == fails_at:
                raise KeyboardInterrupt
            return queue(*args)
        with monkeypatch.context() as patch:
            patch.setattr(context, "_queue", failing)
            with pytest.raises(KeyboardInterrupt):
                context.decode(69 - TOKENS[150:600])
        assert context.memory.length(0) == 150
        assert_bitwise_equal(context.decode(TOKENS[150:], logits="all"), expected[150:], "after it")
        context.decode(TOKENS[:1])
        assert not context.memory.checkpoints[0]


def test_greedy_and_its_step_ahead(model):
    with model.new_context(n_ctx=640, n_ubatch=640) as plain, with_rings(model) as context:
        for each in plain, context:
            each.decode(TOKENS[:300])
        assert [*plain.greedy(5, 150)] == [*context.greedy(5, 150)]


def paper(path: Path):
    with GGUFFile.open(path) as file:
        return model_class(file)(file, PlacementOptions(("cpu",)))


def test_memory_of_a_context_like_gemma_3_27b(tmp_path):
    """62 layers, every sixth without a window of 1024: at most 1.15 times what is needed, with micro-batches of 512."""
    sizes = dict(n_layer=62, n_embd=32, n_head=2, n_head_kv=1, head=16, n_rot=16, n_ff=32)
    path = write_layer_model(tmp_path / "m.gguf", "gemma3", **sizes,
                             keys={"attention.sliding_window": 1024, "attention.sliding_window_pattern": 6})
    model, row = paper(path), 2 * 16 * 2
    assert model.hp.windows.count(0) == 10
    needed, taken = row * (10 * 32768 + 52 * 1024), model.cache_bytes(32768, "f16", "f16", 512)
    assert needed < taken < 1.15 * needed
    assert model.context_bytes(32768, 2, "f16", "f16", n_ubatch=512).total() > 2 * taken


@pytest.mark.parametrize("kind, n_layer", [("gemma2", 46), ("gemma3", 62)])
def test_scores_of_27b_models_are_scaled_by_the_share_of_a_head(kind, n_layer, tmp_path):
    """What llama.cpp decides by counting layers."""
    sizes = dict(n_embd=32, n_head=4, n_head_kv=1, head=16, n_rot=16, n_ff=32)
    scales = [paper(write_layer_model(tmp_path / "m.gguf", kind, n_layer=n, **sizes)).attention_scale(0) for n in (n_layer, 3)]
    assert scales == [8**-0.5, 16**-0.5]
