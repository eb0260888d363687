"""Decode steps in the simulator, eager and replayed, with cells by address: the CPU's bits."""
import numpy as np

from cuda_simulator import run_in_simulator
from ggml_py.testing import assert_bitwise_equal
from simulated_backend import simulated_backend
from tiny_models import write_model

SIZES = dict(n_layer=1, n_embd=32, n_head=2, n_head_kv=1, head=16, n_ff=32, n_vocab=16, n_ctx=300)
TOKENS = [[3, 1], [5], [2], [11]]  # decoded one after the other


def test_in_the_simulator():
    run_in_simulator(__file__)


def simulate_decode(tmp_path):
    """The first step of a batch shape is eager, later ones come from the graph; the last one decoded is another sequence's,
    then it is continued greedily."""
    from ggml_py.files.gguf import GGUFFile
    from ggml_py.engine.model import Model
    path, settings = (write_model(tmp_path / "m.gguf", "llama", ("Q8_0",), **SIZES),
                      dict(n_ctx=2 * 16, n_seq_max=2, kv_write="cpy"))

    def run(context):
        return [*(context.decode(tokens) for tokens in TOKENS), context.decode([6], seq_id=1),
                np.int32(list(context.greedy(7, 3, seq_id=1)))]
    with Model.load(path, device="cpu") as model, model.new_context(**settings) as context:
        expected = run(context)
    with Model(GGUFFile.open(path), simulated_backend()) as model, model.new_context(**settings) as context:
        for i, (found, wanted) in enumerate(zip(run(context), expected, strict=True)):
            assert_bitwise_equal(found, wanted, f"step {i}")
        assert (context.counters.captures, context.counters.replays) == (2, 3 + 2)
