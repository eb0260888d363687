"""Every registered CUDA kernel, and the rules of its code: our own float operations, nothing approximate or atomic, no spills,
and no memory touched before the kernel that may write it has ended."""
import re
import shutil
import subprocess
from functools import lru_cache
from importlib import import_module
from inspect import signature
from itertools import pairwise
from pathlib import Path
from pkgutil import iter_modules
from unittest import SkipTest

from ggml_py.kernels import cuda as kernels_cuda
from ggml_py.kernels.cuda import ptx as intrinsics
from ggml_py.kernels.cuda.launch import FACTORIES, OVERLAPPING, Kernel, cached_ptx, entry_name

for module in iter_modules(kernels_cuda.__path__):
    if module.name != "simulator":
        import_module(f"{kernels_cuda.__name__}.{module.name}")

KERNELS = {make(*args).name: (make, args) for make, cases in FACTORIES.items() for args in cases}
# in the same order in every process
REPRESENTATIVE = [make(*args).name for make, cases in FACTORIES.items() for args in dict.fromkeys((cases[0], cases[-1]))]
COMPUTE_CAPABILITIES = [(8, 0), (9, 0), (10, 0), (12, 0)]
PER_PROCESS = 50  # kernels compiled, of which numba keeps 20 MB and more each as long as a process lives


def first_cases() -> set[str]:
    """A kernel of every factory, and of those that have a quick one for every format, one for each."""
    of_formats = {"dequantize_kernel", "get_rows_kernel", "mmq_few_kernel"}
    return {make(*args).name for make, cases in FACTORIES.items()
            for args in ({args[0]: args for args in reversed(cases)}.values() if make.__name__ in of_formats else cases[:1])}


ASSEMBLY = re.compile(r"// begin inline asm\n(.*?)// end inline asm", re.DOTALL)
FLOAT_OPERATION = re.compile(
    r"\b(add|sub|mul|mad|fma|div|rcp|sqrt|rsqrt|ex2|lg2|sin|cos|tanh|cvt)\.[\w.:]*\b(f16|bf16|f32|tf32|f64)(x2)?\b")
FORBIDDEN = re.compile(r"\batom\b|\bred\.|\.approx|\.full\b|\.ftz|\.local\b|\bcall\b|\.func\b")
FLOAT64 = re.compile(r"\.f64|\b0[dD][0-9a-fA-F]{16}\b")
OF_FLOAT64 = {"draw_first", "draw_further", "draw_last"}  # kernels of what docs/numerics.md defines in float64
ROUNDED = re.compile(r"\.(rn|rni)\b|\bcvt\.f32\.(f16|bf16)\b|\bcvt\.f64\.f32\b")  # widening is exact


def violations(ptx: str, of_float64: bool = False) -> list[str]:
    """Lines of a PTX that break the rules of kernels: no atomics, approximations, calls or local memory anywhere, and no float64
    but in some; every float operation inside our assembly and rounded to nearest."""
    own = [line.strip() for body in ASSEMBLY.findall(ptx) for line in body.splitlines()]
    compiled = ASSEMBLY.sub("", ptx).splitlines()
    return ([line.strip() for line in ptx.splitlines()
             if FORBIDDEN.search(line) or (FLOAT64.search(line) and not of_float64)]
            + [line.strip() for line in compiled if FLOAT_OPERATION.search(line)]
            + [line for line in own for part in line.split(";") if FLOAT_OPERATION.search(part) and not ROUNDED.search(part)])


LAUNCH, WAIT = "griddepcontrol.launch_dependents", "griddepcontrol.wait"
# Parameters of kernels that wait where they say: what only copies write
WEIGHTS = {"words", "bias", "gate_words", "up_words", "down_words", "q_words", "k_words", "v_words", "o_words", "gate_bias",
           "up_bias", "q_bias", "k_bias", "v_bias", "w", "att_norm", "sinks", "pos", "seq", "cells", "rope_table", "q_norm",
           "k_norm", "receivers"}
SETTLED = {"ids"}  # what launches read early where it is settled
GLOBAL = re.compile(r"\b(ld|st|prefetch)(\.\w+)*\.global|\bcp\.async\.(c[ag]\b|bulk)")


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
    names = [name if isinstance(t, intrinsics.types.CPointer) else None
             for name, t in zip(signature(kernel.function).parameters, kernel.parameters)]
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
    """Accesses of global memory that another kernel may write or read, and ends of the kernel, before the wait; loads of
    constants count wherever they are. Waits that do not let the next kernel start, and what else lets it: nothing in a kernel of
    clusters, else a start at once of small launches."""
    if cc < OVERLAPPING:
        return re.findall("griddepcontrol.*", ptx)
    code = statements(ptx)
    early, of = before_wait(code), pointers(kernel, code)

    def address(s):  # of a bulk copy, [to], [from], bytes, [barrier], the second one
        return of(re.findall(r"\[(%\w+)", s)[1 if "bulk" in s else -1])
    starts, allowed = [s for s in early if LAUNCH in s], [f"@%small {LAUNCH}"] * (kernel.n_cluster == 1)
    settled = [s for s in early if "ld.relaxed.gpu.global" in s]
    read = ([s for s in early if re.search(r"\bcp\.async\.(c[ag]\b|bulk)|\bld\.global\b", s)]
            + [s for s in code if ".global.nc" in s])
    return ([s for s in early if (GLOBAL.search(s) and s not in read + settled) or s.startswith("ret")]
            + [f"before the wait: {starts}"] * (starts != allowed)
            + [s for s, behind in pairwise(code) if s.startswith(WAIT) != (behind == LAUNCH)]
            # tables of the kernel's own come from no parameter, weights by an index from settled ones too
            + [s for s in read if address(s) - SETTLED - WEIGHTS or (address(s) and not address(s) & WEIGHTS)]
            + [s for s in settled if not address(s) <= SETTLED])


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
        raise SkipTest("no ptxas: nvidia-cuda-nvcc is not installed")  # pytest's own exception is lost between processes
    source = tmp_path / "kernel.ptx"
    source.write_text(ptx)
    command = [ptxas(), "-v", f"-arch={architecture(cc)}", "-o", tmp_path / "kernel.cubin", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def check_kernel(name, cc, tmp_path):
    """Of the code as a GPU would get it: from the disk cache, which any change of sources or compilers empties, else compiled."""
    make, args = KERNELS[name]
    kernel = make(*args)
    ptx, cc = cached_ptx(kernel, cc), kernel.arch or cc
    assert f".target {architecture(cc)}\n" in ptx
    assert not violations(ptx, name in OF_FLOAT64)
    assert not overlap_violations(kernel, ptx, cc[:2])
    assert set(re.findall(r"(?:extern )?\.shared \.align \d+", ptx)) <= {".shared .align 16", "extern .shared .align 1024"}
    assert entry_name(ptx)
    report = assembled(ptx, cc, tmp_path)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report, report


