"""The suite can fail: every planted fault is caught by the axes that must catch it, and bisection names the node."""
import io

import numpy as np
import pytest

from ggml_py.check.attestation import NotConfirmed, attest_generation, confirm
from ggml_py.check.axes import AXES, Setting
from ggml_py.backends.cpu import CPUBackend
from ggml_py.check.bisection import first_difference
from ggml_py.files.gguf import GGUFFile
from ggml_py.engine.model import Model
from ggml_py.ops.table import OPS
from ggml_py.engine.settings import Settings
from ggml_py.check.recording import Batch
from ggml_py.state.kv_cache import KVCache
from ggml_py.engine.sampling import Sampling
from fake_model import FakeTokenizer
from planted_faults import (FAULTS, KEPT_FAULTS, FaultyBackend, HastyBackend, StaleGraphsBackend, after, caught_by, norm, norms,
                            tile_across_experts, verify, write)

WINDOWS = np.random.default_rng(0).integers(0, 70, (3, 90)).astype(np.int32)
ON_CPU = [axis for axis in AXES if axis not in ("launch", "noise", "products", "placement", "letters", "experts", "device")]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Of the models that faults are planted in."""
    folder = tmp_path_factory.mktemp("models")
    return {kind: write(folder / f"{kind}.gguf", kind) for kind in {fault.model for fault in FAULTS + KEPT_FAULTS}}


@pytest.fixture(scope="module")
def path(paths):
    return paths["llama"]


def test_a_twin_without_a_fault(path):
    """The twins' own arithmetic is the definition's but for the products of the sum,
    which are rounded: it is no axis that sees that, but the device does."""
    assert verify(path, WINDOWS, ON_CPU, {"cpu": FaultyBackend(norms(norm))}).confirmed
    assert not verify(path, WINDOWS, ["device"], {"cpu": CPUBackend(), "cuda:0": FaultyBackend(norms(norm), "cuda:0")}).confirmed


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_caught_and_named(paths, fault, tmp_path):
    path = paths[fault.model]
    verification = verify(path, WINDOWS, ON_CPU, {"cpu": fault.backend("cpu")})
    caught = caught_by(verification)
    assert fault.axes <= caught if fault.axes else not caught, caught
    if not fault.axes:  # on one device it is right everywhere, and wrong
        verification = verify(path, WINDOWS, ["device"], {"cpu": CPUBackend(), "cuda:0": fault.backend("cuda:0")})
        assert caught_by(verification) == {"device"}
    found = verification.bisect(verification.first_mismatch())
    check_named(found, fault)
    found.save(tmp_path / "dump")
    assert {path.name for path in (tmp_path / "dump").iterdir()} >= {"default.npz", "other.npz", "run.py"}


@pytest.mark.parametrize("fault", KEPT_FAULTS, ids=lambda fault: fault.name)
def test_what_sequences_keep(paths, fault):
    verification = verify(paths[fault.model], WINDOWS, ON_CPU, {"cpu": fault.backend("cpu")})
    assert fault.axes <= caught_by(verification), caught_by(verification)
    check_named(verification.bisect(verification.first_mismatch()), fault)


def test_a_prefix_that_lacks_a_cell(path, monkeypatch):
    """Attention is the first node that differs, and its cache what it read otherwise."""
    cp = KVCache.seq_cp

    def short(memory, source, seq_id, n):
        cp(memory, source, seq_id, n - 1)
        memory.present[seq_id, n - 1], memory.lengths[seq_id] = 1, n
    monkeypatch.setattr(KVCache, "seq_cp", short)
    verification = verify(path, WINDOWS, ON_CPU, {"cpu": CPUBackend()})
    assert caught_by(verification) == {"prefix"}
    found = verification.bisect(verification.first_mismatch())
    assert found.op == "flash_attn_ext" and {found.inputs["k_cache-0"], found.inputs["v_cache-0"]} == {"different"}, str(found)


def test_a_draft_too_many(path, monkeypatch):
    """A sequence that keeps a token that was not accepted ends the run."""
    rm = KVCache.seq_rm
    monkeypatch.setattr(KVCache, "seq_rm", lambda memory, seq_id, p0, p1: rm(memory, seq_id, p0 + (0 < p0 < 50), p1))
    with pytest.raises(RuntimeError, match="context: sequence 0 was taken back to 1 positions and has 2"):
        verify(path, WINDOWS, ["speculation"], {"cpu": CPUBackend()})


def check_named(found, fault):
    assert found.op in fault.ops and found.inputs_equal, str(found)
    assert any(f"{OPS[op].module}.py: {op}" in culprit for culprit in found.culprits for op in fault.ops), str(found)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("first", ["cuda:0", "cpu"])
def test_named_on_either_side(paths, fault, first):
    """Another device sees every fault, be it the default setting's or the other's that has it, and what it computes as it should
    is not to blame.

    The default setting is run once more to be looked at: what comes and goes there, as reruns show, may then have been right, or
    wrong before."""
    verification = verify_both(paths[fault.model], fault.backend("cuda:0"), first)
    assert verification.results[0].setting.device == first and caught_by(verification) == {"device"}
    found = verification.bisect(verification.first_mismatch())
    if first == "cpu" or "rerun" not in fault.axes:
        check_named(found, fault)
    assert found.op in fault.ops and all(" on cuda:0, in: " in culprit for culprit in found.culprits), str(found)


def verify_both(path, faulty, first: str):
    """A device with a fault, cuda:0, and one without, one of them the default setting's."""
    backends = {"cuda:0": faulty, "cpu": CPUBackend()}
    return verify(path, WINDOWS, ["device"], {device: backends[device] for device in sorted(backends, key=first.__ne__)})


