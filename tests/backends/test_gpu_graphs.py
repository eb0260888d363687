"""CUDA graphs on a GPU: replays give the bits of eager steps and of the recorded digests, over edges of pieces of keys,
evictions and moved arenas; stale ones do not."""
from itertools import islice

import gguf
import numpy as np
import pytest

import goldens
import smollm2
from cuda_simulator import no_gpu
from ggml_py.base.defaults import TEXT
from ggml_py.base.errors import UserError
from ggml_py.engine.model import Model
from ggml_py.graph.fuse import PASSES
from ggml_py.testing import assert_bitwise_equal
from moving_cache import MovingCache
from tiny_models import write_model

pytestmark = pytest.mark.gpu

TOKENS = np.random.default_rng(8).integers(0, 70, 800).astype(np.int32)


@pytest.fixture(scope="module", autouse=True)
def a_gpu():
    reason = no_gpu()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def smol():
    with Model.load(smollm2.require(), device="cuda:0") as model:
        yield model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    with Model.load(write_model(tmp_path_factory.mktemp("models") / "m.gguf", "llama", ("Q8_0", "F16", "Q4_0", "BF16")),
                    device="cuda:0") as model:
        yield model


@pytest.fixture(params=["set_rows", "cpy"])
def kv_write(request):
    return request.param


def both(model, play, **settings):
    """play(context) -> arrays; those of replayed steps must be those of eager ones. Returns the counters of the graphs."""
    with model.new_context(graphs=False, **settings) as context:
        expected = play(context)
        assert context.launches() == "CUDA graphs: none"
    with model.new_context(**settings) as context:
        for i, (found, wanted) in enumerate(zip(play(context), expected, strict=True)):
            assert_bitwise_equal(found, wanted, f"step {i}, {settings}")
        return context.counters


@pytest.mark.parametrize("types", [("f16", "f16"), ("q8_0", "q8_0"), ("f32", "f32"), ("q8_0", "f32")], ids=str)
def test_over_edges_of_pieces(tiny, types, kv_write):
    """Tokens at positions 250 to 269, 505 to 524 and 765 to 769; the parts before are filled up to 256, 240 and 240."""
    def play(context):
        found, done = [], 0
        for start, n in ((250, 20), (505, 20), (765, 5)):
            context.decode(TOKENS[done:start], logits="none")
            found += [context.decode(TOKENS[i:i + 1]) for i in range(start, start + n)]
            done = start + n
        return found
    counters = both(tiny, play, n_ctx=800, type_k=types[0], type_v=types[1], kv_write=kv_write)
    assert counters.captures == 2 and counters.replays == 45 - 1 + 1


