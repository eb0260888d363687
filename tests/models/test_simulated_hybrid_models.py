"""Models with short convolutions and Mamba 2 layers on CUDA in the simulator: the bits of the CPU, eager and replayed, taken back
and gone on."""
import numpy as np
import pytest

from cuda_simulator import run_in_simulator
from tiny_hybrid_models import write_hybrid_model

SIZES = dict(n_embd=32, n_head=1, n_head_kv=1, head=32, n_ff=32, n_vocab=16, n_expert=4, n_used=2, n_ff_exp=32, n_ff_shared=32,
             n_inner=32, n_head_ssm=2)


@pytest.mark.slow
def test_in_the_simulator():
    run_in_simulator(__file__)


@pytest.mark.parametrize("kind, settings", [("lfm2moe", dict(blocks="ra")), ("nemotron_h_moe", dict(blocks="rfa")),
                                            ("granitehybrid", dict(blocks="ra"))])
def simulate_a_model(tmp_path, kind, settings):
    from ggml_py.backends.cpu import CPUBackend
    from ggml_py.engine.model import Model
    from ggml_py.files.gguf import GGUFFile
    from ggml_py.testing import assert_bitwise_equal
    from simulated_backend import simulated_backend
    path = write_hybrid_model(tmp_path / "m.gguf", kind, ("Q8_0",), **{**SIZES, **settings})
    tokens, found = np.random.default_rng(0).integers(0, 16, 12), []
    with Model(GGUFFile.open(path), CPUBackend()) as on_cpu, Model(GGUFFile.open(path), simulated_backend()) as on_gpu:
        for model in on_cpu, on_gpu:
            with model.new_context(2 * 32, n_seq_max=2, n_rollback=4) as context:
                rows = [context.decode(tokens[:5], logits="all")]
                rows += context.decode_batch([(1, tokens[:3]), (0, tokens[5:6])], logits="all")
                rows += [context.decode([token], logits="all") for token in tokens[6:9]]  # the third is replayed
                context.decode((tokens[9:11] + 1) % 16)  # wrong
                context.keep(0, 9)
                rows.append(context.decode(tokens[9:10], logits="all"))
                found.append(rows)
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        assert_bitwise_equal(a, b, f"call {i}")
