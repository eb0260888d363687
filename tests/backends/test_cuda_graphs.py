"""CUDA graphs without a GPU: what decode launches, on a target that remembers it; keys, captures, replays,
evictions and refusals."""
from collections import Counter
from itertools import chain

import numpy as np
import pytest

from ggml_py.measure import sweep
from ggml_py.backends.cuda_graphs import SHAPES, GraphCache, Key
from ggml_py.backends.cpu import CPUBackend
from ggml_py.backends.transfers import Pending
from ggml_py.cli import execute
from ggml_py.base.errors import UserError
from ggml_py.files.gguf import GGUFFile
from ggml_py.graph.graph import Graph, Tensor
from ggml_py.engine.model import Model
from ggml_py.engine.settings import Settings
from ggml_py.graph.program import refusal
from ggml_py.kernels.call import Call, Operand
from ggml_py.testing import assert_bitwise_equal
from fake_model import FakeModel
from moving_cache import MovingCache
from tiny_models import write_model
from tiny_moe_models import write_moe_model

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
from recording_target import RecordingBackend

TOKENS = np.random.default_rng(3).integers(0, 70, 1200).astype(np.int32)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, types = tmp_path_factory.mktemp("models"), ("Q8_0", "F16", "Q4_0", "BF16", "Q5_1", "F32")
    return {"llama": write_model(folder / "llama.gguf", "llama", types),
            "qwen2": write_model(folder / "qwen2.gguf", "qwen2", types, qkv_bias=True),
            "qwen3": write_model(folder / "qwen3.gguf", "qwen3", types)}


@pytest.fixture
def open_model(files):
    """Opens a model on a backend that remembers launches; addresses are the same every time."""
    models = []

    def open_model(arch="llama"):
        models.append(Model(GGUFFile.open(files[arch]), RecordingBackend()))
        return models[-1]
    yield open_model
    for model in models:
        model.close()


def launched(context, *args, **kwargs):
    """What decode launches."""
    stream = context.model.backend.stream
    stream.take()
    context.decode_batch(*args, **kwargs)
    return stream.take()


# The audit: nothing that a graph would hold changes between steps of one key

STEPS = {  # name -> batches of a context of four sequences, all of one key
    "tokens one after the other": [[(0, TOKENS[i:i + 1])] for i in range(4)],
    "another sequence": [[(s, TOKENS[:1])] for s in (0, 3, 1, 0)],
    "drafts to verify": [[(1, TOKENS[i:i + 5])] for i in (0, 5, 40, 7)],
    "several sequences": [[(0, [1]), (2, [2])], [(3, [5]), (0, [7])], [(1, [1]), (0, [1])]],
}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("arch, settings", [
    ("llama", {}), ("llama", dict(no_fuse="all")), ("llama", dict(type_k="q8_0", type_v="f32")), ("llama", dict(kv_write="cpy")),
    ("qwen2", dict(kv_write="cpy", type_k="q8_0", type_v="q8_0")), ("qwen3", dict(type_k="f32")),
], ids=str)
def test_steps_of_one_key_launch_the_same(open_model, arch, settings, steps):
    """Kernels, grids, sizes and addresses, even when each step is built and bound anew; behind no token as behind 600."""
    model, logits = open_model(arch), {"drafts to verify": "all", "another sequence": "argmax"}.get(steps, "last")
    with model.new_context(n_ctx=4 * 1024, n_seq_max=4, graphs=False, **settings) as context:
        context.decode(TOKENS[:600])
        context.clear()
        found = []
        for batch in STEPS[steps]:
            context.programs.clear()
            found.append(launched(context, batch, logits))
        first = STEPS[steps][0]
        for before in (), TOKENS[:600]:
            context.clear()
            for seq_id, _ in first[:len(before)]:
                context.decode(before, seq_id)
            context.programs.clear()
            found.append(launched(context, first, logits))
    assert len(found[0]) > 20
    for i, other in enumerate(found):
        assert other == found[0], f"step {i}"


def test_what_changes_is_uploaded(open_model):
    """Else the test above would compare steps that are equal: the inputs of two steps differ in token, position,
    cell and presence of keys."""
    model = open_model()
    with model.new_context(n_ctx=256) as context:
        context.decode([5])
        model.backend.written.clear()
        context.decode([6])
        context.decode([9])
    (at, first), (also_at, second) = model.backend.written
    program = context_inputs(open_model())
    assert at == also_at and len(first) == len(second)
    changed = {name for name, (start, end) in program.items() if first[start:end] != second[start:end]}
    assert changed == {"tokens", "pos", "rows", "present"}


