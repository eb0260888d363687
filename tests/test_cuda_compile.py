"""The code of every registered CUDA kernel, compiled without a GPU: our own float operations, nothing approximate or atomic, no spills, and no memory
touched before the kernel that may write it has ended."""
import pickle
import re
import shutil
import subprocess
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace

import pytest

numba_cuda = pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
from numba import cuda  # noqa: E402

from ggml_py.kernels import cuda as kernels_cuda  # noqa: E402
from ggml_py.kernels.compile import Compiled, compiled as compiled_on_cpu  # noqa: E402
from ggml_py.kernels.cuda import compile_workers, launch, ptx as intrinsics  # noqa: E402
from ggml_py.kernels.cuda.launch import F32, FACTORIES, OVERLAPPING, SCALAR_F32, Kernel, arguments, compile_ptx, entry_name, ptx_version  # noqa: E402

for module in iter_modules(kernels_cuda.__path__):
    if module.name != "simulator":
        import_module(f"{kernels_cuda.__name__}.{module.name}")

KERNELS = {make(*args).name: (make, args) for make, cases in FACTORIES.items() for args in cases}
REPRESENTATIVE = [make(*args).name for make, cases in FACTORIES.items() for args in dict.fromkeys((cases[0], cases[-1]))]  # in the same order in every process
COMPUTE_CAPABILITIES = [(8, 0), (9, 0), (10, 0), (12, 0)]

ASSEMBLY = re.compile(r"// begin inline asm\n(.*?)// end inline asm", re.DOTALL)
FLOAT_OPERATION = re.compile(r"\b(add|sub|mul|mad|fma|div|rcp|sqrt|rsqrt|ex2|lg2|sin|cos|tanh|cvt)\.[\w.:]*\b(f16|bf16|f32|tf32)(x2)?\b")
FORBIDDEN = re.compile(r"\batom\b|\bred\.|\.approx|\.full\b|\.ftz|\.f64|\b0[dD][0-9a-fA-F]{16}\b|\.local\b|\bcall\b|\.func\b")
ROUNDED = re.compile(r"\.(rn|rni)\b|\bcvt\.f32\.(f16|bf16)\b")  # widening is exact


def test_nvvm_says_its_release():
    """As in the PTX of any kernel: that of the toolkit."""
    header = re.search(r"release (\d+\.\d+), V(\S+)", compile_ptx(KERNELS[REPRESENTATIVE[0]][0](*KERNELS[REPRESENTATIVE[0]][1]), (9, 0)))
    assert launch.nvvm_release() == header[2] and header[2].startswith(header[1])


def violations(ptx: str) -> list[str]:
    """Lines of a PTX that break the rules of kernels: no atomics, approximations, float64, calls or local memory anywhere; every float
    operation inside our assembly and rounded to nearest."""
    own = [line.strip() for body in ASSEMBLY.findall(ptx) for line in body.splitlines()]
    compiled = ASSEMBLY.sub("", ptx).splitlines()
    return ([line.strip() for line in ptx.splitlines() if FORBIDDEN.search(line)]
            + [line.strip() for line in compiled if FLOAT_OPERATION.search(line)]
            + [line for line in own for part in line.split(";") if FLOAT_OPERATION.search(part) and not ROUNDED.search(part)])


LAUNCH, WAIT = "griddepcontrol.launch_dependents", "griddepcontrol.wait"
# Parameters of kernels that wait where they say: what only copies write
WEIGHTS = {"words", "gate_words", "up_words", "q_words", "k_words", "v_words", "gate_bias", "up_bias", "q_bias", "k_bias", "v_bias", "w", "sinks", "pos", "seq", "rope_table", "q_norm", "k_norm"}
GLOBAL = re.compile(r"\b(ld|st|prefetch)\.global|\bcp\.async\.(c[ag]\b|bulk)")


def statements(ptx: str) -> list[str]:
    """Instructions and labels of the kernel."""
    body = re.sub(r"//.*", "", ptx[ptx.index("{", ptx.index(".entry")) + 1:])
    return [s.strip() for s in re.split(r";|(?<=:)\n", body) if s.strip()]


def before_wait(code: list[str]) -> list[str]:
    """The instructions that a thread can come to without having waited."""
    labels = {s[:-1]: i for i, s in enumerate(code) if s.endswith(":")}
    seen, ways = set(), [0]
    while ways:
        i = ways.pop()
        while i not in seen and not code[i].startswith(WAIT):
            seen.add(i)
            if target := re.search(r"\bbra(\.uni)?\s+(\S+)", code[i]):
                ways.append(labels[target[2]])
            if re.match(r"(bra|ret)\b", code[i]):
                break
            i += 1
    return [code[i] for i in sorted(seen)]


