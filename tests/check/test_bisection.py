"""Captured nodes can be computed again from what they read, wherever their results lie; what bisection tells of fused nodes,
and of several devices."""
from contextlib import nullcontext

import numpy as np
import pytest

from ggml_py.backends.cpu import CPUBackend
from ggml_py.check.axes import Setting, settings_of
from ggml_py.check.bisection import fault, first_difference
from ggml_py.check.recording import Batch, Capture, LiveCapture, RecordedContext, recompute
from ggml_py.check.verify import Verification
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile
from ggml_py.testing import difference
from guarded_cpu import two_devices
from planted_faults import FaultyBackend, after
from recurrent_op import declared, recurrent_model
from tiny_models import write_model

TOKENS = [3, 1, 4, 1, 5]
WINDOWS = np.int32([TOKENS, TOKENS[::-1]])
ELIDED = Setting("default", "", "cpu", n_ubatch=1)
SEPARATE = Setting("fusion", "without elide", "cpu", n_ubatch=1, no_fuse=("elide",))
FUSED, UNFUSED = Setting("default", "", "cpu"), Setting("default", "", "cpu", no_fuse=("all",))


# States that are written in place

class FaultyRecurrence(CPUBackend):
    """The recurrent op has a fault where `of` says so of its call. first: position from which on it has."""

    def __init__(self, of, first=0):
        super().__init__()
        self.of, self.first, self.n = of, first, 0

    def step(self, call):
        step = super().step(call)

        def faulty():
            step()
            call.out.data[0, 3] += np.float32(self.n % len(TOKENS) >= self.first)
            self.n += 1
        return faulty if call.op == "recur" and self.of(call) else step


@pytest.mark.parametrize("no_fuse", [(), ("elide",)])
@pytest.mark.parametrize("kv_write", ["set_rows", "cpy"])
def test_a_node_that_writes_over_what_it_reads(no_fuse, kv_write):
    """Its operand is captured as it was, and its result as the rows of the state that it gave."""
    captured, n_wrong = [], 0
    settings = dict(n_ctx=8, n_seq_max=2, no_fuse=no_fuse, kv_write=kv_write)
    copies = ["set_rows" if kv_write == "set_rows" else "cpy_rows_indirect"] if no_fuse else []

    def visit(node, batch, backend):
        captured.append((LiveCapture.of(node, batch, backend, context.current).load(), batch.keys[0]))
    with declared(), RecordedContext(visit, recurrent_model(CPUBackend()), **settings) as context:
        context.decode(TOKENS[:1], seq_id=1)
        context.decode(TOKENS[1:2], seq_id=1)
        assert context.counters is None and context.launches() == "CUDA graphs: none"
        assert [capture.op for capture, _ in captured] == 2 * ["take_rows", "recur", *copies, "scale"]
        for capture, key in captured:
            assert fault(capture, key) is None, capture.name
            assert capture.op != "recur" or all(value.shape == (1, 8) for value in capture.results.values())
            value = next(iter(capture.results.values()))
            value.arrays[0].reshape(-1).view(np.uint8)[5] ^= 1  # and what it gave is looked at
            n_wrong += fault(capture, key) is not None
    assert n_wrong == len(captured)


def test_elided_copies_are_no_difference():
    with declared():
        model = recurrent_model(CPUBackend())
        assert first_difference(model, model, WINDOWS, ELIDED, SEPARATE, 1) is None


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("in_place", [True, False])
def test_the_side_with_the_fault_is_named(in_place, first):
    """Only the one that writes over its state, or only the one that does not, is to blame, also where the state is not what it
    was at first."""
    with declared():
        model = recurrent_model(FaultyRecurrence(lambda call: (call.rows_out is not None) == in_place, first))
        found = first_difference(model, model, WINDOWS, ELIDED, SEPARATE, 1)
    assert (found.name, found.op, found.first) == ("recur-0", "recur", (0, 3))
    assert found.inputs == {"state": "equal", "inp": "equal", "ids": "equal"}
    side = "default, " if in_place else "fusion, without elide"
    assert found.culprits == [f"recur-0, kernels/cpu/recur.py: recur on cpu, in: {side}"], str(found)


