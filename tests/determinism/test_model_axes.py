"""Models on every axis and every device that is here: one digest. Small models of every architecture;
SmolLM2 in full where there is a GPU."""
import json
import subprocess
import sys

import numpy as np
import pytest

import smollm2
from cuda_simulator import ROOT, no_gpu
from ggml_py.check.axes import AXES, settings_of
from ggml_py.backends import present_devices
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile
from ggml_py.models import ARCHITECTURES
from ggml_py.check.noise import Noise
from ggml_py.testing import digest
from ggml_py.check.verify import Verification
from tiny_delta_net_models import KINDS as RECURRENT, write_delta_net_model
from tiny_hybrid_models import KINDS as HYBRID, write_hybrid_model
from tiny_layer_models import KINDS as LAYERED, write_layer_model
from tiny_models import write_model
from tiny_moe_models import ARCHITECTURES as WITH_EXPERTS, write_moe_model

WINDOWS = np.random.default_rng(0).integers(0, 70, (3, 150)).astype(np.int32)
CACHES = [("f16", "f16"), ("q8_0", "f16"), ("f32", "f32")]


def write(path, kind):
    types = "Q8_0", "Q8_0", "Q4_1", "F16"
    if kind in RECURRENT:
        return write_delta_net_model(path, kind, types)
    if kind in HYBRID:
        return write_hybrid_model(path, kind, types)
    if kind in LAYERED:
        return write_layer_model(path, kind, types)
    return (write_moe_model(path, kind, types) if kind in WITH_EXPERTS
            else write_model(path, kind, types, qkv_bias=kind == "qwen2"))


def model_has_experts(path) -> bool:
    with GGUFFile.open(path) as file:
        return any("_exps." in name for name in file.tensors)


@pytest.mark.parametrize("kind", dict.fromkeys([*ARCHITECTURES, *WITH_EXPERTS, *RECURRENT, "olmo3"]))
@pytest.mark.parametrize("types", [CACHES[0], *(pytest.param(types, marks=pytest.mark.slow) for types in CACHES[1:])], ids=str)
def test_small_models(kind, types, tmp_path):
    path = write(tmp_path / "m.gguf", kind)
    settings = settings_of(list(AXES), present_devices(), WINDOWS.shape, type_k=types[0], type_v=types[1])
    load = lambda device, placement=None: Model.load(path, device=device, placement=placement)
    with Verification(load, WINDOWS, settings) as verification:
        verification.run()
        mismatch = verification.first_mismatch()
        assert mismatch is None, f"{mismatch.setting}\n{verification.bisect(mismatch)}"
    assert verification.confirmed, verification.verdict()
    confirmed = {r.setting.axis for r in verification.results if r.status == "same"}
    assert confirmed >= {"default", *AXES} - {"launch", "noise", "products", "experts", "device"}
    assert ("experts" in confirmed) == model_has_experts(path)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*WITH_EXPERTS, *RECURRENT, *HYBRID])
def test_a_hundred_times_under_load(kind, tmp_path):
    """100 runs beside other work on the GPU, of one sequence after the other and of all together."""
    if reason := no_gpu():
        pytest.skip(reason)
    digests = set()
    with Model.load(write(tmp_path / "m.gguf", kind), device="cuda:0") as model, Noise("cuda:0"):
        contexts = [model.new_context(n_ctx=WINDOWS.size, n_seq_max=len(WINDOWS), n_ubatch=n_ubatch) for n_ubatch in (512, 64, 7)]
        for i in range(100):
            context = contexts[i % 3]
            context.clear()
            rows = (context.decode_batch(list(enumerate(WINDOWS)), "all") if i % 2
                    else [context.decode(w, seq, "all") for seq, w in enumerate(WINDOWS)])
            digests.add(digest(np.concatenate(rows)))
        for context in contexts:
            context.close()
    assert len(digests) == 1


def verify_smollm2(tmp_path, *argv) -> dict:
    command = [sys.executable, "-m", "ggml_py", "verify", "-m", str(smollm2.require()), "--json", str(tmp_path / "report.json"),
               *argv]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((tmp_path / "report.json").read_text())


@pytest.mark.slow
def test_smollm2_on_the_cpu(tmp_path):
    report = verify_smollm2(tmp_path, "--devices", "cpu", "-c", "100", "--chunks", "2", "--reruns", "1")
    assert report["confirmed"] and {s["axis"] for s in report["settings"]
                                    if s["status"] == "not run"} == {"launch", "noise", "products", "experts", "device"}


@pytest.mark.gpu
def test_smollm2_in_full(tmp_path):
    """The command's default: all axes on every device."""
    reason = no_gpu()
    if reason:
        pytest.skip(reason)
    report = verify_smollm2(tmp_path)
    assert report["confirmed"] and not [s for s in report["settings"] if s["status"] == "not run"] and report["n_windows"] == 4