def context_inputs(model):
    with model.new_context(n_ctx=256) as context:
        program = context.program(1, 1)
        offsets = sorted((tensor.offset, tensor.name) for tensor in program.inputs)
        ends = [offset for offset, _ in offsets[1:]] + [program.input_bytes]
        return {name: (start, end) for (start, name), end in zip(offsets, ends)}


def moving(model, **settings):
    context = model.new_context(n_ctx=256, **settings)
    context.memory.__class__ = MovingCache
    return context


def test_a_moving_destination_without_indirection_fails_the_audit(open_model):
    with moving(open_model(), graphs=False) as context:
        steps = []
        for i in range(3):
            context.programs.clear()
            steps.append(launched(context, [(0, TOKENS[i:i + 1])]))
    changed = Counter(a.name for a, b in zip(steps[0], steps[1]) if a != b)
    assert changed == {"set_rows[f16, cpy_rows]": 4}
    assert [a.name for a in steps[0]] == [b.name for b in steps[1]] and steps[1] != steps[2]


def test_a_moving_destination_is_refused_by_name(open_model):
    model = open_model()
    with moving(model) as context:
        found = []
        for i in range(3):
            context.programs.clear()
            found.append(launched(context, [(0, TOKENS[i:i + 1])]))
        reasons = dict(context.counters.refusals)
        assert reasons == {f"k_cache-0: cpy_rows to cell {i} of cache_k-0, which moves from step to step; cpy_rows_indirect "
                           "reads it as data": 1 for i in range(3)}
        assert context.counters.eager == 3 and not model.backend.target.device.graphs
        assert "3 eager runs, 3 of them refused\nrefused 1 times: k_cache-0: cpy_rows to cell 0" in context.launches()
        assert found[0] != found[1] != found[2]


def test_a_graph_of_a_moving_destination_would_be_stale(open_model):
    """Why it is refused: replaying writes the same cell again."""
    with moving(open_model()) as context:
        found = []
        for i in range(3):
            context.program(1, 1).refused = None
            found.append(launched(context, [(0, TOKENS[i:i + 1])]))
        assert context.counters.replays == 2 and found[0] == found[1] == found[2]


def test_each_run_of_a_device_is_a_graph_of_its_own(open_model):
    """A layer on another device: the GPU's runs before and behind it are captured, copies are made between them."""
    model = open_model()
    model.backends["cpu"] = CPUBackend()
    with model.new_context(n_ctx=256, device_of=lambda node: "cpu" if node.name == "ffn_out-0" else "cuda:0") as context:
        for i in range(4):
            context.decode(TOKENS[i:i + 1])
        runs = context.program(1, 1).runs
        # the weight as well
        assert [run.device for run in runs] == ["cuda:0", "cpu", "cuda:0"] and [len(run.copies) for run in runs] == [0, 2, 1]
        counters = context.counters
        assert (counters.eager, counters.captures, counters.replays) == (2, 2, 6) and not counters.refusals
        assert {i for _, i in context.cuda_graphs["cuda:0"].entries} == {0, 2} and not context.program(1, 1).runs_ahead


def test_destinations_in_device_memory_are_no_reason():
    g = Graph()
    cache, x = Tensor("cache", "f16", (8, 32), buffer=()), g.input("x", "f32", (2, 32))
    g.cpy_rows_indirect(cache, x, g.input("dst", "i64", (3, 2)), slot=1)
    g.set_rows(cache, x, g.input("rows", "i64", (2,)))
    assert refusal(g.live()) is None
    g.cpy_rows(cache, x, cell=3, name="moving")
    assert refusal(
        g.live()) == "moving: cpy_rows to cell 3 of cache, which moves from step to step; cpy_rows_indirect reads it as data"


