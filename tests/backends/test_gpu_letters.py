"""Letters between two GPUs: what they bring, in models by layers and by columns, and what happens when one does not come. Needs a
machine with two GPUs that reach each other's memory."""
import gc
from itertools import islice

import numpy as np
import pytest

from cuda_simulator import no_gpu
from ggml_py.backends import open_backend
from ggml_py.base.placement import PlacementOptions
from ggml_py.engine.model import Model
from ggml_py.graph import columns
from ggml_py.graph.letters import Joined
from ggml_py.testing import assert_bitwise_equal
from races import SPINS, calls_of, check_rows, nap, rows
from tiny_models import write_model
from tiny_moe_models import write_moe_model

pytestmark = pytest.mark.gpu
DEVICES = "cuda:0", "cuda:1"
TOKENS = [[3, 1, 4, 1, 5, 9, 2], [6], [5], [3, 5], [8], [9], [7, 7], [1, 2, 3, 4, 5, 6, 7]]
N_RACES, N_CONTEXTS = 10_000, 1000  # steps, contexts
MODELS = {
    "llama": lambda path: write_model(path, "llama", ("Q8_0", "Q4_1")),
    "qwen3moe": lambda path: write_moe_model(path, "qwen3moe", ("Q8_0",)),
    "wide": lambda path: write_model(path, "qwen2", ("Q8_0", "Q4_1", "F32"), n_embd=128, n_head=8, n_head_kv=4, n_ff=288,
                                     n_vocab=160, qkv_bias=True),
}


@pytest.fixture(scope="module")
def gpus():
    """Whether two reach each other."""
    from ggml_py.backends.cuda import unavailable
    if reason := no_gpu() or unavailable(1):
        pytest.skip(reason)
    backends = [open_backend(device) for device in DEVICES]
    close = backends[0].reaches(backends[1]) and backends[1].reaches(backends[0])
    for backend in backends:
        backend.close()
    if not close:
        pytest.skip("two GPUs, which do not reach each other's memory")


def decoded(model, **settings):
    with model.new_context(n_ctx=96, **settings) as context:
        found = np.concatenate([context.decode(tokens, logits="all") for tokens in TOKENS])
        ids = [*context.greedy(7, 24), *context.greedy(5, 6)]
        return found, np.int32(ids), context.office and context.office.step


def test_memory_of_the_other_one(gpus):
    """A kernel of each GPU writes to the other one's memory, and waits for what that writes."""
    from ggml_py.kernels.cuda.letters import ENDED, FAULT, SEALED, SEQ, letter
    backends = [open_backend(device) for device in DEVICES]
    for a in backends:
        for b in backends:
            assert a is b or a.reaches(b)
    n = 4096
    payload = [np.arange(n, dtype=np.int32) * (i + 3) for i in range(2)]
    mailboxes, sources = [b.empty(SEALED + 8 * n) for b in backends], [b.upload(p) for b, p in zip(backends, payload)]
    boxes = [b.empty(4 * n) for b in backends]
    for backend, mailbox in zip(backends, mailboxes):
        backend.write(mailbox, 4 * SEQ, np.int32([1]))
    launches, tables = [], []
    for i, backend in enumerate(backends):
        table = np.int64([[int(mailboxes[1 - i].handle) + SEALED, n, 1, ENDED + 1 - i]])
        tables.append(backend.upload(table))
        launches.append(letter(backend.target, int(mailboxes[i].handle),
                               (int(sources[i].handle), int(tables[i].handle), 1, 1, n),
                               (int(boxes[i].handle), int(mailboxes[i].handle) + SEALED, n, 1)))
        backend.load()
        backend.run([letter(backend.target, int(mailboxes[i].handle))])
        backend.stream.sync()
    for backend, launch in zip(backends, launches):
        backend.run([launch])
    for i, backend in enumerate(backends):
        found = backend.read(boxes[i], 0, 4 * n).result().view(np.int32)
        assert not backend.read(mailboxes[i], 4 * FAULT, 12).result().any()
        assert np.array_equal(found, payload[1 - i])
    for backend in backends:
        backend.close()


@pytest.mark.parametrize("split_mode, worth_a_gather", [("layer", 0), ("column", 0), ("column", columns.WORTH_A_GATHER)])
@pytest.mark.parametrize("kind", MODELS)
def test_the_bits_of_one_gpu(gpus, tmp_path, monkeypatch, kind, split_mode, worth_a_gather):
    """By letters, by copies, and without graphs; by letters again and again."""
    monkeypatch.setattr(columns, "WORTH_A_GATHER", worth_a_gather)
    path = MODELS[kind](tmp_path / "m.gguf")
    with Model.load(path, device="cpu") as model:
        expected, ids, _ = decoded(model)
    with Model.load(path, placement=PlacementOptions(DEVICES, split_mode=split_mode)) as model:
        for settings in [{}, {"letters": False}, {"graphs": False}, {"n_ubatch": 3}, *[{}] * 5]:
            found, found_ids, steps = decoded(model, **settings)
            assert_bitwise_equal(found, expected, f"{kind}, {split_mode}, {settings}")
            assert_bitwise_equal(found_ids, ids, f"{kind}, {split_mode}, {settings}, greedy")
            assert (steps or 0) > 25 if not settings else True