def pointers(kernel: Kernel, code: list[str]):
    """(register) -> names of the pointers among the kernel's parameters that its value may come from."""
    names = [name if isinstance(t, intrinsics.types.CPointer) else None for name, t in zip(signature(kernel.function).parameters, kernel.parameters)]
    sources = {}
    for s in code:
        operands = re.findall(r"%\w+|(?<=_param_)\d+", re.sub(r"^@!?%p\d+", "", s))
        n_results = len(re.findall(r"%\w+", m[0])) if (m := re.search(r"\{[^}]*\}", s)) and s.find("{") < s.find("%") else 1
        for result in operands[:n_results]:
            sources.setdefault(result, set()).update(operands[n_results:])

    def of(register):
        found, ways = set(), [register]
        while ways:
            if (r := ways.pop()) not in found:
                found.add(r)
                ways += sources.get(r, ())
        return {names[int(r)] for r in found if r.isdigit()} - {None}
    return of


def overlap_violations(kernel: Kernel, ptx: str, cc) -> list[str]:
    """Accesses of global memory that another kernel may write or read, and ends of the kernel, before the wait; loads of constants count wherever they are."""
    if cc < OVERLAPPING:
        return re.findall("griddepcontrol.*", ptx)
    code = statements(ptx)
    early, of = before_wait(code), pointers(kernel, code)
    start = next((s for s in code if not s.startswith(".")), "")
    read = [s for s in early if re.search(r"\bcp\.async\.c[ag]\b|\bld\.global\b", s)] + [s for s in code if ".global.nc" in s]
    return ([s for s in early if GLOBAL.search(s) and s not in read or s.startswith("ret")] + [start] * (start != LAUNCH)
            + [s for s in read if not of(re.findall(r"\[(%\w+)", s)[-1]) <= WEIGHTS])


@lru_cache(None)
def ptxas() -> str | None:
    """The assembler of nvidia-cuda-nvcc or of a toolkit."""
    import nvidia
    found = [path for root in nvidia.__path__ for path in sorted(Path(root).glob("**/bin/ptxas"))]
    return str(found[0]) if found else shutil.which("ptxas")


def architecture(cc) -> str:
    return f"sm_{''.join(map(str, cc))}"


def assembled(ptx: str, cc, tmp_path) -> str:
    """What ptxas says about a kernel; skips the test where there is none."""
    if ptxas() is None:
        pytest.skip("no ptxas: nvidia-cuda-nvcc is not installed")
    source = tmp_path / "kernel.ptx"
    source.write_text(ptx)
    command = [ptxas(), "-v", f"-arch={architecture(cc)}", "-o", tmp_path / "kernel.cubin", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def check_kernel(name, cc, tmp_path):
    make, args = KERNELS[name]
    kernel = make(*args)
    ptx, cc = compile_ptx(kernel, cc), kernel.arch or cc
    assert f".target {architecture(cc)}\n" in ptx
    assert not violations(ptx)
    assert not overlap_violations(kernel, ptx, cc[:2])
    assert set(re.findall(r"(?:extern )?\.shared \.align \d+", ptx)) <= {".shared .align 16", "extern .shared .align 1024"}
    assert entry_name(ptx)
    report = assembled(ptx, cc, tmp_path)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report, report


@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name, tmp_path):
    check_kernel(name, (9, 0), tmp_path)


@pytest.mark.parametrize("cc", [cc for cc in COMPUTE_CAPABILITIES if cc != (9, 0)], ids=str)
@pytest.mark.parametrize("name", [name for name in REPRESENTATIVE if not KERNELS[name][0](*KERNELS[name][1]).arch])
def test_other_compute_capabilities(name, cc, tmp_path):
    check_kernel(name, cc, tmp_path)


def test_products_of_warpgroups_are_not_held_up(tmp_path):
    """ptxas warns where it lets no product run beside other work."""
    for name in ("mmq[Q8_0, 4, 1, 16, True, 3]", "mmq[Q4_K, 4, 1, 16, True, 3]", "mmq_id[Q4_K, False, 2, 1, 4, True, 3]", "mmq_id[Q8_0, False, 2, 1, 12, True, 2]",
                 "mmq_glu[silu, Q8_0, Q8_0, False, 4, 1, 16, True, 3]",
                 "mmq_id_glu[swiglu_oai, MXFP4, MXFP4, True, 1.702, 7.0, 2, 1, 8, True, 2]"):
        make, args = KERNELS[name]
        report = assembled(compile_ptx(make(*args), (9, 0)), (9, 0, "a"), tmp_path)
        assert "serialized" not in report, report


