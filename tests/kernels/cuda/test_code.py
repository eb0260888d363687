"""The code of every registered CUDA kernel, compiled without a GPU: our own float operations, nothing approximate or atomic, no
spills, and no memory touched before the kernel that may write it has ended."""
import gc
import os
import pickle
import re
import threading
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from multiprocessing import get_context
from types import SimpleNamespace

import pytest

numba_cuda = pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
from numba import cuda

from ggml_py.backends import cuda as cuda_backend, open_backend
from ggml_py.base.errors import ParameterError
from ggml_py.kernels import disk_cache
from ggml_py.kernels.disk_cache import Compiled, compiled as compiled_on_cpu
from ggml_py.kernels.cuda import compile_workers, launch, mbarrier, ptx as intrinsics
from ggml_py.kernels.cuda.launch import F32, SCALAR_F32, U32, Kernel, arguments, cached_ptx, compile_ptx, entry_name, ptx_version
from ggml_py.quant.alike import first_alike
from cuda_code import (COMPUTE_CAPABILITIES, KERNELS, LAUNCH, PER_PROCESS, REPRESENTATIVE, assembled, check_kernel, first_cases,
                       overlap_violations, statements, violations)
from damages import DAMAGES


FIRST = first_cases()


def test_nvvm_says_its_release():
    """As in the PTX of any kernel: that of the toolkit."""
    header = re.search(r"release (\d+\.\d+), V(\S+)",
                       compile_ptx(KERNELS[REPRESENTATIVE[0]][0](*KERNELS[REPRESENTATIVE[0]][1]), (9, 0)))
    assert launch.nvvm_release() == header[2] and header[2].startswith(header[1])


