"""A model with gated delta nets on CUDA in the simulator: the bits of the CPU, eager and replayed, taken back and gone on."""
import numpy as np
import pytest

from cuda_simulator import run_in_simulator
from tiny_delta_net_models import write_delta_net_model

SIZES = dict(n_layer=2, n_embd=32, n_head=2, n_head_kv=1, head=32, n_ff=32, n_vocab=16, n_expert=4, n_used=2, n_ff_exp=32,
             n_head_k=1, n_head_v=2)


@pytest.mark.slow
def test_in_the_simulator():
    run_in_simulator(__file__)


def simulate_a_model(tmp_path):
    from ggml_py.backends.cpu import CPUBackend
    from ggml_py.engine.model import Model
    from ggml_py.engine.mtp import MTP
    from ggml_py.files.gguf import GGUFFile
    from ggml_py.testing import assert_bitwise_equal
    from simulated_backend import simulated_backend
    path = write_delta_net_model(tmp_path / "m.gguf", "qwen35moe", ("Q8_0",), nextn=1, **SIZES)
    tokens = np.random.default_rng(0).integers(0, 16, 14)
    with (Model(GGUFFile.open(path), CPUBackend(), nextn=True) as on_cpu,
          Model(GGUFFile.open(path), simulated_backend(), nextn=True) as on_gpu):
        found = []
        for model in on_cpu, on_gpu:
            with model.new_context(2 * 32, n_seq_max=2, n_rollback=4) as context:
                rows = [context.decode(tokens[:5], logits="all")]
                rows += context.decode_batch([(1, tokens[:3]), (0, tokens[5:6])], logits="all")
                rows += [context.decode([token], logits="all") for token in tokens[6:9]]  # the third is replayed
                context.decode((tokens[9:11] + 1) % 16)  # wrong
                context.keep(0, 9)
                rows.append(context.decode(tokens[9:10], logits="all"))
                context.seq_cp(0, 1)
                rows += context.decode_batch([(0, tokens[10:11]), (1, tokens[10:11])], logits="all")
                rows.append(np.array([*context.greedy(int(tokens[11]), 3, seq_id=1)]))
                context.clear()
                source = MTP(model, 32)
                source.begin(context)
                token = int(context.decode(tokens[:3], logits="argmax")[0])
                rows += [np.array(source.draft([*tokens[:3].tolist(), token], 3)), source.hidden]
                source.close()
                found.append(rows)
        for i, (a, b) in enumerate(zip(*found, strict=True)):
            assert_bitwise_equal(np.asarray(a), np.asarray(b), f"call {i}")
        context = on_gpu.new_context(32)
        ops = {node.op for node in context.program(1, 1).nodes}
        assert ops >= {"ssm_conv", "gated_delta_net_gates", "rms_norm_swiglu_act", "mul_sigmoid_act", "weighted_sum_gated"}
        assert not ops & {"cpy", "cpy_rows"}
        context.close()