def test_launches_of_a_layer(files, tmp_path):
    """In generation, with the passes: products of one x and the norm before them are one kernel,
    as is what comes before attention."""
    path = write_model(tmp_path / "m.gguf", "llama", ("Q8_0",), n_layer=3)

    def names_of(**settings) -> list[str]:
        with Model(GGUFFile.open(path), RecordingBackend()) as model, model.new_context(n_ctx=256, **settings) as context:
            return [each.name.split("[")[0] for each in launched(context, [(0, [1])])]
    assert Counter(names_of())["dense_layer"] == 2  # the first layer has no sum before its norm
    names = names_of(no_fuse="dense_layer")
    # embedding, before the first sum, output
    per_layer = Counter(names) - Counter(("get_rows", "rms_norm_act", "mmq_few_qkv", "add_rms_norm_act", "mmq_few"))
    assert per_layer["add_rms_norm_mmq_few_qkv"] == 2 and per_layer["mmq_few"] == 6
    assert per_layer["rope_set_rows"] == per_layer["add_rms_norm_mmq_few_glu"] == 3
    assert per_layer.total() <= 3 * 9


# Captures and replays

def test_replays_launch_what_eager_steps_do(open_model):
    """Over many steps, the edge of a piece of keys, a cleared context, removed positions and other sequences;
    addresses of both models are the same."""
    def run(graphs):
        model, found = open_model(), []
        with model.new_context(n_ctx=2 * 700, n_seq_max=2, graphs=graphs) as context:
            decode = lambda *batch: found.append(launched(context, batch))
            decode((0, TOKENS[:250]))
            for i in range(250, 260):
                decode((0, TOKENS[i:i + 1]))
            decode((1, TOKENS[:7]))
            decode((1, TOKENS[7:8]))
            decode((0, [1]), (1, [2]))
            decode((0, [1]), (1, [2]))
            context.seq_rm(0, 100, 200)
            decode((0, [3]))
            context.seq_rm(0, 50)
            decode((0, [4]))
            context.clear()
            decode((1, [4]))
            counters = context.counters if graphs else context.launches()
        assert model.backend.target.device.open_graphs == 0
        return found, counters
    (eager, none), (replayed, counters) = run(False), run(True)
    assert none == "CUDA graphs: none" and replayed == eager
    # (250, 1), (1, 1), (7, 1), (2, 2): the first of each is eager; all but 250 and 7 come again
    assert (counters.eager, counters.captures, counters.replays, counters.updates, counters.evictions) == (4, 2, 14, 0, 0)
    assert str(counters) == "CUDA graphs: 2 captures, 14 replays, 0 updates, 0 evictions; 4 eager runs, 0 of them refused"


def test_a_key_for_everything_that_shapes_launches(open_model):
    model = open_model()
    with model.new_context(n_ctx=1400, n_seq_max=2, type_v="q8_0", no_fuse="swiglu_act", kv_write="cpy") as context:
        context.decode(TOKENS[:300])
        context.decode(TOKENS[:3], logits="all")
        context.decode(TOKENS[:1], logits="argmax")
        context.decode_batch([(0, TOKENS[:1]), (1, TOKENS[:1])])
        context.decode_batch([(0, TOKENS[:1]), (1, TOKENS[:8])])
        fixed = frozenset({"swiglu_act"}), "f16", "q8_0", "cpy"
        keys = [key for key, _ in context.cuda_graphs["cuda:0"].entries]
        assert keys == [Key(320, 1, "logits", *fixed), Key(3, 3, "logits", *fixed), Key(1, 1, "argmax", *fixed),
                        Key(2, 2, "logits", *fixed, apart=True), Key(9, 2, "logits", *fixed)]


def test_an_arena_that_grew_is_captured_again(open_model):
    """The old addresses are gone: the recording stream would not take them."""
    model = open_model()
    with model.new_context(n_ctx=256) as context:
        for _ in range(3):
            before = launched(context, [(0, [1])])
        generation = context.arenas.generation
        context.decode(TOKENS[:64])
        assert context.arenas.generation > generation
        after = launched(context, [(0, [1])])
        again = launched(context, [(0, [1])])
        assert before != after == again
        counters = context.counters
        assert (counters.captures, counters.updates, counters.replays, counters.eager) == (1, 1, 4, 2)
        assert model.backend.target.device.open_graphs == 1
    assert model.backend.target.device.open_graphs == 0


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_arena_that_could_not_grow_is_made_anew(open_model, monkeypatch, error, when):
    """The old one is gone, what was captured in it is captured again; an interrupt may come when the new one is there,
    and nobody has it yet."""
    model = open_model()
    empty, n_before = model.backend.empty, len(model.backend.memory.buffers)

    def fails(n_bytes):
        if when == "after":
            model.backend.free(empty(n_bytes))  # as cuda-core frees a buffer that nothing refers to
        raise error
    with model.new_context(n_ctx=256) as context:
        for _ in range(3):
            before = launched(context, [(0, [1])])
        n_buffers = len(model.backend.memory.buffers)
        with monkeypatch.context() as patch:
            patch.setattr(model.backend, "empty", fails)
            with pytest.raises(error):
                context.decode(TOKENS[:64])
        assert len(model.backend.memory.buffers) == n_buffers - 1
        found = [launched(context, [(0, [1])]) for _ in range(2)]
        assert len(before) == len(found[0]) and found[0] == found[1] != before
        for n in 2, 64, 1:
            assert launched(context, [(0, TOKENS[:n])])
        assert (context.counters.captures, context.counters.updates) == (1, 2) and len(model.backend.memory.buffers) == n_buffers
    assert len(model.backend.memory.buffers) == n_before