def test_verification_and_several_sequences(tiny, kv_write):
    def play(context):
        found = [context.decode(TOKENS[:40], seq_id=s) for s in range(3)]
        for i in range(40, 100, 5):
            found.append(context.decode(TOKENS[i:i + 5], seq_id=1, logits="all"))
            context.seq_rm(1, 43 + (i - 40) // 5)  # drafts that were wrong
            found += context.decode_batch([(2, TOKENS[i:i + 1]), (0, TOKENS[i + 1:i + 2])])
        context.seq_rm(0, 10, 20)
        found += [context.decode([i], seq_id=0) for i in range(5)]
        context.clear()
        return found + [context.decode([i], seq_id=i % 3) for i in range(9)]
    counters = both(tiny, play, n_ctx=3 * 200, n_seq_max=3, kv_write=kv_write)
    assert counters.replays > 30 and not counters.refusals


def test_argmax(smol):
    def play(context, logits):
        context.clear()
        return [context.decode(tokens, logits=logits)[0] for tokens in (TOKENS[:30], *TOKENS[30:40, None])]
    for no_fuse in (), "mul_mat_argmax":
        with smol.new_context(n_ctx=256, no_fuse=no_fuse) as context:
            assert [int(token) for token in play(context, "argmax")] == [int(row.argmax()) for row in play(context, "last")]
            assert context.counters.captures == 2


@pytest.mark.parametrize("graphs", [True, False])
def test_greedy(smol, graphs, kv_write):
    """The ids of single steps; stopped in the middle and gone on with, the sequence is as if nothing had been queued."""
    def play(context, continued):
        context.decode(TOKENS[:250], logits="none")
        found = [*continued(5, 30), context.decode([7])[0]]  # over the edge of a piece
        context.seq_rm(0, 255)
        found += [*continued(9, 5), context.decode_batch([(1, TOKENS[:3]), (0, [8])])[1][0]]
        return [*found, *continued(3, 4), context.decode([2])[0]]
    settings = dict(n_ctx=2 * 512, n_seq_max=2, graphs=graphs, kv_write=kv_write)
    with smol.new_context(**settings) as context:
        def one_by_one(token, n):
            for _ in range(n):
                token = int(context.decode([token], logits="argmax")[0])
                yield token
        expected = play(context, one_by_one)
    with smol.new_context(**settings) as context:
        found = play(context, lambda token, n: islice(context.greedy(token, 1000), n))
        if graphs:
            assert context.counters.captures >= 1 and context.counters.replays >= 30
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert_bitwise_equal(np.asarray(a), np.asarray(b), f"{i}")


@pytest.mark.parametrize("arguments", [dict(), dict(temperature=0.9, seed=4, n=2), dict(logprobs=1, digest=True)], ids=str)
def test_texts_side_by_side(smol, arguments):
    """They are what they are one by one: steps of several sequences ahead, other widths, prompts that begin later."""
    words = TEXT.read_text().split()
    prompts = [" ".join(words[:40] * (i % 3 == 0) + words[7 * i:7 * i + 5 + i % 11]) for i in range(30)]
    arguments = {"max_tokens": 24, "stop": [".", ";"], **arguments}
    found = smol.generate_many(prompts, n_seq_max=12, **arguments)
    assert found == [smol.generate(prompt, **arguments) for prompt in prompts]
    assert len({len(each.ids) for each in found}) > 8
    assert found[:4] == smol.generate_many(prompts[:4], **arguments)


def test_greedy_ends_with_a_nan(tmp_path):
    """Of a token whose embedding is NaN: the step ahead gets -1 and takes row 0, and the sequence is as it was fed."""
    path = write_model(tmp_path / "m.gguf", "llama", ("F32",))
    reader = gguf.GGUFReader(path, "r+")
    next(t for t in reader.tensors if t.name == "token_embd.weight").data[3] = np.nan
    reader.data.flush()
    with Model.load(path, device="cuda:0") as model, model.new_context(n_ctx=64) as context:
        context.decode(TOKENS[:8] % 3, logits="none")
        for _ in range(3):
            with pytest.raises(UserError, match="^the logits of token 9 hold NaN$"):
                next(context.greedy(3, 9))
            assert context.memory.length(0) == 9
            context.seq_rm(0, 8)
        ids = list(context.greedy(1, 1))
        assert context.memory.length(0) == 9 and 0 <= ids[0] < 70


def test_an_arena_that_grew(tiny):
    def play(context):
        found = [context.decode([i]) for i in range(4)]
        found.append(context.decode(TOKENS[:90]))
        return found + [context.decode([i]) for i in range(4)]
    assert both(tiny, play, n_ctx=256).updates == 1


def test_evictions(tiny):
    def play(context):
        if context.cuda_graphs:
            context.cuda_graphs["cuda:0"].most = 2
        found = [context.decode(TOKENS[:9], logits="none")]
        for n in (1, 2, 3, 1, 2, 3, 3, 1, 1, 2, 2, 3):
            found += [context.decode(TOKENS[:n], logits="all") for _ in range(3)]
        return found
    counters = both(tiny, play, n_ctx=256)
    assert counters.evictions >= 6 and counters.replays >= 12


def test_a_stale_graph_is_wrong_and_refused(tiny):
    """K and V copied to where the next cell was when the graph was built: right when built anew each time,
    garbage when captured all the same."""
    def play(capture, build):
        with tiny.new_context(n_ctx=256, graphs=capture) as context:
            context.memory.__class__ = MovingCache
            found = []
            for i in range(6):
                if build:
                    context.programs.clear()
                elif i:
                    context.program(1, 1).refused = None
                found.append(context.decode(TOKENS[i:i + 1])[0])
            return found, context.counters.refusals.total() if capture else 0
    with tiny.new_context(n_ctx=256) as context:
        expected = [context.decode(TOKENS[i:i + 1])[0] for i in range(6)]
    (refused, n), (stale, _) = play(True, True), play(True, False)
    assert n == 6
    for i, (found, wanted) in enumerate(zip(refused, expected)):
        assert_bitwise_equal(found, wanted, f"step {i}, refused")
    assert sum((found != wanted).any() for found, wanted in zip(stale, expected)) == 5


@pytest.mark.parametrize("settings",
                         [dict(), dict(graphs=False), dict(kv_write="cpy"), dict(kv_write="cpy", graphs=False),
                          dict(no_fuse="all"),
                                      *(dict(no_fuse=name) for name in PASSES)], ids=str)
def test_recorded_digests(smol, settings):
    """Token after token, which is nearly all replays."""
    tokens = goldens.demo_tokens(smol, 300)
    assert {goldens.logits_digest(smol, tokens, n_ubatch=1, **settings)} == {r["axes"]["digest"] for r in goldens.records()}


def test_perplexity_is_replayed_too(smol):
    """Windows of one shape, decoded together: the parts of the second window come from the graphs of the first."""
    tokens = goldens.demo_tokens(smol, 512)

    def play(context):
        found = []
        for _ in range(3):
            context.clear()
            found.append(context.decode(tokens, logits="all"))
        return found
    assert both(smol, play, n_ctx=512, n_ubatch=128).replays >= 8