def test_the_fusion_axis_leaves_out_elision(tmp_path):
    """What is wrong only where a copy is left out differs from the settings that make it."""
    def verified(of) -> Verification:
        model = recurrent_model(FaultyRecurrence(of))
        windows = WINDOWS[:, :1]  # a state has one row a sequence: one token at a time
        verification = Verification(lambda device: nullcontext(model), windows, settings_of(["fusion"], ["cpu"], windows.shape))
        verification.run()
        return verification
    with declared():
        assert verified(lambda call: False).confirmed
        verification = verified(lambda call: call.rows_out is not None)
        assert {result.setting.name for result in verification.results if result.status == "different"} == {
            "without elide", "without any", "without any, 8 at a time"}
        found = verification.bisect(verification.first_mismatch())
        culprit, = found.culprits
        assert found.settings[1] == "fusion, without elide on cpu" and "recur on cpu, in: default" in culprit
        found.save(tmp_path)
        for side in "default", "other":
            capture = Capture.read(tmp_path / f"{side}.npz")
            made = recompute(capture, CPUBackend("reference"))
            other = [name for name, arrays in made.items() if difference(arrays[0], capture.results[name].arrays[0])]
            assert other == ["recur-0"] * (side == "default")


# Fused nodes

@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "m.gguf", "llama", ("Q8_0",), n_embd=288, n_ff=160)


def wrong_scales(call):
    call.act.data[1][:] *= np.float32(1.5)


def nudge(name):
    def change(call):
        getattr(call, name).data[:, 3] += np.float32(0.5)
    return change


INSIDE = [
    ("add_rms_norm_act", wrong_scales,
     "stands for add, rms_norm, quantize; as defined: add (ffn_inp-0); not as defined: rms_norm, quantize (ffn_norm-0-act)"),
    ("add_rms_norm_act", nudge("sum"),
     "stands for add, rms_norm, quantize; as defined: quantize (ffn_norm-0-act); not as defined: add (ffn_inp-0)"),
    ("mul_mat_qkv", nudge("k_out"),
     "stands for mul_mat, mul_mat, mul_mat; as defined: mul_mat (Qlin-0), mul_mat (Vlin-0); not as defined: mul_mat (Klin-0)"),
    ("mul_mat_glu", nudge("out"), "stands for mul_mat, mul_mat, swiglu"),
    ("rope_set_rows", nudge("q_out"),
     "stands for rope, rope, set_rows, set_rows; as defined: set_rows (k_cache-0), set_rows (v_cache-0); "
     "not as defined: rope (Qcur-0)"),
    ("flash_attn_ext_act", wrong_scales, "stands for flash_attn_ext, quantize"),
    ("get_rows", nudge("out"), ""),
]


OTHER = Setting("device", "", "cuda:0")


def of_a_faulty_device(path, twins, other=OTHER):
    """The first node that differs between a CPU, where nodes are fused, and another device, which has twins of some ops."""
    with Model(GGUFFile.open(path), CPUBackend()) as right, Model(GGUFFile.open(path), FaultyBackend(twins, "cuda:0")) as faulty:
        return first_difference(right, faulty, WINDOWS, FUSED, other, 0)


def hide(monkeypatch, *names):
    """The rows of results of these names are not known to be tokens'."""
    rows = Batch.rows
    monkeypatch.setattr(Batch, "rows", lambda batch, tensor: None if tensor.name in names else rows(batch, tensor))


def named(found) -> list[str]:
    """The nodes that are to blame, their kernels and devices."""
    return [culprit.split(", in: ")[0] for culprit in found.culprits]


@pytest.mark.parametrize("op, change, told", INSIDE, ids=[f"{op} {i}" for i, (op, _, _) in enumerate(INSIDE)])
def test_which_parts_of_a_fused_node_are_at_fault(path, op, change, told):
    """The culprit's results tell: the parts whose results are right are not to blame, and of the others only the first, with what
    nobody has seen of it."""
    found = of_a_faulty_device(path, {op: after(change)})
    culprit, = found.culprits
    assert found.op == op and culprit.endswith("in: device, " + f"; {told}" * bool(told)), str(found)
    parts = told.split("; ")[0].removeprefix("stands for ").split(", ") if told else []
    assert found.parts == parts == found.as_dict()["parts"] and str(found).count("stands for") == bool(told)


def wrong_attention_output(call):
    if call.name == "attn_out-0":
        nudge("out")(call)


def test_what_a_fused_node_stands_for_is_told_where_another_is_to_blame(path, monkeypatch):
    """The second product of a layer is wrong; the sum behind it is the first result that both sides have."""
    hide(monkeypatch, "attn_out-0")
    found = of_a_faulty_device(path, {"mul_mat": after(wrong_attention_output)})
    assert str(found).splitlines()[1] == "  add_rms_norm_act stands for add, rms_norm, quantize", str(found)
    assert named(found) == ["attn_out-0, kernels/cpu/mul_mat.py: mul_mat[Q8_0] on cuda:0"]
    assert "stands for" not in found.culprits[0]