def test_kernels_of_one_architecture():
    make, args = KERNELS["mmq[Q8_0, 4, 1, 16, True, 3]"]
    with pytest.raises(ValueError, match=r"mmq\[Q8_0, 4, 1, 16, True, 3\]: compute capability is \(8, 0\), allowed: \(9, 0\)"):
        compile_ptx(make(*args), (8, 0))


# The checks themselves, the intrinsics and the launch values

def compiled(function, *parameters):
    return compile_ptx(Kernel(function, parameters, 32, name=function.__name__), (8, 0))


def test_contracted_operations_are_seen():
    def contracted(x, y):
        y[0] = x[0] * x[1] + x[2]

    def wide(x, y):
        y[0] = x[0] * 0.5

    def approximate(x, y):
        cuda.atomic.add(y, 0, x[0])
    for function in (contracted, wide):
        assert violations(compiled(function, F32, F32)), function.__name__
    arrays = cuda.compile_ptx(approximate, (intrinsics.types.float32[::1],) * 2, cc=(8, 0))[0]
    assert violations(arrays)


def test_what_is_touched_too_early_is_seen():
    def early(x, words, y, n):
        for i in range(n):
            intrinsics.st(y, i, intrinsics.ld(x, i))
        intrinsics.wait_for_previous()

    def constant(x, words, y, n):
        intrinsics.wait_for_previous()
        intrinsics.st(y, 0, intrinsics.ldc(x, 0))

    def some(x, words, y, n):
        if n > 0:
            intrinsics.wait_for_previous()
        intrinsics.st(y, 0, intrinsics.ld(words, 0))

    def weights(x, words, y, n):
        value = intrinsics.ldc(words, n)
        intrinsics.wait_for_previous()
        intrinsics.st(y, 0, intrinsics.add(value, intrinsics.ld(x, n)))

    def asked(x, words, y, n):
        value = intrinsics.ld(words, n)
        intrinsics.wait_for_previous()
        intrinsics.st(y, 0, intrinsics.add(value, intrinsics.ld(x, n)))

    def activations(x, words, y, n):  # without a wait of its own: it is put first, and ldc is a plain load
        intrinsics.st(y, 0, intrinsics.ldc(x, 0))
    found = {}
    for function in (early, constant, some, weights, asked, activations):
        kernel = Kernel(function, (F32, F32, F32, launch.N), 32, name=function.__name__)
        found[function.__name__] = overlap_violations(kernel, compile_ptx(kernel, (9, 0)), (9, 0))
        assert not overlap_violations(kernel, compile_ptx(kernel, (8, 0)), (8, 0))
    assert {name for name, lines in found.items() if lines} == {"early", "constant", "some"}, found
    assert len(found["early"]) >= 2


def test_intrinsics_refuse_float64():
    def wide(x, y):
        intrinsics.st(y, 0, intrinsics.add(intrinsics.ld(x, 0), 0.5))
    with pytest.raises(Exception, match="ptx.add: expected float32, got float64"):
        compiled(wide, F32, F32)


def test_arguments():
    kernel = Kernel(None, (F32, intrinsics.types.int32, intrinsics.types.int64, SCALAR_F32), 32, name="k")
    assert [type(a).__name__ for a in arguments(kernel, (4096, 7, 1 << 40, 0.5))] == ["int", "int32", "int64", "float32"]
    with pytest.raises(ValueError, match=r"k: 2147483648 does not fit int32"):
        arguments(kernel, (4096, 1 << 31, 0, 0.5))
    with pytest.raises(TypeError, match=r"k: expected 4 arguments, got 3"):
        arguments(kernel, (4096, 1, 0))