@pytest.mark.parametrize("kind", ["tied", "qwen3moe", "deepseek2-mla"])
def test_experts_without_a_fault(paths, kind):
    assert verify(paths[kind], WINDOWS, ON_CPU, {"cpu": CPUBackend()}).confirmed


@pytest.mark.parametrize("first", ["cuda:0", "cpu"])
def test_results_that_are_not_compared(paths, first, monkeypatch):
    """Where rows are no token's, the node is held on both sides until what it leads to is compared, and is to blame for that."""
    rows = Batch.rows
    monkeypatch.setattr(Batch, "rows", lambda batch, tensor: None
                        if tensor.name.startswith("ffn_moe_down") else rows(batch, tensor))
    faulty = FaultyBackend({"mul_mat_id": tile_across_experts}, "cuda:0", in_parts=False)
    verification = verify_both(paths["qwen3moe"], faulty, first)
    found = verification.bisect(verification.first_mismatch())
    assert found.op == "weighted_sum" and found.inputs["ffn_moe_down-0"] == "different", str(found)
    culprits = [culprit.split(", in: ")[0] for culprit in found.culprits]
    assert culprits == ["ffn_moe_down-0, kernels/cpu/mul_mat_id.py: mul_mat_id[Q8_0] on cuda:0"], str(found)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if not fault.axes], ids=lambda fault: fault.name)
def test_what_one_device_cannot_see_an_attestation_does(paths, fault):
    path = paths[fault.model]

    def load(backend):
        model = Model(GGUFFile.open(path), backend)
        model._tokenizer = FakeTokenizer(False)
        return model
    with load(CPUBackend()) as model:
        document = attest_generation(model, WINDOWS[0], 8, Sampling(), Settings(), io.StringIO())
        assert confirm(document, model, None, [0], io.StringIO()).startswith("confirmed: the only window")
    with load(fault.backend("cpu")) as model, pytest.raises(NotConfirmed, match="window 1 of 1 gave"):
        confirm(document, model, None, [0], io.StringIO())


def test_a_stale_graph_address(path):
    """Pieces that grow move the arena; what was captured before goes on reading and writing where it was."""
    verification = verify(path, WINDOWS, ["pieces"], {"cuda:0": StaleGraphsBackend(device="cuda:0")})
    assert [r.setting.growing for r in verification.results if r.status == "different"] == [True]
    found = verification.bisect(verification.first_mismatch())
    # the first node of the first step that is replayed
    assert found.op == "get_rows" and found.name == "inp_embd" and found.culprits, str(found)
    assert verify(path, WINDOWS, ["pieces"], {"cuda:0": CPUBackend(device="cuda:0")}).confirmed


def test_a_race_between_a_copy_and_a_host_read(path):
    """It shows wherever steps follow each other, and not where each node is waited for: bisection says that,
    and names no kernel."""
    verification = verify(path, WINDOWS, ["rerun"], {"cpu": HastyBackend()})
    assert caught_by(verification) == {"rerun"}
    assert verification.bisect(verification.first_mismatch()) is None


def test_a_race_that_each_node_loses(path):
    """Where a single kernel takes its time, too, the node that was read too early is named, and that it was right later."""
    verification = verify(path, WINDOWS, ["device"], {"cpu": CPUBackend(), "cuda:0": HastyBackend(0, "cuda:0")})
    found = verification.bisect(verification.first_mismatch())
    assert found is not None and found.name == "inp_embd" and not found.culprits, str(found)
    assert "did not when it was looked at: it comes and goes" in str(found) and "as defined for what they read" not in str(found)