def test_programs_that_were_dropped_are_captured_again(open_model):
    """A program made anew has the same launches, but a graph is replayed only for the steps that it was captured from."""
    with open_model().new_context(n_ctx=256) as context:
        found = [launched(context, [(0, [1])]) for _ in range(3)]
        context.programs.clear()
        found += [launched(context, [(0, [1])]) for _ in range(2)]
        assert all(each == found[0] for each in found) and context.counters.updates == 1


@pytest.mark.parametrize("n_shapes, counts", [(SHAPES, (SHAPES, SHAPES, 3 * SHAPES)), (SHAPES + 1, (4 * SHAPES + 4, 0, 0))],
                         ids=str)
def test_as_many_shapes_as_are_remembered_come_in_turns(open_model, n_shapes, counts):
    """Each is captured when it comes again, and replayed from then on: no graph is kept whose program is gone. One shape more,
    and all are forgotten before they come again."""
    model = open_model()
    with model.new_context(n_ctx=256) as context:
        context.program(64, 1)  # its arena holds them all
        context.fills = False
        for _ in range(4):
            for n in range(1, n_shapes + 1):
                context.clear()
                context.decode(TOKENS[:n])
        counters = context.counters
        assert (counters.eager, counters.captures, counters.replays) == counts and counters.updates == counters.evictions == 0
        shapes = [(n, 1, "logits", False, False) for n in range(n_shapes - SHAPES + 1, n_shapes + 1)]
        keys = [key for key, _ in context.cuda_graphs["cuda:0"].entries]
        assert [(*key[:3], key.hidden, key.apart) for key in keys] == list(context.programs) == shapes
        assert model.backend.target.device.open_graphs == counters.captures


def test_a_program_is_bound_once(open_model):
    """Its steps are the same lists wherever its tokens stand."""
    with open_model().new_context(n_ctx=1024) as context:
        context.decode(TOKENS[:300])
        context.decode([1])
        program = context.program(1, 1)
        steps = program.parts[0].steps
        context.decode(TOKENS[:300])
        context.decode([1])
        assert context.program(1, 1) is program and program.parts[0].steps is steps and len(steps) == len(program.nodes)


class Backend:
    """What a GraphCache needs of one."""
    def __init__(self):
        self.recording = RecordingBackend()
        self.target, self.stream, self.eager = self.recording.target, self.recording.stream, 0

    def new_graph_builder(self):
        return self.target.device.create_graph_builder()

    def launch(self, graph):
        graph.launch(self.stream)

    def run(self, steps):
        self.eager += 1
        for step in steps:
            step(self.stream)

    def steps(self, n):
        from ggml_py.kernels.cuda.elementwise import scale
        x = Operand("f32", (1, 1024), self.recording.empty(4096).handle)
        return [scale(Call("scale", "scale", self.target, {"x": x, "out": x, "factor": float(i)})) for i in range(n)]


def test_the_least_recently_used_graph_goes():
    backend = Backend()
    cache, steps = GraphCache(backend, most=2), {key: backend.steps(2) for key in "abc"}
    for key in "aabbaacc":
        cache.run(key, steps[key])
    counters = cache.counters
    assert list(cache.entries) == ["a", "c"] and counters.evictions == 1 and backend.target.device.open_graphs == 2
    cache.run("b", steps["b"])
    assert list(cache.entries) == ["c", "b"] and counters.evictions == 2
    assert (counters.eager, counters.captures, counters.replays) == (4, 3, 5) and backend.eager == 4
    assert backend.stream.take() == [step for key in "aabbaaccb" for step in steps[key]]
    cache.close()
    assert backend.target.device.open_graphs == 0


