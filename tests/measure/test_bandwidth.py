"""The floor under generation: bytes that a token reads, and copies that measure a memory."""
from types import SimpleNamespace

import numpy as np
import pytest

from ggml_py.measure import bandwidth
from ggml_py.backends import open_backend
from ggml_py.files.gguf import GGUFFile
from ggml_py.state.kv_cache import KVCache
from tiny_models import write_model


def test_copies_on_the_cpu_are_copies():
    backend, source = open_backend("cpu"), np.random.default_rng(0).integers(0, 256, 100_003, np.uint8)
    out = backend.empty(source.size)
    bandwidth.copies_on_cpu(backend, source, out, source.size)(2)
    assert np.array_equal(out, source)


def test_bandwidth_is_bytes_over_the_fastest_run(monkeypatch):
    """Read and written bytes of 8 copies; the first copy, which touches pages, does not count."""
    runs = iter([4.0, 2.0, 8.0, 3.0, 5.0])
    counts, backend = [], SimpleNamespace(device="cuda:3", upload=lambda a: a, empty=lambda n: None, free=lambda b: None)
    monkeypatch.setattr(bandwidth, "copies_on_cuda", lambda backend, source, out, n: counts.append)
    monkeypatch.setattr(bandwidth, "seconds", lambda function, n: [function(n), next(runs)][1])
    assert bandwidth.copy_GB_s(backend, 1 << 20) == 2 * 8 * (1 << 20) / 2.0 / 1e9
    assert counts == [1] + 5 * [8]


def test_a_run_is_awaited():
    """On a GPU the clock stops behind the stream."""
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    events = []
    target = SimpleNamespace(launch=lambda kernel, grid, block,
                             args: lambda stream: events.append((kernel.name, grid, block, args)))
    backend = SimpleNamespace(target=target, stream=SimpleNamespace(sync=lambda: events.append("sync")))
    bandwidth.copies_on_cuda(backend, SimpleNamespace(handle=256), SimpleNamespace(handle=512), 8192)(2)
    assert events == [("cpy[16]", 2, 256, (256, 512, 512))] * 2 + ["sync"]


@pytest.mark.parametrize("tied", [False, True])
def test_weight_bytes_of_a_token(tmp_path, tied):
    """All of a dense file, but of the embedding a row where there is an output head of its own."""
    with GGUFFile.open(write_model(tmp_path / "m.gguf", "llama", ("Q8_0",), tied=tied)) as file:
        embedding = file.tensors["token_embd.weight"]
        assert embedding.shape == (64, 70) and embedding.n_bytes == 70 * 68
        expected = sum(t.n_bytes for t in file.tensors.values()) - (0 if tied else 69 * 68)
        assert bandwidth.weight_bytes_per_token(file) == expected


def test_weight_bytes_of_experts(tmp_path):
    """2 of 8 experts are used."""
    synth = pytest.importorskip("synth", reason="needs the checkout")
    with GGUFFile.open(synth.write(tmp_path / "m.gguf", synth.SHAPES["tiny-qwen3moe"], "Q8_0")) as file:
        experts = [t.n_bytes for t in file.tensors.values() if "_exps" in t.name]
        embedding = file.tensors["token_embd.weight"].n_bytes
        assert experts == 6 * [8 * 256 * 272]
        unread = sum(experts) * 3 / 4 + embedding * 319 / 320
        assert bandwidth.weight_bytes_per_token(file) == sum(t.n_bytes for t in file.tensors.values()) - unread


def test_layers_that_draft_are_not_read(tmp_path):
    keys = {"nextn_predict_layers": ("uint32", 1)}
    with GGUFFile.open(write_model(tmp_path / "a.gguf", n_layer=3,
                                   keys=keys)) as file, GGUFFile.open(write_model(tmp_path / "b.gguf", n_layer=2)) as without:
        assert bandwidth.weight_bytes_per_token(file) == bandwidth.weight_bytes_per_token(without)


@pytest.mark.parametrize("type_k, type_v, n_bytes", [("f16", "f16", 2 * 2 * 64 * 2), ("q8_0", "f32", 2 * (68 + 256))])
def test_cache_bytes_of_a_token(type_k, type_v, n_bytes):
    memory = KVCache({"cpu": open_backend("cpu")}, [(64, 64)] * 2, ["cpu"] * 2, 10, 3, type_k, type_v)
    assert memory.bytes_of_token(1.5) == 1.5 * n_bytes


@pytest.mark.gpu
def test_on_a_gpu():
    from cuda_simulator import GPUMachine, no_gpu
    if reason := no_gpu():
        pytest.skip(reason)
    assert 50 < bandwidth.copy_GB_s(GPUMachine().backend, 1 << 28) < 20_000