def test_a_fault_inside_a_fused_node(path):
    """The default setting has gate, up and activation as one node; the other one has a faulty product,
    which is named though nothing of the first compares."""
    backend = FaultyBackend({"mul_mat_glu": after(lambda call: call.out.data.__iadd__(np.float32(1e-3)))})
    verification = verify(path, WINDOWS, ["fusion"], {"cpu": backend})
    without = [r for r in verification.results if r.status == "different"]
    assert {r.setting.name for r in without} == {"without mul_mat_glu", "without any", "without any, 8 at a time"}
    for result in without:
        found = verification.bisect(result)
        culprit, = found.culprits
        assert found.name.startswith("ffn_glu-0") and "mul_mat_glu" in culprit and "in: default" in culprit, str(found)

    def only_of_160_rows(call):
        if call.out.n_cols == 160:
            call.out.data[:, 5] += np.float32(1e-3)
    verification = verify(path, WINDOWS, ["fusion"], {"cpu": FaultyBackend({"mul_mat": after(only_of_160_rows)}, in_parts=False)})
    result = next(r for r in verification.results if r.status == "different")
    found = verification.bisect(result)
    assert result.setting.name == "without mul_mat_glu"
    assert [culprit.split(",")[0]
            for culprit in found.culprits] == ["ffn_gate-0", "ffn_up-0"] and "mul_mat[Q8_0]" in found.culprits[0], str(found)


def test_what_another_micro_batch_compares(path):
    """A norm that is a node in the default setting, and in the other one part of another where there is one token,
    and a node where there are more."""
    def many(call):
        if call.x.n_rows > 60:
            _, d, _ = call.act.data
            d[:] *= np.float32(1.01)
    with Model(GGUFFile.open(path), FaultyBackend({"add_rms_norm_act": after(many)})) as model:
        found = first_difference(model, model, WINDOWS, Setting("default", "", "cpu"), Setting("pieces", "", "cpu", growing=True),
                                 1)
    assert found.shape[0] == 1 and found.op == "add_rms_norm_mul_mat_glu", str(found)
    assert [culprit.split(" on ")[0]
            for culprit in found.culprits] == ["ffn_norm-0-act, kernels/cpu/add_rms_norm.py: add_rms_norm_act"], str(found)


def test_memory_written_over(path):
    """A kernel that writes behind its result: the node that reads what was there is named,
    with inputs that differ or none that is to blame."""
    def beyond(call):
        out = call.out.data
        if len(out) < 40:
            base = out
            while base.base is not None:
                base = base.base
            start = out.__array_interface__["data"][0] - base.__array_interface__["data"][0] + out.nbytes
            base[start:start + 4096] = 7
    verification = verify(path, WINDOWS, ["ubatch"], {"cpu": FaultyBackend({"mul_mat": after(beyond)}, in_parts=False)})
    assert caught_by(verification) == {"ubatch"}
    found = verification.bisect(verification.first_mismatch())
    assert found is not None and not found.culprits and "as defined for what they read" in str(found)


def test_the_same_bits_are_not_bisected(path):
    with Model(GGUFFile.open(path), CPUBackend()) as model:
        a, b = (Setting("default", "", "cpu"),
                Setting("ubatch", "", "cpu", n_ubatch=7, no_fuse=("all",), kv_write="cpy", order=(2, 1, 0), piece=31))
        assert first_difference(model, model, WINDOWS, a, b, 1) is None


def test_rows_named_by_addresses_are_computed_again(path):
    """A fault in a node that writes to addresses: what it read is computed again in other memory."""
    contracted = next(fault for fault in FAULTS if fault.name == "a contraction of multiply and add")
    with Model(GGUFFile.open(path), CPUBackend()) as model, Model(GGUFFile.open(path), contracted.backend("cpu")) as faulty:
        setting = Setting("kv_write", "", "cpu", kv_write="cpy")
        found = first_difference(model, faulty, WINDOWS, setting, setting, 1)
    assert found is not None and "rope_set_rows" in str(found)


def test_a_fault_in_one_of_three_results(path):
    def of_k(call):
        if call.x.n_rows < 32:
            call.k_out.data[:, 3] += np.float32(1e-3)
    verification = verify(path, WINDOWS, ["ubatch"], {"cpu": FaultyBackend({"mul_mat_qkv": after(of_k)})})
    found = verification.bisect(verification.first_mismatch())
    assert found.op == "mul_mat_qkv" and found.name == "Klin-0" and found.inputs_equal, str(found)
    assert all("mul_mat_qkv.py: mul_mat_qkv[Q8_0, Q8_0, Q8_0]" in culprit
               for culprit in found.culprits) and found.culprits, str(found)