def test_a_shape_has_a_graph_for_each_run_however_many():
    """On two devices a step may have more runs than shapes are remembered."""
    backend = Backend()
    cache, steps = GraphCache(backend, most=2), {key: [backend.steps(1) for _ in range(5)] for key in "abc"}
    for key in "aababc":
        for i in range(5):
            cache.run((key, i), steps[key][i])
    counters = cache.counters
    assert {shape for shape, _ in cache.entries} == {"b", "c"} and len(cache.entries) == 10
    assert (counters.eager, counters.captures, counters.replays, counters.evictions) == (15, 10, 15, 5)


def test_a_capture_that_fails_leaves_no_graph():
    backend = Backend()
    cache, steps = GraphCache(backend), backend.steps(3)

    def fails(stream):
        if stream is not backend.stream:
            raise KeyboardInterrupt
    cache.run("a", [*steps, fails])
    with pytest.raises(KeyboardInterrupt):
        cache.run("a", [*steps, fails])
    builder, = backend.target.device.builders
    assert builder.state == "closed" and cache.counters.captures == 0 and not backend.target.device.graphs
    backend.stream.take()
    cache.run("a", steps)
    assert backend.stream.take() == steps and cache.counters.captures == 1


def test_no_graphs_on_the_cpu(files):
    with Model.load(files["llama"], device="cpu") as model, model.new_context(n_ctx=64) as context:
        context.decode(TOKENS[:3])
        assert not context.cuda_graphs and context.launches() == "CUDA graphs: none"


@pytest.mark.parametrize("warm_up", [True, False])
def test_no_row_of_a_sweep_captures(open_model, monkeypatch, warm_up):
    """How many graphs there were behind each part: both come before the first row, whose prompt and token would capture them
    otherwise, and, since the arena grows in between, one of them twice."""
    model, captures = open_model(), []
    for name in "decode_prompt", "decode_one_by_one":
        decode = getattr(sweep, name)

        def part(*args, decode=decode):
            decode(*args)
            captures.append(len(model.backend.target.device.graphs))
        monkeypatch.setattr(sweep, name, part)
    rows = list(sweep.sweep(model, Settings(n_ctx=64, n_ubatch=16), 4, 0, warm_up, None))
    assert len(rows) == 4 and captures == ([0, 0, 1, 2] + 8 * [2] if warm_up else [1, 1, 2] + 5 * [3])


# Greedy generation

@pytest.mark.parametrize("settings", [{}, dict(graphs=False), dict(kv_write="cpy")], ids=str)
def test_the_next_step_is_queued_before_an_id_is_waited_for(open_model, monkeypatch, settings):
    """The order of what reaches the stream, with the launches that are there before: inputs, the token of the step before,
    the launches, the read of the id."""
    model, calls = open_model(), []
    backend, stream = model.backend, model.backend.stream
    noted = lambda name: calls.append((name, len(stream.launched)))

    class Id(Pending):
        def result(self):
            noted(f"wait {self.number}")
            return super().result()

    def read(*args):
        pending = Id(np.int32([7]).view(np.uint8))
        pending.number = sum(name == "read" for name, _ in calls)
        noted("read")
        return pending
    with model.new_context(n_ctx=256, **settings) as context:
        stream.take()
        for name in "write", "copy":
            method = getattr(backend, name)
            monkeypatch.setattr(backend, name, lambda *args, name=name, method=method: (noted(name), method(*args)))
        monkeypatch.setattr(backend, "read", read)
        assert list(context.greedy(5, 4)) == [7] * 4
        n = len(stream.launched) // 4
        assert n > 20 and stream.launched == 4 * stream.launched[:n]
        ahead = [[("write", i * n), ("copy", i * n), ("read", (i + 1) * n), (f"wait {i - 1}", (i + 1) * n)] for i in (1, 2, 3)]
        assert calls == [("write", 0), ("read", n), *chain(*ahead), ("wait 3", 4 * n)]
        program = context.program(1, 1, "argmax")
        tokens, = (t for t in program.inputs if t.name == "tokens")
        to, source = (buffer.handle + offset for buffer, offset in (tokens.memory, program.outputs[0].memory))
        assert backend.copied == [(to, source, 4)] * 3
        if context.cuda_graphs:
            assert (context.counters.eager, context.counters.captures, context.counters.replays) == (1, 1, 3)
            assert [key for key, _ in context.cuda_graphs["cuda:0"].entries] == [Key(
                1, 1, "argmax", frozenset(), "f16", "f16", settings.get("kv_write", "set_rows"))]


