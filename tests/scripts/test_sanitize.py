"""sanitize.py without a GPU: what counts as clean, and that its selection finds tests."""
import re
import subprocess
import sys
from collections import Counter

import pytest
import sanitize
from places import ROOT, environment


@pytest.mark.parametrize("returncode, output, wrong", [
    (0, "12 passed in 3.1s\n========= ERROR SUMMARY: 0 errors\n", None),
    (0, "12 passed, 3 deselected in 3.1s\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", None),
    (0, "====== 12 passed, 3 deselected in 3.1s ======\n========= ERROR SUMMARY: 0 errors\n", None),
    (0, "12 passed\n========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)\n",
     "1 hazard displayed (0 errors, 1 warning)"),
    (99, "12 passed\n========= ERROR SUMMARY: 10 errors\n", "10 errors"),
    (1, "1 failed, 11 passed\n========= ERROR SUMMARY: 0 errors\n", "the tests did not pass (exit code 1)"),
    (0, "12 skipped in 0.3s\n========= ERROR SUMMARY: 0 errors\n", "the tests did not pass (exit code 0)"),
    (0, "12 passed\n========= ERROR SUMMARY: 0 errors\n========= ERROR SUMMARY: 2 errors\n", "2 errors"),
    (0, "12 passed\n", "the tool gave no summary")])
def test_problem(returncode, output, wrong):
    assert sanitize.problem(returncode, output) == wrong


# tests by file that reach every family of kernels (factories of kernels/cuda), but for the one that sanitize.py names
KERNELS = {
    "ops": "rms_norm rms_norm_act add_rms_norm add_rms_norm_mul_mat glu swiglu_act swiglu_oai mul_mat_glu mul_mat_glu_in_blocks "
           "mul_mat_qkv binary scale argmax rope cpy set_rows cpy_rows rope_set_rows routing topk_moe experts heads "
           "flash_attn_ext_types flash_attn_ext_kernels flash_attn_ext_windows_and_sinks flash_attn_ext_latent "
           "flash_attn_ext_act",
    "matmul": "quantize mul_mat mmq mmq_without_warpgroups mmq_any_block mmq_half_of_experts mmq_few qkv get_rows dequantize "
              "take_rows",
    "mul_mat_id": "dispatch mul_mat_id groups_of_pairs any_block mul_mat_heads mul_mat_heads_sorted glu glu_sorted glu_of_floats"}


def test_selection():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "sanitize", "--collect-only", "-k",
               sanitize.SELECTION, *sanitize.FILES]
    found = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True).stdout
    cases = Counter(re.findall(r"^tests/.*/test_gpu_(\w+)\.py::test_(\w+)", found, re.MULTILINE))
    for file, names in KERNELS.items():
        for name in names.split():
            assert 1 < cases[file, name] <= sanitize.MOST, (file, name, cases)
    assert "test_verification_and_several_sequences[cpy]" in found and max(cases.values()) == sanitize.MOST
    assert "extremes" not in found and "test_mul_mat[Q5_1" not in found and "test_rms_norm[False-7-14336]" not in found


def test_unknown_tool():
    done = subprocess.run([sys.executable, sanitize.__file__, "leakcheck"], capture_output=True, text=True)
    message = "sanitize.py: error: unknown tool leakcheck; known: memcheck, racecheck, initcheck, synccheck"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, message)