@pytest.mark.parametrize("hidden", ["attn_out-0", "kqv_out-0-act"])
def test_rows_that_are_no_tokens(path, hidden, monkeypatch):
    """A product whose result, or whose operand, is not compared: the node that makes it is held."""
    hide(monkeypatch, hidden)
    unfused = Setting("device", "", "cuda:0", no_fuse=("all",))
    found = of_a_faulty_device(path, {"mul_mat": after(wrong_attention_output)}, unfused)
    assert named(found) == ["attn_out-0, kernels/cpu/mul_mat.py: mul_mat[Q8_0] on cuda:0"], str(found)
    assert next(capture.name for capture in found.captures[1]) == hidden and len(found.captures[1]) == 2


# Several devices

class Layer1Here(Setting):
    """Layer 1 and what is behind the layers on the model's device, all that is before on another one, cpu:1."""

    @staticmethod
    def device_of(node):
        return "cpu" if node.name.split("-act")[0].endswith("-1") or node.name.startswith("result") else "cpu:1"

    def context_settings(self, windows):
        return {**super().context_settings(windows), "device_of": self.device_of}


class NothingHere(Layer1Here):
    @staticmethod
    def device_of(node):
        return "cpu:1"


class QuantizedElsewhere(Layer1Here):
    @staticmethod
    def device_of(node):
        return "cpu:1" if node.op == "quantize" else "cpu"


def placed(path, change=None):
    """A model with two devices, each with memory and a layout of its own. change: behind every node that gives floats, `out`."""
    main, other = two_devices()
    for device in (main, other):
        def faulty(call, step=device.step):
            kernel = step(call)
            return after(change)(call, kernel) if change and "out" in call.values else kernel
        device.step = faulty
    model = Model(GGUFFile.open(path), main)
    model.backends[other.device] = other
    return model


@pytest.mark.parametrize("setting", [Layer1Here, NothingHere])
@pytest.mark.parametrize("no_fuse", [(), ("all",)])
def test_several_devices_are_no_difference(path, setting, no_fuse):
    other = setting("device", "", "cpu", n_ubatch=2, no_fuse=no_fuse)
    with Model(GGUFFile.open(path), CPUBackend()) as one, placed(path) as several:
        assert first_difference(one, several, WINDOWS, FUSED, other, 0) is None


@pytest.mark.parametrize("setting, name, op, device", [
    (Layer1Here, "attn_out-0", "mul_mat[Q8_0]", "cpu:1"), (Layer1Here, "attn_out-1", "mul_mat[Q8_0]", "cpu"),
    (Layer1Here, "attn_norm-1", "rms_norm", "cpu"),          # reads floats of the other device
    (QuantizedElsewhere, "Qlin-0", "mul_mat[Q8_0]", "cpu"),  # reads activations of the other device, in another layout
])
def test_a_fault_on_one_of_several_devices(path, setting, name, op, device):
    """Operands that came from another device are found by the names that they have there."""
    def change(call):
        if call.name == name:
            call.out.data[1:, 7] += np.float32(1)
    other = setting("device", "", "cpu", n_ubatch=2, no_fuse=("all",))
    with Model(GGUFFile.open(path), CPUBackend()) as one, placed(path, change) as several:
        found = first_difference(one, several, WINDOWS, UNFUSED, other, 0)
    assert (found.name, found.first, set(found.inputs.values())) == (name, (1, 7), {"equal"}), str(found)
    assert named(found) == [f"{name}, kernels/cpu/{op.split('[')[0]}.py: {op} on {device}"], str(found)


@pytest.mark.parametrize("setting", [Layer1Here, NothingHere])
def test_what_is_held_is_given_up_when_what_it_leads_to_is_right(path, setting, monkeypatch):
    """Across devices, and at the end of a micro-batch, also of one that begins with a copy."""
    def late(call):
        if call.name == "attn_out-1":
            call.out.data[:, 7] += np.float32(late.n == 2)
            late.n += 1
    late.n = 0
    hide(monkeypatch, "l_out-0", "result_output")
    with Model(GGUFFile.open(path), CPUBackend()) as one, placed(path, late) as several:
        found = first_difference(one, several, WINDOWS, UNFUSED, setting("device", "", "cpu", n_ubatch=1, no_fuse=("all",)), 0)
    assert [capture.name for capture in found.captures[1]] == [found.name] == ["attn_out-1"]
