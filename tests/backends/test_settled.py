"""Which operands of a node are settled: what a launch may read before it waits for the one before it."""
from types import SimpleNamespace

import pytest

pytest.importorskip("numba_cuda")
from ggml_py.backends.cuda import CUDABackend
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile
from ggml_py.kernels.cuda.launch import Kernel, Launches, has_large, is_large
from ggml_py.ops.node import Tensor
from recording_target import RecordingBackend
from tiny_moe_models import write_moe_model


def step(large: bool):
    return SimpleNamespace(large=large)


class Settling(CUDABackend):
    """Remembers what each node was told."""

    def __init__(self):
        self.told = []

    def bind(self, node, settled=frozenset()):
        self.told.append(set(settled))
        return node.step


def told(*nodes) -> list[set]:
    """nodes: (names read, names written, its step)."""
    tensors = {name: Tensor(name, "f32", (1,)) for reads, writes, _ in nodes for name in reads + writes}
    tensors["view"] = Tensor("view", "f32", (1,), base=tensors.get("a"))
    backend = Settling()
    backend.bind_all([SimpleNamespace(declared=SimpleNamespace(operands=tuple(reads)), src=[tensors[name] for name in reads],
                                      results=[tensors[name] for name in writes], step=each) for reads, writes, each in nodes])
    return backend.told


SMALL, LARGE = step(False), step(True)


@pytest.mark.parametrize("between, settled", [
    ([], False), ([SMALL], False), ([SMALL, SMALL], False), ([LARGE], True), ([LARGE, SMALL], True), ([SMALL, LARGE], True),
    ([Launches((SMALL, LARGE))], True), ([Launches((SMALL, Launches((SMALL,))))], False)], ids=str)
def test_a_large_launch_between_settles(between, settled):
    """Neither the writer's own size counts nor the reader's."""
    for writer in SMALL, LARGE:
        for reader in SMALL, LARGE:
            others = [(["x"], [f"y{i}"], each) for i, each in enumerate(between)]
            nodes = [(["x"], ["a"], writer), *others, (["a"], ["z"], reader)]
            assert told(*nodes)[-1] == ({"a"} if settled else set())


def test_only_what_the_list_has_written_is_settled():
    """Not an input, which a copy may have written just now; and the last writer counts, of a view too."""
    assert told((["x"], ["y"], LARGE), (["x"], ["z"], LARGE), (["x", "y"], ["u"], SMALL))[-1] == {"y"}
    assert told(([], ["a"], LARGE), ([], ["y"], LARGE), ([], ["a"], SMALL), (["a"], ["z"], SMALL))[-1] == set()
    assert told(([], ["a"], LARGE), ([], ["y"], LARGE), ([], ["view"], SMALL), (["a"], ["z"], SMALL))[-1] == set()
    assert told(([], ["a"], LARGE), ([], ["y"], LARGE), (["view"], ["z"], SMALL))[-1] == {"view"}


def test_what_is_large():
    """More than 4096 threads, or clusters of any size."""
    one, cluster = Kernel(None, (), 256), Kernel(None, (), 256, n_cluster=2)
    assert not is_large(one, 16, 256) and not is_large(one, (4, 2, 2), (64, 4))
    assert is_large(one, 17, 256) and is_large(one, (4, 2, 3), (64, 4)) and is_large(cluster, 2, 32)
    assert has_large(Launches((SMALL, Launches((LARGE,))))) and not has_large(Launches((SMALL, Launches((SMALL,)))))


@pytest.mark.parametrize("n_ff, settled", [(768, True), (32, False)])
def test_down_projections_of_experts_ask_for_weights_early(n_ff, settled, tmp_path):
    """Where gate and up of the experts have more than 4096 threads."""
    path = write_moe_model(tmp_path / "m.gguf", "qwen3moe", ("Q8_0",), n_expert=8, n_used=8, n_ff_exp=n_ff, n_embd=256)
    with Model(GGUFFile.open(path), RecordingBackend()) as model, model.new_context(n_ctx=32) as context:
        context.decode([1])
        names = [launch.name for launch in model.backend.stream.take() if launch.name.startswith("mmq_few_id[")]
        assert len(names) == model.architecture.hp.n_layer and {*names} == {f"mmq_few_id[Q8_0, 1, False, {settled}]"}