@pytest.fixture(scope="module")
def process():
    """Where kernels are compiled, a new process after so many: numba frees nothing of what it has compiled, so there is no
    garbage to look for either, which took a quarter of the time."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=gc.disable, max_tasks_per_child=PER_PROCESS) as process:
        yield process


CASES = [(name, cc) for name, (make, args) in KERNELS.items() for cc in COMPUTE_CAPABILITIES
         if cc == (9, 0) or (name in REPRESENTATIVE and not make(*args).arch)]


# All compute capabilities of a kernel one after the other: each further one takes an eighth of the first one's time
@pytest.mark.parametrize("name, cc", [pytest.param(name, cc, marks=() if name in FIRST and cc == (9, 0) else pytest.mark.slow)
                                      for name, cc in CASES], ids=str)
def test_kernel(name, cc, process, tmp_path):
    process.submit(check_kernel, name, cc, tmp_path).result()


@pytest.mark.slow
def test_products_of_warpgroups_are_not_held_up(tmp_path):
    """ptxas warns where it lets no product run beside other work, and where it gives no warpgroup registers of others."""
    for name in ("mmq[Q8_0, 2, 1, 16, True, 3, 2, 2, 2, 4]", "mmq[Q8_0, 4, 1, 16, True, 3, 1, 1, 1, 4]",
                 "mmq[Q4_K, 4, 1, 16, True, 3, 1, 1, 1, 4]", "mmq[Q8_0, 2, 2, 8, True, 3, 1, 1, 1, 4]",
                 "mmq[Q8_0, 2, 1, 8, True, 5, 4, 2, 1, 4]", "mmq[IQ4_XS, 2, 1, 16, True, 3, 2, 2, 2, 4]",
                 "mmq[Q6_0, 2, 1, 8, True, 6, 3, 1, 1, 4]", "mmq_qkv[Q4_K, Q4_K, Q6_K, 2, 1, 16, True, 3, 2, 2, 2, 4]",
                 "mmq_half[Q4_K, False, 4, 1, 16, True, 2, 1, 1, 1, 0]", "mmq_half[Q4_K, False, 4, 1, 8, True, 3, 1, 1, 1, 0]",
                 "mmq_half[Q4_K, False, 4, 1, 4, True, 3, 1, 1, 1, 0]", "mmq_half[Q4_K, False, 4, 1, 8, True, 2, 2, 2, 2, 0]",
                 "mmq_half[Q4_K, False, 4, 1, 32, True, 1, 1, 1, 1, 0]",
                 "mmq_half[Q5_K, False, 4, 1, 16, True, 2, 1, 1, 1, 0]", "mmq_half[Q5_K, False, 4, 1, 8, True, 2, 2, 2, 2, 0]",
                 "mmq_half[Q5_K, False, 4, 1, 32, True, 1, 1, 1, 1, 0]", "mmq_half[IQ5_K, False, 4, 1, 32, True, 1, 1, 1, 1, 0]",
                 "mmq_half[Q6_K, False, 4, 1, 32, True, 1, 1, 1, 1, 0]", "mmq_half[IQ2_KT, True, 6, 1, 12, True, 2, 1, 1, 1, 0]",
                 "mmq_half[Q5_K, True, 6, 1, 8, True, 3, 1, 1, 1, 0]", "mmq_half[Q5_K, True, 6, 1, 12, True, 2, 1, 1, 1, 0]",
                 "mmq_half_glu[silu, Q5_K, False, 0.0, 0.0, 6, 1, 12, True, 2, 1, 1, 1, 0]",
                 "mmq_half[MXFP4, False, 4, 1, 16, True, 2, 1, 1, 1, 0]", "mmq_half[MXFP4, False, 4, 1, 32, True, 1, 1, 1, 1, 0]",
                 "mmq_half[Q5_1, False, 4, 1, 16, True, 2, 1, 1, 1, 0]", "mmq_half[Q5_1, False, 4, 1, 8, True, 2, 2, 2, 2, 0]",
                 "mmq_half[NVFP4, False, 4, 1, 8, True, 2, 2, 2, 2, 0]", "mmq_half[MXFP4, True, 6, 1, 12, True, 2, 1, 1, 1, 0]",
                 "mmq_half[Q4_K, True, 6, 1, 8, True, 3, 1, 1, 1, 0]", "mmq_half[Q4_K, True, 6, 1, 12, True, 2, 1, 1, 1, 0]",
                 "mmq_half_glu[silu, Q4_K, False, 0.0, 0.0, 6, 1, 8, True, 3, 1, 1, 1, 0]",
                 "mmq_half_glu[silu, Q4_K, False, 0.0, 0.0, 6, 1, 12, True, 2, 1, 1, 1, 0]",
                 "mmq_id[Q4_K, False, 2, 1, 4, True, 3, 1, 1, 1, 0]", "mmq_id[Q8_0, False, 2, 1, 12, True, 2, 1, 1, 1, 0]",
                 "flash_attn_ext_group[128, 128, 4]",
                 "mmq_glu[silu, Q8_0, Q8_0, False, 4, 1, 16, True, 3, 1, 1, 1, 0]",
                 "mmq_id_glu[swiglu_oai, MXFP4, MXFP4, True, 1.702, 7.0, 2, 1, 8, True, 2, 1, 1, 1, 0]"):
        make, args = KERNELS[name]
        report = assembled(cached_ptx(make(*args), (9, 0)), (9, 0, "a"), tmp_path)
        assert "serialized" not in report and "ignored" not in report, report


def test_kernels_of_one_architecture():
    make, args = KERNELS["mmq[Q8_0, 4, 1, 16, True, 3, 1, 1, 1, 4]"]
    with pytest.raises(ValueError,
                       match=r"mmq\[Q8_0, 4, 1, 16, True, 3, 1, 1, 1, 4\]: compute capability is \(8, 0\), allowed: \(9, 0\)"):
        compile_ptx(make(*args), (8, 0))


# The checks themselves, the intrinsics and the launch values

def compiled(function, *parameters):
    return compile_ptx(Kernel(function, parameters, 32, name=function.__name__), (8, 0))


def test_hidden_words_are_not_known():
    word = intrinsics.hidden((0x12345678,))

    def kernel(y):
        y[0] = word(0)
    assert re.search(rf"\badd\.s32\s+%r\d+, %r\d+, {0x12345678 - 32};", compiled(kernel, U32))


def test_contracted_operations_are_seen():
    def contracted(x, y):
        y[0] = x[0] * x[1] + x[2]

    def wide(x, y):
        y[0] = x[0] * 0.5

    def approximate(x, y):
        cuda.atomic.add(y, 0, x[0])
    for function in (contracted, wide):
        for of_float64 in False, True:
            assert violations(compiled(function, F32, F32), of_float64), function.__name__
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

    def settled(ids, words, y, n):
        value = intrinsics.ldc(words, intrinsics.ld_settled(ids, n))
        intrinsics.wait_for_previous()
        intrinsics.st(y, 0, value)

    def through_a_cache(ids, words, y, n):
        value = intrinsics.ldc(words, intrinsics.ld(ids, n))
        intrinsics.wait_for_previous()
        intrinsics.st(y, 0, value)

    def another_settled(x, words, y, n):
        value = intrinsics.ld_settled(x, n)
        intrinsics.wait_for_previous()
        intrinsics.st(y, value, intrinsics.ld(words, n))

    @intrinsics.stage
    def bring(source, y, n):
        shared = cuda.shared.array(8, intrinsics.u32)
        mbarrier.begin(shared, 0, intrinsics.i32(1))
        mbarrier.expect(shared, 0, intrinsics.i32(16))
        mbarrier.bring(shared, 4, source, n, intrinsics.i32(4), 0)
        intrinsics.wait_for_previous()
        mbarrier.wait(shared, 0, intrinsics.i32(0))
        intrinsics.st(y, 0, intrinsics.as_f32(intrinsics.lds(shared, 4)))

    def brought(x, words, y, n):
        bring(words, y, n)

    def brought_early(x, words, y, n):
        bring(x, y, n)
    found = {}
    for function in (early, constant, some, weights, asked, activations, settled, through_a_cache, another_settled, brought,
                     brought_early):
        first = launch.I32 if "settled" in function.__name__ or function is through_a_cache else F32
        kernel = Kernel(function, (first, F32, F32, launch.N), 32, name=function.__name__)
        found[function.__name__] = overlap_violations(kernel, compile_ptx(kernel, (9, 0)), (9, 0))
        assert not overlap_violations(kernel, compile_ptx(kernel, (8, 0)), (8, 0))
    wrong = {"early", "constant", "some", "through_a_cache", "another_settled", "brought_early"}
    assert {name for name, lines in found.items() if lines} == wrong, found
    assert len(found["early"]) >= 2


def test_a_start_of_the_next_kernel_elsewhere_is_seen():
    """At once and small alone, behind each wait, and nowhere else; in kernels of clusters behind each wait."""
    def weights(x, words, y, n):
        value = intrinsics.ldc(words, n)
        intrinsics.wait_for_previous()
        intrinsics.st(y, 0, intrinsics.add(value, intrinsics.ld(x, n)))
    kernel = Kernel(weights, (F32, F32, F32, launch.N), 32, name="weights")
    ptx = compile_ptx(kernel, (9, 0))
    assert ptx.count(f"@%small {LAUNCH};") == 1 and ptx.count(f"\t{LAUNCH};") == 1
    assert not overlap_violations(kernel, ptx, (9, 0))
    for changed in (ptx.replace(f"@%small {LAUNCH};", ""), ptx.replace(f"@%small {LAUNCH}", LAUNCH),
                    ptx.replace(f"\t{LAUNCH};", ""), ptx.replace("\tret;", f"\t{LAUNCH};\n\tret;")):
        assert changed != ptx and overlap_violations(kernel, changed, (9, 0)), changed
    cluster = Kernel(weights, (F32, F32, F32, launch.N), 32, n_cluster=2, name="cluster")
    late = compile_ptx(cluster, (9, 0))
    assert late.count(LAUNCH) == 1 and not overlap_violations(cluster, late, (9, 0)) and overlap_violations(cluster, ptx, (9, 0))


def test_a_stage_has_no_code_of_its_own():
    """What a function is compiled to does not change where it is cut at a stage; at a device function it may."""
    i32, st, zero = intrinsics.i32, intrinsics.st, intrinsics.f32(0)

    def store(y, now, tid):
        lane, warp = i32(tid & 31), i32(tid >> 5)
        first = i32(now + warp * 96 + lane)
        for o in range(3):
            st(y, first + 32 * o, zero)

    def whole(x, y, n):
        tid, now = i32(cuda.threadIdx.x), i32(8)
        for _ in range(n):
            st(x, now, zero)
            now = i32(now + 24 if now < 80 else 8)
        lane, warp = i32(tid & 31), i32(tid >> 5)
        first = i32(now + warp * 96 + lane)
        for o in range(3):
            st(y, first + 32 * o, zero)

    def cut(kind):
        part = kind(store)

        def function(x, y, n):
            tid, now = i32(cuda.threadIdx.x), i32(8)
            for _ in range(n):
                st(x, now, zero)
                now = i32(now + 24 if now < 80 else 8)
            part(y, now, tid)
        return function
    codes = [[re.sub(r"\w+(?=_param_)", "", s) for s in statements(compiled(function, F32, F32, launch.N))]
             for function in (whole, cut(intrinsics.stage), cut(intrinsics.device))]
    assert codes[0] == codes[1] != codes[2]


def test_of_functions_that_are_alike_one_is_compiled():
    """Also where those that they close over were made anew; not where values, types or defaults differ, or have shared memory."""
    def made(n, scale, shared=False, default=1):
        @intrinsics.device
        def inner(x, m=default):
            return i32(x + n + m)

        @intrinsics.device
        def outer(x):
            return i32(inner(x) + scale[0])

        @intrinsics.device
        def with_memory(x):
            s = cuda.shared.array(32, intrinsics.types.int32)
            s[x] = x
            return i32(s[0] + inner(x))
        return with_memory if shared else outer

    i32 = intrinsics.i32
    code = [made(1, (2, 5)), made(1, (2, 5)), made(1, (2, 6)), made(1, (2.0, 5)), made(True, (2, 5)), made(3, (2, 5)),
            made(1, (2, 5), default=2), made(1, (2, 5), True), made(1, (2, 5), True), made(1, [2]), made(1, [2])]
    compiled_functions = [each.compile_device((intrinsics.types.int32,)) for each in code[:9]]
    assert compiled_functions[0] is compiled_functions[1] and len(set(map(id, compiled_functions))) == 8
    assert len({first_alike(each.py_func) for each in code}) == 10


def test_a_kernel_has_one_code_whatever_was_compiled_before(cache):
    """In this process, where functions of other kernels are there, and in a new one."""
    make, args = KERNELS["mmq_few[Q4_1, 1]"]
    for other in ("mmq_few[Q4_1, 4]", "mmq_few[Q5_1, 1]"):
        compile_ptx(KERNELS[other][0](*KERNELS[other][1]), (9, 0))

    def code(ptx):
        return re.sub(r"\$\d+\b|(?<=smem_)\d+", "", ptx.replace(entry_name(ptx), "").split(".entry", 1)[1])
    with closing(compile_workers.Workers(1)) as workers:
        assert [kernel.name for kernel in workers.compile([make(*args)], (9, 0))] == ["mmq_few[Q4_1, 1]"]
    assert code(launch.kept_ptx(make(*args), (9, 0))) == code(compile_ptx(make(*args), (9, 0)))


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
    """The second process of a kernel reads what the first one wrote; another compute capability or kernel of the same name
    compiles. What compiles is counted."""
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


def compile_with(kernels, n, cc=(9, 0)):
    """What n workers give of them."""
    with closing(compile_workers.Workers(n)) as workers:
        return list(workers.compile(kernels, cc))


def test_workers(cache):
    """They leave what this process then finds, and what they cannot make to it."""
    kernels = [KERNELS[name][0](*KERNELS[name][1]) for name in ("take_rows", "by_number[scale]", "binary[add]")]
    done = compile_with(kernels, 2)
    for kernel in kernels:
        assert f".entry {entry_name(launch.cached_ptx(kernel, (9, 0)))}(" in launch.kept_ptx(kernel, (9, 0))
    assert launch.compiled.n_kernels == 0 and sorted(done, key=kernels.index) == kernels
    missing = replace(kernels[0], source=(kernels[0].source[0], "none_such", ()))
    assert compile_with([missing, kernels[0]], 1, (8, 0)) == kernels[:1]  # behind one that is not there
    assert launch.kept_ptx(kernels[0], (8, 0))


def test_the_longest_kernels_are_compiled_first(monkeypatch):
    """By the byte code of all that they call."""
    kernels = [KERNELS[name][0](*KERNELS[name][1]) for name in ("take_rows", "quantize", "mmq_few[Q4_1, 1]", "mmq_few[Q4_1, 8]")]
    lengths = [compile_workers.length(kernel.function) for kernel in kernels]
    assert lengths == sorted(lengths) and 20 * lengths[0] < lengths[-1]
    handed = []
    monkeypatch.setattr(compile_workers, "_feed", lambda worker, wanted, cc, answers: (
        handed.extend(wanted.get() for _ in kernels), answers.put(None)))
    workers = object.__new__(compile_workers.Workers)
    workers.processes = [None]
    assert not [*workers.compile(kernels, (9, 0))] and handed == kernels[::-1]


def test_workers_are_expected_once_and_only_for_an_empty_cache(cache, monkeypatch):
    """The next load of any GPU takes those that were started before the model was read; closing ends those that none took."""
    class Workers:
        def __init__(self, n):
            self.n, self.is_closed = n, False
            made.append(self)

        def compile(self, kernels, cc):
            yield from kernels

        def close(self):
            self.is_closed = True
    made, target, other = [], object.__new__(launch.Target), object.__new__(launch.Target)
    monkeypatch.setattr(launch, "Workers", Workers)
    monkeypatch.setattr(launch, "n_workers", lambda n, folder: n)
    for each in (target, other):
        each.cc = (9, 0)
        launch.expect()
    assert [workers.n for workers in made] == [compile_workers.MOST_WORKERS] and not made[0].is_closed
    assert [*other._compiled_elsewhere(["a kernel"])] == ["a kernel"] and made[0].is_closed and len(made) == 1
    assert [*other._compiled_elsewhere(["a", "b"])] == ["a", "b"] and [workers.n for workers in made[1:]] == [2]
    launch.expect()
    target.close(), target.close()
    assert len(made) == 3 and made[2].is_closed and not launch.started
    path, key = launch.ptx_entry(KERNELS["take_rows"][0](), (9, 0))
    disk_cache.write_entry(path, key, b"code")
    launch.expect()
    assert len(made) == 3


def test_workers_are_expected_before_the_gpu_is_opened(monkeypatch):
    """Only of a backend that a model will be put on; they end if the GPU cannot be opened."""
    calls = []

    def no_gpu(ordinal):
        calls.append("open")
        raise RuntimeError("no such GPU")
    monkeypatch.setattr(launch, "expect", lambda: calls.append("expect"))
    monkeypatch.setattr(launch, "dismiss", lambda: calls.append("dismiss"))
    monkeypatch.setattr(launch, "Target", no_gpu)
    monkeypatch.setattr(cuda_backend, "unavailable", lambda ordinal: None)
    for expected in (True, False):
        with pytest.raises(ParameterError, match="no such GPU"):
            open_backend("cuda:0", expect=expected)
    assert calls == ["expect", "open", "dismiss", "open", "dismiss"]


@pytest.mark.parametrize("alone", [False, True])
def test_kernels_are_loaded_by_several_threads(alone, cache, monkeypatch):
    """What the cache has, what workers bring and what they leave; one that is refused keeps nothing from the others."""
    kernels = [KERNELS[name][0](*KERNELS[name][1]) for name in ("take_rows", "by_number[scale]", "binary[add]", "quantize")]
    ptx = launch.cached_ptx(kernels[0], (9, 0))
    target, loaded = object.__new__(launch.Target), {}
    target.cc, target.device, target._waiting = (9, 0), SimpleNamespace(set_current=lambda: None), []

    def brought(wanted):
        assert wanted == kernels[1:]
        yield from wanted[:2]

    def load(code, ptx=None):
        if code.kernel is kernels[1]:
            raise RuntimeError("refused")
        loaded[code.kernel] = ptx, threading.current_thread() is threading.main_thread()
        code.handle = object()
    target._compiled_elsewhere, target._load = brought, load
    codes = [launch.Code(kernel, None) for kernel in kernels]
    target._waiting = [*codes]
    target.load(alone)
    assert loaded == {kernels[0]: (ptx, False), kernels[2]: (None, alone), kernels[3]: (None, True)}
    assert codes[1].handle is None and not target._waiting


def test_workers_end_where_nothing_can_be_kept(cache, monkeypatch):
    """The process that wants the kernels compiles them itself then, and says so."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    kernel = KERNELS["by_number[scale]"][0]("scale")
    assert not compile_with([kernel] * 20, 1) and launch.kept_ptx(kernel, (9, 0)) is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_entry_is_replaced(damage, cache, monkeypatch):
    """Compiled anew, with the same PTX; workers and `Target.load` do not take it for one that is there."""
    monkeypatch.setattr(disk_cache, "compiled", launch.compiled)
    kernel, (change, said) = KERNELS["by_number[scale]"][0]("scale"), DAMAGES[damage]
    code = lambda ptx: re.sub(r"kernelB\d+v\d+B", "kernel", ptx)  # numba numbers what it compiles in a process
    ptx = launch.cached_ptx(kernel, (9, 0))
    path, _ = launch.ptx_entry(kernel, (9, 0))
    path.write_bytes(change(path.read_bytes()))
    assert launch.kept_ptx(kernel, (9, 0)) is None and launch.compiled.rejected == {path: said}
    mended = launch.cached_ptx(kernel, (9, 0))
    assert code(mended) == code(ptx) and launch.compiled.n_kernels == 2
    assert launch.kept_ptx(kernel, (9, 0)) == launch.cached_ptx(kernel, (9, 0)) == mended and launch.compiled.n_kernels == 2


