"""Nodes on several devices, each with memory and a layout of activations of its own, give the bits of one device."""
import random
import subprocess
import sys
from itertools import product

import numpy as np
import pytest

from ggml_py.backends.cpu import CPUBackend
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile
from ggml_py.graph.graph import Graph, GraphError, Tensor
from ggml_py.graph.program import Arenas, Program
from ggml_py.graph.split import split
from ggml_py.testing import assert_bitwise_equal
from guarded_cpu import two_devices
from places import environment
from tiny_models import write_model
from tiny_moe_models import write_moe_model

TOKENS = [[3, 1, 4, 1, 5, 9, 2], [6], [5], [3, 5]]
MODELS = {
    "llama": lambda path: write_model(path, "llama", ("Q8_0", "Q4_1")),
    "qwen3": lambda path: write_model(path, "qwen3", ("F16", "Q8_0")),
    "qwen3moe": lambda path: write_moe_model(path, "qwen3moe", ("Q8_0",)),
    "deepseek2": lambda path: write_moe_model(path, "deepseek2", ("Q8_0",)),
}


def layer_of(node) -> int:
    """The layer that a node's name ends with; -1 of the embedding, and of what is behind the layers."""
    last = node.name.split("-act")[0].rpartition("-")[2]
    return int(last) if last.isdecimal() else -1


def decoded(path, device_of, no_fuse=(), **settings):
    """(logits of some steps, nodes on each device, copies between them)."""
    main, other = two_devices()
    with Model(GGUFFile.open(path), main) as model:
        model.backends[other.device] = other
        with model.new_context(n_ctx=64, device_of=device_of, no_fuse=no_fuse, **settings) as context:
            logits = np.concatenate([context.decode(tokens, logits="all") for tokens in TOKENS])
            ids = list(context.greedy(7, 3))
            runs = [run for program in context.programs.values() for run in program.runs]
            counts = {device: sum(len(run.nodes) for run in runs if run.device == device)
                      for device in (main.device, other.device)}
            return logits, ids, counts, sum(len(run.copies) for run in runs)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return {name: write(tmp_path_factory.mktemp("models") / f"{name}.gguf") for name, write in MODELS.items()}


@pytest.fixture(scope="module")
def expected(files):
    def on_one_device(path):
        with Model.load(path, device="cpu") as model, model.new_context(n_ctx=64) as context:
            return np.concatenate([context.decode(tokens, logits="all") for tokens in TOKENS]), list(context.greedy(7, 3))
    return {name: on_one_device(path) for name, path in files.items()}


@pytest.mark.parametrize("no_fuse", [(), ("all",)])
@pytest.mark.parametrize("name", MODELS)
def test_layers_in_every_pattern(files, expected, name, no_fuse):
    logits, ids = expected[name]
    n_layer = 1 + max(int(tensor.split(".")[1]) for tensor in GGUFFile.open(files[name]).tensors if tensor.startswith("blk."))
    for pattern in product((0, 1), repeat=n_layer + 1):
        device_of = lambda node: ("cpu", "cpu:1")[pattern[layer_of(node)]]
        found, found_ids, counts, copies = decoded(files[name], device_of, no_fuse)
        assert_bitwise_equal(found, logits, f"{name}, layers on {pattern}")
        assert found_ids == ids
        assert (counts["cpu:1"] > 0) == (1 in pattern) and (copies > 0) == (1 in pattern)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", MODELS)
def test_nodes_anywhere(files, expected, name, seed):
    """Every node on a device of chance: activations cross in their own layouts, states stay where they are."""
    rng, chosen = random.Random(seed), {}
    device_of = lambda node: chosen.setdefault(node.name, rng.choice(("cpu", "cpu:1")))
    logits, ids = expected[name]
    no_fuse, kv_write = ("all",) if seed % 2 else (), "cpy" if seed % 3 == 0 else "set_rows"
    found, found_ids, counts, copies = decoded(files[name], device_of, no_fuse, kv_write=kv_write)
    assert_bitwise_equal(found, logits, f"{name}, seed {seed}")
    assert found_ids == ids and min(counts.values()) > 10 and copies > 10