def test_disk_cache(tmp_path, monkeypatch):
    """The second process of a kernel reads what the first one wrote; another compute capability or kernel of the same name compiles. What compiles
    is counted."""
    kernel = KERNELS["take_rows"][0]()
    monkeypatch.setattr(launch, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(launch, "compiled", Compiled())
    on_cpu = compiled_on_cpu.n_kernels
    ptx = launch.cached_ptx(kernel, (9, 0))
    assert (launch.compiled.n_kernels, compiled_on_cpu.n_kernels) == (1, on_cpu) and launch.compiled.seconds > 0  # counted once

    def compiles(kernel, cc):
        raise InterruptedError("compiles")
    monkeypatch.setattr(launch, "compile_ptx", compiles)
    assert launch.cached_ptx(kernel, (9, 0)) == ptx and launch.compiled.n_kernels == 1
    for other in ((kernel, (8, 0)), (replace(kernel, n_threads=64), (9, 0)), (replace(kernel, name="take"), (9, 0))):
        with pytest.raises(InterruptedError):
            launch.cached_ptx(*other)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty folder for compiled kernels, of this process and its workers; what this process compiles is counted anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(launch, "compiled", Compiled())
    return tmp_path


def test_workers(cache):
    """They leave what this process then finds, and what they cannot make to it."""
    kernels = [KERNELS[name][0](*KERNELS[name][1]) for name in ("take_rows", "scale", "binary[add]")]
    compile_workers.compile_all(kernels, (9, 0), 2)
    assert all(f".entry {entry_name(launch.cached_ptx(kernel, (9, 0)))}(" in launch.ptx_path(kernel, (9, 0)).read_text() for kernel in kernels)
    assert launch.compiled.n_kernels == 0
    compile_workers.compile_all([replace(kernels[0], source=(kernels[0].source[0], "none_such", ())), kernels[0]], (8, 0), 1)
    assert launch.ptx_path(kernels[0], (8, 0)).exists()  # behind one that is not there


def test_every_kernel_can_be_made_by_a_worker():
    for make, args in KERNELS.values():
        module, factory, given = pickle.loads(pickle.dumps(make(*args).source))
        assert getattr(import_module(module), factory)(*given) is make(*args)


@pytest.mark.parametrize("n_kernels, n_cores, expected", [(1, 16, 0), (3, 16, 0), (4, 16, 4), (40, 16, 8), (40, 2, 2), (40, 1, 0)])
def test_number_of_workers(n_kernels, n_cores, expected, monkeypatch, tmp_path):
    monkeypatch.setattr(compile_workers.os, "sched_getaffinity", lambda pid: range(n_cores), raising=False)
    assert compile_workers.n_workers(n_kernels, tmp_path / "new") == expected
    (tmp_path / "file").write_text("")
    assert compile_workers.n_workers(n_kernels, tmp_path / "file" / "folder") == 0  # what workers compile could not be kept


def test_workers_end_where_there_are_none(monkeypatch, cache):
    monkeypatch.setattr(compile_workers.sys, "executable", "/bin/false")
    kernel = KERNELS["scale"][0]()
    compile_workers.compile_all([kernel] * 3, (9, 0), 2)
    assert not launch.ptx_path(kernel, (9, 0)).exists()


def test_launches_load_together(cache, monkeypatch):
    """The first call of a launch loads the kernels of all, compiled by workers where there are several; shared memory is allowed when it is known how much. A
    kernel that cannot be compiled is told by its own launch."""
    loaded, allowed, launched = [], [], []
    handles = {}

    class ObjectCode:
        @classmethod
        def from_ptx(cls, ptx):
            loaded.append(entry_name(ptx.decode()))
            return SimpleNamespace(get_kernel=lambda name: handles.setdefault(name, object()))
    monkeypatch.setattr(launch, "ObjectCode", ObjectCode)
    monkeypatch.setattr(launch, "LaunchConfig", lambda **given: given)
    monkeypatch.setattr(launch, "launch", lambda stream, config, handle, *args: launched.append(handle))
    monkeypatch.setattr(launch, "n_workers", lambda n, folder: min(n, 2) if n > 1 else 0)
    target = object.__new__(launch.Target)
    target.cc, target._codes, target._waiting = (9, 0), {}, []
    target._allow_shared = lambda handle, n_bytes: allowed.append(n_bytes)
    scale, binary = KERNELS["scale"][0](), KERNELS["binary[add]"][0]("add")
    first, same = (target.launch(scale, 1, 256, (0, 0, n, 2.0), shared) for n, shared in ((1, 64 << 10), (2, 60 << 10)))
    other = target.launch(binary, 1, 256, (0, 0, 0, 1, 1))

    def broken(x):
        intrinsics.st(x, 0, 0.5)
    bad = target.launch(Kernel(broken, (F32,), 32, name="broken"), 1, 32, (0,))
    assert first.name == "scale" and not loaded
    first(None)
    assert len(loaded) == 2 and launch.compiled.n_kernels == 2 and allowed == [64 << 10]
    for _ in range(2):
        with pytest.raises(Exception, match="ptx.st: expected float32, got float64"):
            bad(None)
    same(None), other(None)
    assert len(loaded) == 2 and len(launched) == 3 and launched[0] is launched[1] is not launched[2]
    more = target.launch(scale, 1, 256, (0, 0, 3, 2.0), 80 << 10)
    assert allowed == [64 << 10, 80 << 10] and more.code is first.code


def test_ptx_version():
    assert ptx_version("//\n.version 9.0\n.target sm_80\n") == (9, 0)