def test_a_cache_that_cannot_be_written(cache, monkeypatch, caplog):
    monkeypatch.setattr(disk_cache, "compiled", launch.compiled)
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    kernels = [KERNELS[name][0](*KERNELS[name][1]) for name in ("by_number[scale]", "binary[add]")]
    assert all(".entry" in launch.cached_ptx(kernel, (9, 0)) for kernel in kernels) and launch.compiled.n_kernels == 2
    assert len(caplog.messages) == 1 and "cannot be written to" in caplog.messages[0]


def test_every_kernel_can_be_made_by_a_worker():
    for make, args in KERNELS.values():
        module, factory, given = pickle.loads(pickle.dumps(make(*args).source))
        assert getattr(import_module(module), factory)(*given) is make(*args)


@pytest.mark.parametrize("n_kernels, n_cores, expected",
                         [(1, 16, 0), (2, 16, 2), (4, 16, 4), (40, 16, 8), (40, 2, 2), (40, 1, 0)])
def test_number_of_workers(n_kernels, n_cores, expected, monkeypatch, tmp_path):
    monkeypatch.setattr(compile_workers.os, "sched_getaffinity", lambda pid: range(n_cores), raising=False)
    assert compile_workers.n_workers(n_kernels, tmp_path / "new") == expected
    (tmp_path / "file").write_text("")
    assert compile_workers.n_workers(n_kernels, tmp_path / "file" / "folder") == 0  # what workers compile could not be kept