@pytest.mark.parametrize("settings", [{}, dict(graphs=False), dict(kv_write="cpy")], ids=str)
def test_a_context_is_closed_while_a_step_is_ahead(open_model, settings):
    """Its memory and graphs go at once, and nothing reaches the device when the iterator is closed, or dropped, behind it."""
    model = open_model()
    backend, n_buffers = model.backend, len(model.backend.memory.buffers)
    with model.new_context(n_ctx=256, **settings) as context:
        ids = context.greedy(5, 8)
        assert [next(ids), next(ids)] == [0, 0] and context.ahead is not None and len(backend.copied) == 2
    assert len(backend.memory.buffers) == n_buffers and backend.target.device.open_graphs == 0
    before = [len(each) for each in (backend.stream.launched, backend.written, backend.copied)]
    ids.close()
    assert [len(each)
            for each in (backend.stream.launched, backend.written,
                         backend.copied)] == before and len(backend.memory.buffers) == n_buffers


def test_what_cannot_be_queued_ahead_is_not(open_model, tmp_path):
    """Programs that are refused go step by step; those whose kernels leave errors to be read are queued ahead as others are."""
    model = open_model()
    with moving(model) as context:
        assert list(context.greedy(5, 3)) == [0] * 3 and not model.backend.copied and context.counters.eager == 3
    with Model(GGUFFile.open(write_moe_model(tmp_path / "m.gguf", "qwen3moe", ("Q8_0",))),
               RecordingBackend()) as model, model.new_context(n_ctx=64) as context:
        assert list(context.greedy(5, 3)) == [0] * 3 and len(model.backend.copied) == 2 and context.counters.replays == 2


# Cells by address

@pytest.mark.parametrize("types", [("f16", "f16"), ("f32", "q8_0"), ("q8_0", "f32")], ids=str)
def test_both_ways_to_write_the_cache_give_the_same_bits(files, types):
    def run(kv_write):
        with Model.load(files["llama"], device="cpu") as model, \
                model.new_context(n_ctx=3 * 60, n_seq_max=3, type_k=types[0], type_v=types[1], kv_write=kv_write) as context:
            found = [*context.decode_batch([(2, TOKENS[:9]), (0, TOKENS[:20])], "all")]
            context.seq_rm(0, 12)
            found += [context.decode(TOKENS[i:i + 1]) for i in range(20, 24)]
            return found + context.decode_batch([(1, TOKENS[:3]), (2, TOKENS[9:40])], "all")
    for i, (found, expected) in enumerate(zip(run("cpy"), run("set_rows"), strict=True)):
        assert_bitwise_equal(found, expected, f"kv_write=cpy, {i}")


def test_unknown_ways_are_refused(open_model):
    with pytest.raises(UserError, match="kv_write: 'copy' is not allowed; allowed: set_rows, cpy"):
        open_model().new_context(kv_write="copy")


@pytest.mark.parametrize("options, graphs, kv_write",
                         [([], True, "set_rows"), (["--no-graphs"], False, "set_rows"), (["--kv-write", "cpy"], True, "cpy")])
def test_commands_hand_the_options_on(options, graphs, kv_write, tmp_path):
    model, asked = FakeModel(), []
    new_context = model.new_context
    model.new_context = lambda **settings: asked.append((settings["graphs"], settings["kv_write"])) or new_context(**settings)
    (tmp_path / "m.gguf").touch()
    np.save(tmp_path / "ids.npy", np.arange(4))
    (tmp_path / "text").write_text("x" * 40)
    for command in (["run", "-p", "x", "-n", "1"], ["logits", "--tokens", tmp_path / "ids.npy", "-o", tmp_path / "out.npy"],
                    ["perplexity", "-f", tmp_path / "text", "-c", "16"]):
        assert execute([*map(str, command), "-m", str(tmp_path / "m.gguf"), *options], load_model=lambda path, device: model) == 0
    assert asked == [(graphs, kv_write)] * 3