def test_many_steps(gpus, tmp_path):
    """2,000 tokens by columns, in contexts that take turns."""
    path = MODELS["wide"](tmp_path / "m.gguf")
    with Model.load(path, device="cpu") as model, model.new_context(n_ctx=1024) as context:
        expected = [*context.greedy(3, 1000)]
    options = PlacementOptions(DEVICES, split_mode="column")
    with (Model.load(path, placement=options) as model, model.new_context(n_ctx=1024) as a,
          model.new_context(n_ctx=1024) as b):
        found = [*zip(a.greedy(3, 1000), b.greedy(3, 1000))]
    assert found == [(each, each) for each in expected]


def test_a_letter_that_does_not_come(gpus, tmp_path, monkeypatch):
    """The device and what it waited for are named; the next context computes right."""
    from ggml_py.backends.letters import DeviceOffice
    from ggml_py.kernels.cuda import letters
    path = MODELS["wide"](tmp_path / "m.gguf")
    options = PlacementOptions(DEVICES, split_mode="column")
    with Model.load(path, placement=options) as model:
        expected = decoded(model)[0]
        with monkeypatch.context() as patched:
            letter_of = DeviceOffice._letter

            def lost(office, backend, items, table, starts, numbers, joined):
                if joined.post and backend.device == "cuda:1" and joined.post.source.name.startswith("kqv_out-1"):
                    if joined.take is None:
                        return lambda stream: None
                    joined = Joined(take=joined.take)
                return letter_of(office, backend, items, table, starts, numbers, joined)
            patched.setattr(DeviceOffice, "_letter", lost)
            letter = letters.letter
            patched.setattr(letters, "letter", lambda *args, **named: letter(*args, **{"limit_ns": 50_000_000, **named}))
            with pytest.raises(RuntimeError, match="letters: cuda:0 waited too long for kqv_out-1"):
                decoded(model)
        assert_bitwise_equal(decoded(model)[0], expected, "behind a letter that did not come")


RACES = [("layer", True), ("layer", False), ("column", True), ("column", False)]


@pytest.mark.parametrize("split_mode, letters", RACES)
def test_two_win_every_race(gpus, tmp_path, split_mode, letters):
    """Before each step a kernel that spins, for a time drawn at random, is put into the streams of one, of both or of none, and
    the host waits too: whoever reads what is not there yet, or writes what is still read, gives other bits."""
    from ggml_py.kernels.cuda.spin import spin
    path, rng = MODELS["qwen3moe" if split_mode == "layer" else "wide"](tmp_path / "m.gguf"), np.random.default_rng(0)
    calls = calls_of(rng)
    with Model.load(path, device="cpu") as model:
        expected = [*islice(rows(model, calls), len(calls))]
    with Model.load(path, placement=PlacementOptions(DEVICES, split_mode=split_mode)) as model:
        backends = [model.backends[device] for device in DEVICES]
        spins = {backend: [spin(backend.target, seconds) for seconds in SPINS] for backend in backends}

        def delayed():
            for backend in backends:
                if rng.random() < 0.5:
                    backend.run([spins[backend][rng.integers(len(SPINS))]])
            nap(rng)
        check_rows(rows(model, calls, delayed, letters=letters), expected, N_RACES // len(RACES))


@pytest.mark.parametrize("split_mode", ["layer", "column"])
def test_contexts_over_two_gpus_leak_nothing(gpus, tmp_path, split_mode):
    with Model.load(MODELS["wide"](tmp_path / "m.gguf"), placement=PlacementOptions(DEVICES, split_mode=split_mode)) as model:
        backends = [model.backends[device] for device in DEVICES]

        def use():
            with model.new_context(n_ctx=64, n_ubatch=16) as context:
                rows = [context.decode([1, 2, 3, 4, 5]), context.decode([6])]
                return np.concatenate([*rows, [[float(i)] * model.n_vocab for i in context.greedy(7, 2)]])

        def held():
            gc.collect()
            for backend in backends:
                backend.target.device.set_current()
                backend.target.device.sync()
            return [backend.target.device.memory_resource.attributes.used_mem_current for backend in backends]
        expected = use()
        before = held()
        for _ in range(N_CONTEXTS // 2):
            assert np.array_equal(use(), expected)
        assert held() == before