def test_workers_end_where_there_are_none(monkeypatch, cache):
    monkeypatch.setattr(compile_workers.sys, "executable", "/bin/false")
    kernel = KERNELS["by_number[scale]"][0]("scale")
    assert not compile_with([kernel] * 3, 2) and launch.kept_ptx(kernel, (9, 0)) is None


def test_a_grid_of_clusters(monkeypatch):
    """Its first dimension, in which the blocks of a cluster are next to each other, counts clusters."""
    monkeypatch.setattr(launch, "LaunchConfig", lambda **given: given)
    target = object.__new__(launch.Target)
    target.cc, target._codes, target._waiting = (9, 0), {}, []

    def config(n_cluster, grid):
        given = target.launch(Kernel(lambda: None, (), 32, n_cluster=n_cluster, name="kernel"), grid, 32, ()).config
        return given["grid"], given["cluster"]
    assert config(1, (6, 5)) == ((6, 5), None) and config(2, (6, 5)) == ((3, 5), 2) and config(16, 32) == ((2,), 16)


def test_launches_load_together(cache, monkeypatch):
    """The first call of a launch loads the kernels of all, compiled by workers where there are several; shared memory is allowed
    when it is known how much. A kernel that cannot be compiled is told by its own launch."""
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
    target.cc, target.device, target._codes, target._waiting = (9, 0), SimpleNamespace(set_current=lambda: None), {}, []
    target._allow_shared = lambda handle, n_bytes: allowed.append(n_bytes)
    scale, binary = KERNELS["by_number[scale]"][0]("scale"), KERNELS["binary[add]"][0]("add")
    first, same = (target.launch(scale, 1, 256, (0, 0, n, 2.0), shared) for n, shared in ((1, 64 << 10), (2, 60 << 10)))
    other = target.launch(binary, 1, 256, (0, 0, 0, 1, 1))

    def broken(x):
        intrinsics.st(x, 0, 0.5)
    bad = target.launch(Kernel(broken, (F32,), 32, name="broken"), 1, 32, (0,))
    assert first.name == "by_number[scale]" and not loaded
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
