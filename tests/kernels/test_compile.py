"""The disk cache of compiled kernels: a second process finds them, an edit in a called function of another file is seen;
CPUs that lack an instruction."""
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

from ggml_py.kernels import compile
from ggml_py.kernels.call import Call, Operand
from places import ROOT

SCRIPT = """
import numpy as np
from ggml_py.kernels.compile import cache_folder
from ggml_py.kernels.call import Call, Operand
from ggml_py.kernels.cpu.elementwise import swiglu
values = {name: Operand("f32", (1, 4), np.full((1, 4), x, np.float32)) for name, x in (("gate", 2), ("up", 1), ("out", 0))}
swiglu(Call("swiglu", "node", None, values))()
print(values["out"].data[0, 0], len(list(cache_folder().glob("*.nbc"))))
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of the packages, as a bare checkout."""
    for name in "ggml_py", "kernels", "quant":
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run(checkout, script=SCRIPT, *args, **env):
    env = {**os.environ, "PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(checkout / "cache"), **env}
    done = subprocess.run([sys.executable, "-c", script, *args], cwd=checkout, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_an_edit_in_a_called_function_is_seen(checkout):
    value, compiled = run(checkout)
    assert float(value) == pytest.approx(2 / (1 + np.exp(-2)), rel=1e-6) and int(compiled) > 0
    assert run(checkout) == [value, compiled]  # found, not compiled anew
    arith = checkout / "kernels" / "arith.py"
    source = arith.read_text()
    silu = source.index("def silu")
    at = source.index("return ", silu)
    arith.write_text(source[:at] + "x = x + x\n        " + source[at:])  # silu(2x): swiglu is in another file and unchanged
    changed, _ = run(checkout)
    assert float(changed) == pytest.approx(4 / (1 + np.exp(-4)), rel=1e-6)
    arith.write_text(source)
    assert run(checkout) == [value, compiled]  # and the folder of the old state is still there


OF_QUANT = """
import numpy as np
from ggml_py.kernels.compile import compiled
from ggml_py.quant.dequantize import dequantize
from ggml_py.quant.quantize import quantize
x = dequantize(np.ones(64, np.float16).view(np.uint8), "F16", (1, 64))
print(dequantize(quantize(x, "Q8_0"), "Q8_0", x.shape).sum(), compiled.n_kernels)
"""


def test_what_quant_compiles_is_kept(checkout):
    """Loops of its modules and unpackings, which close over a type."""
    total, n_kernels = run(checkout, OF_QUANT)
    assert float(total) == pytest.approx(64, rel=1e-3) and int(n_kernels) > 1
    assert run(checkout, OF_QUANT) == [total, "0"]


UNITS = """
import sys
import numpy as np
from ggml_py.kernels.cpu.mul_mat import mul_mat_arrays
from ggml_py.quant.formats import FORMATS
rng = np.random.default_rng(0)
for name in sys.argv[1:]:
    words, q = np.arange(32 * FORMATS[name].chunk_bytes // 4, dtype=np.uint32), rng.integers(-99, 99, (1, 256)).astype(np.int16)
    out = np.empty((1, 32), np.float32)
    mul_mat_arrays(name)(words, q, np.ones((1, 1), np.float32), np.zeros((1, 16), np.int32), out)
    print(out.tobytes().hex())
    rng = np.random.default_rng(0)
"""


def test_functions_of_two_processes_are_told_apart(checkout):
    """Functions of one name, the first that their processes compile, found on disk by a third."""
    first, second = run(checkout, UNITS, "Q4_0")[0], run(checkout, UNITS, "Q5_0")[0]
    assert first != second
    assert run(checkout, UNITS, "Q4_0", "Q5_0") == [first, second] and run(checkout, UNITS, "Q5_0", "Q4_0") == [second, first]


def test_another_cpu_has_its_own_folder(checkout):
    script = "from ggml_py.kernels.compile import cache_folder; print(cache_folder().name)"
    assert run(checkout, script) != run(checkout, script, NUMBA_CPU_NAME="haswell")


@pytest.mark.parametrize("features, message", [
    ({"fma": True, "f16c": False}, "this CPU has no f16c; the CPU kernels need fma, f16c (any x86-64 CPU since 2013 has them)"),
    ({}, "this CPU has no fma and no f16c; the CPU kernels need fma, f16c (any x86-64 CPU since 2013 has them)"),
])
def test_missing_cpu_features_are_one_line(features, message, monkeypatch):
    monkeypatch.setattr(compile.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(compile, "cpu_features", lambda: features)
    with pytest.raises(RuntimeError) as error:
        compile.check_cpu()
    assert str(error.value) == message


def test_missing_cpu_features_on_the_command_line(tmp_path):
    from tiny_models import write_model
    path = write_model(tmp_path / "m.gguf")
    env = {**os.environ, "NUMBA_CPU_NAME": "core2", "NUMBA_CPU_FEATURES": "+sse,+sse2,+sse3,+ssse3,+cx16,+64bit"}
    done = subprocess.run([sys.executable, "-m", "ggml_py", "run", "-m", path, "-p", "x", "-n", "1", "--device", "cpu"], env=env,
                          capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("ggml-py: error: this CPU has no fma and no f16c")


def test_other_machines_are_not_asked(monkeypatch):
    monkeypatch.setattr(compile.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(compile, "cpu_features", dict)
    compile.check_cpu()


def test_parallel_calls_from_two_threads():
    """numba's threading layers abort the process when two Python threads run parallel code at once;
    the lock makes them take turns."""
    from ggml_py.kernels.cpu.elementwise import add
    x = Operand("f32", (64, 1000), np.ones((64, 1000), np.float32))
    outs = [np.empty_like(x.data) for _ in range(2)]

    def work(out):
        step = add(Call("add", "node", None, {"x": x, "y": x, "out": Operand("f32", out.shape, out)}))
        for _ in range(200):
            step()
    threads = [threading.Thread(target=work, args=(out,)) for out in outs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all((out == 2).all() for out in outs)


def test_factories_that_compile_at_once_do_not_mix(checkout):
    """Kernels of one factory have one name; processes that compile different ones at the same time must not take each other's
    code."""
    (checkout / "race.py").write_text("""
import sys
import numpy as np
from ggml_py.kernels.compile import jit

def make(k):
    @jit(key=(k,))
    def times(x):
        return x * np.float32(k)
    return times

keys = range(int(sys.argv[1]), 24, int(sys.argv[2]))
print(all(make(k)(np.float32(1)) == k for k in keys))
""")
    env = {**os.environ, "PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(checkout / "cache")}
    start = lambda first, step: subprocess.Popen([sys.executable, "race.py", str(first), str(step)], cwd=checkout, env=env,
                                                 stdout=subprocess.PIPE, text=True)
    for processes in [start(first, 3) for first in range(3)], [start(0, 1)]:
        assert [p.communicate()[0] for p in processes] == ["True\n"] * len(processes)
