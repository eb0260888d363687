"""A CPU and a GPU in one program: nodes and layers on either give the bits of one device."""
import random

import numpy as np
import pytest

from cuda_simulator import no_gpu
from ggml_py.backends import open_backend
from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.placement import PlacementOptions
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile
from ggml_py.testing import assert_bitwise_equal
from tiny_models import write_model
from tiny_moe_models import write_moe_model

pytestmark = pytest.mark.gpu
TOKENS = [[3, 1, 4, 1, 5, 9, 2], [6], [5], [3, 5], [8], [9]]
MODELS = {
    "llama": lambda path: write_model(path, "llama", ("Q8_0", "Q4_1")),
    "qwen3moe": lambda path: write_moe_model(path, "qwen3moe", ("Q8_0",)),
    "wide": lambda path: write_model(path, "qwen2", ("Q8_0", "Q4_1", "F32"), n_embd=128, n_head=8, n_head_kv=4, n_ff=288,
                                     n_vocab=160, qkv_bias=True),
    "deepseek2": lambda path: write_moe_model(path, "deepseek2", ("Q8_0",)),
}


def logits(model, **settings):
    with model.new_context(n_ctx=64, **settings) as context:
        found = np.concatenate([context.decode(tokens, logits="all") for tokens in TOKENS])
        ids = np.int32(list(context.greedy(7, 4)))
        runs = [run for program in context.programs.values() for run in program.runs]
        return found, ids, {run.device for run in runs}, sum(len(run.copies) for run in runs)


@pytest.fixture(scope="module", params=MODELS)
def case(request, tmp_path_factory):
    if reason := no_gpu():
        pytest.skip(reason)
    path = MODELS[request.param](tmp_path_factory.mktemp("models") / "m.gguf")
    with Model.load(path, device="cpu") as model:
        return path, logits(model)[:2]


@pytest.mark.parametrize("home", ["cpu", "cuda:0"])
@pytest.mark.parametrize("seed", range(4))
def test_nodes_anywhere(case, home, seed):
    """home: where weights, caches and inputs are. Half of the seeds without fused ops, half with cells by address,
    with CUDA graphs and without."""
    path, (expected, ids) = case
    rng, chosen = random.Random(seed), {}
    other = "cpu" if home == "cuda:0" else "cuda:0"
    with Model(GGUFFile.open(path), open_backend(home)) as model:
        model.backends[other] = CPUBackend() if other == "cpu" else open_backend(other)
        found, found_ids, devices, copies = logits(
            model, device_of=lambda node: chosen.setdefault(node.name, rng.choice((home, other))), no_fuse=("all",)
            if seed % 2 else (),
            kv_write="cpy" if seed > 1 else "set_rows", graphs=seed != 3)
        model.backends[other].close()
    assert devices == {"cpu", "cuda:0"} and copies > 10
    assert_bitwise_equal(found, expected, f"seed {seed}, home {home}")
    assert_bitwise_equal(found_ids, ids, f"seed {seed}, home {home}, greedy")


@pytest.mark.parametrize("split_mode", ["layer", "column"])
@pytest.mark.parametrize("settings", [{}, dict(n_ubatch=3), dict(n_ubatch=3, graphs=False, kv_write="cpy")])
def test_streams_of_one_gpu_stand_for_several(case, split_mode, settings):
    """Each has its own stream, memory and graphs, and micro-batches are queued ahead."""
    path, (expected, ids) = case
    backends = [open_backend("cuda:0") for _ in range(3 if split_mode == "layer" else 2)]
    for i, backend in enumerate(backends):
        backend.device = f"cuda:{i}"
    options = PlacementOptions(tuple(backend.device for backend in backends), split_mode=split_mode)
    with Model(GGUFFile.open(path), *backends, placement=options) as model:
        for _ in range(20):
            found, found_ids, devices, _ = logits(model, **settings)
            assert devices == {*options.devices}
            assert_bitwise_equal(found, expected, f"{split_mode}")
            assert_bitwise_equal(found_ids, ids, f"{split_mode}, greedy")