def test_activations_cross_in_the_layout_of_their_device(files):
    """The quantized activations of a norm are made on one device and multiplied on the other."""
    device_of = lambda node: "cpu:1" if node.op == "quantize" else "cpu"
    main, other = two_devices()
    with Model(GGUFFile.open(files["llama"]), main) as model:
        model.backends[other.device] = other
        with model.new_context(n_ctx=8, device_of=device_of) as context:
            context.decode([1, 2])
            crossing = [node for program in context.programs.values() for run in program.runs for node in run.copies
                        if node.results[0].dtype == "act"]
            assert crossing and {(node.src[0].layout, node.results[0].layout)
                                 for node in crossing} == {("levels-reversed", "levels")}


# What is not allowed is refused by name

def graph_with_a_state():
    g = Graph()
    x, rows = g.input("x", "f32", (2, 8)), g.input("rows", "i64", (2,))
    state = Tensor("state", "f32", (4, 8), "cpu", buffer=CPUBackend().empty(128))
    return g, g.set_rows(state, x, rows, name="kept"), state


def test_a_node_that_writes_a_state_runs_where_the_state_lies():
    g, kept, _state = graph_with_a_state()
    g.outputs = [g.scale(kept, factor=1.0)]
    program = Program(g, Arenas({"cpu": CPUBackend(), "cpu:1": CPUBackend(device="cpu:1")}), device_of=lambda node: "cpu:1")
    assert [(node.op, node.device) for node in program.nodes] == [("set_rows", "cpu"), ("cpy", "cpu:1"), ("scale", "cpu:1")]


def test_a_state_of_another_device_is_not_written():
    g, _kept, _state = graph_with_a_state()
    g.nodes[0].device = "cpu:1"
    with pytest.raises(GraphError,
                       match=r"^kept: set_rows on cpu:1 would write into state, which lies on cpu; allowed: to run it on cpu$"):
        split(g.nodes, {"cpu": CPUBackend(), "cpu:1": CPUBackend(device="cpu:1")})


def test_a_state_is_copied_anew_when_it_was_written_in_between():
    g, _kept, state = graph_with_a_state()
    g.nodes.clear()
    before = g.scale(state, factor=1.0, name="before")
    g.set_rows(state, g.inputs["x"], g.inputs["rows"])
    after = g.scale(state, factor=1.0, name="after")
    g.outputs = [before, after]
    backends = {"cpu": CPUBackend(), "cpu:1": CPUBackend(device="cpu:1")}
    program = Program(g, Arenas(backends), device_of=lambda node: "cpu:1" if node.op == "scale" else "cpu")
    old, new = program.run({"x": np.ones((2, 8), np.float32), "rows": np.int64([0, 3])})
    assert not old.any() and new[[0, 3]].all() and not new[[1, 2]].any()


def test_an_unknown_device_is_named():
    g, _kept, _state = graph_with_a_state()
    g.outputs = [g.scale(g.inputs["x"], factor=2.0, name="doubled")]
    with pytest.raises(GraphError, match=r"^doubled: scale is placed on tpu; allowed: cpu$"):
        Program(g, Arenas({"cpu": CPUBackend()}), device_of=lambda node: "tpu")


def test_an_operand_of_another_device_is_not_bound():
    backend = CPUBackend(device="cpu:1")
    g, _kept, _state = graph_with_a_state()
    with pytest.raises(GraphError, match=r"^kept: set_rows on cpu:1 has state, which lies on cpu$"):
        backend.bind(g.nodes[0])


READS_THE_OTHER = """
import numpy as np
from guarded_cpu import two_devices
main, other = two_devices()
buffer = other.upload(np.arange(8, dtype=np.float32))
main.run([lambda: None])
print(int(buffer.view(np.float32).sum()), flush=True)
main.run([lambda: print(buffer[0])])
"""


def test_the_guard_can_fail():
    """A step that touches memory of another device ends its process; between steps the memory can be read."""
    done = subprocess.run([sys.executable, "-c", READS_THE_OTHER], env=environment(), capture_output=True, text=True)
    assert done.stdout.split() == ["28"] and done.returncode < 0, (done.returncode, done.stderr)
