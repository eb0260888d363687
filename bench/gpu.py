"""Times the CUDA kernels and writes a record: python bench/gpu.py --out bench/results/NAME.json [--only mmvq,mmq,...] [--types Q4_K,...]

One line a case: kernel, type, sizes, median us, bytes, GB/s (1 GB = 1e9 bytes), share of a device-to-device copy measured in the same run.
Kernels are compiled before, by a process for each core; a second run finds them on disk.
"""
import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Callable, NamedTuple

import checkout  # noqa: F401
import numpy as np

from figures import EXPERTS, K, M, MUL_MAT_ID, Row, limits, verdict
from ggml_py.quant.formats import FORMATS, format_of
from ggml_py.quant.tile import ROWS, Tiling
from gpu_timing import DryRun, GPU, copies_of, random_floats, random_weights
from random_weights import random_weight
from records import conditions, dump
from weights import random_tiles

WEIGHTS = [fmt.name for fmt in FORMATS.values() if fmt.planes]
QUANTIZED = [name for name in WEIGHTS if FORMATS[name].is_quantized]
CACHES = "f16", "q8_0", "f32"
N_HEAD, N_HEAD_KV, HEAD = 32, 8, 128  # of attention: an 8B model


@dataclass(frozen=True)
class Case:
    kernel: str
    type: str
    sizes: dict[str, int]
    cache: str = "cold"


class Work(NamedTuple):
    """One round of launches, and what each of them reads and writes and computes."""
    launches: list[Callable]
    n_bytes: int
    n_ops: int = 0


# Cases by suite

def mmvq():
    def case(type_, m, k, n=1, cache="cold"):
        return Case("mmvq", type_, dict(m=m, k=k, n=n), cache)
    yield from (case(name, M, K, cache=cache) for name in WEIGHTS for cache in ("cold", "hot"))
    yield from (case(name, M, K, n) for name in ("Q4_K", "Q8_0") for n in (2, 4, 8, 16, 32, 64, 128))
    yield from (case(name, 128256, 4096) for name in ("Q8_0", "Q6_K", "Q4_K"))
    yield from (case(name, m, 4096) for name in ("Q8_0", "Q4_K") for m in (4096, 14336))
    yield from (case("Q4_1", m, k) for m, k in ((576, 576), (1536, 576), (576, 1536), (192, 576)))  # SmolLM2-135M
    yield from (case("F32", 128, 2048, n) for n in (1, 512))  # Qwen3-30B-A3B's routers


def mmq():
    for name in QUANTIZED:
        for n in (512, 2048, 4096) if name in ("Q8_0", "Q4_K", "Q6_K") else (512,):
            yield from (Case(kernel, name, dict(m=M, k=K, n=n)) for kernel in ("mmq", "quantize + mmq"))


def mul_mat_glu():
    yield from (Case("mul_mat_glu", name, dict(m=14336, k=4096, n=n)) for name in ("Q4_K", "Q8_0") for n in (1, 8, 512))
    yield Case("mul_mat_glu", "Q4_1", dict(m=1536, k=576, n=1))  # SmolLM2-135M


def mul_mat_qkv():
    """m rows of Q, m_kv of K and of V."""
    yield from (Case("mul_mat_qkv", name, dict(m=4096, m_kv=1024, k=4096, n=n)) for name in ("Q4_K", "Q8_0") for n in (1, 8))
    yield Case("mul_mat_qkv", "Q4_1", dict(m=576, m_kv=192, k=576, n=1))  # SmolLM2-135M


def mul_mat_argmax():
    """The token that logits choose."""
    yield from (Case("mul_mat_argmax", name, dict(m=128256, k=4096, n=1)) for name in ("Q8_0", "Q6_K", "Q4_K"))
    yield Case("mul_mat_argmax", "Q8_0", dict(m=49152, k=576, n=1))  # SmolLM2-135M


def mul_mat_id():
    yield from (Case("mul_mat_id", name, {**EXPERTS, "n": n}) for name, n in MUL_MAT_ID)


def topk_moe():
    """Qwen3-30B-A3B's routing, and DeepSeek-V3's with a bias and 4 of 8 groups."""
    yield from (Case(kernel, "f32", dict(experts=n_expert, used=8, n=n), "hot")
                for kernel, n_expert in (("topk_moe", 128), ("topk_moe of groups", 256)) for n in (1, 512))


def weighted_sum():
    yield from (Case("weighted_sum", "f32", dict(used=8, k=2048, n=n), "hot") for n in (1, 512))


def get_rows():
    yield from (Case("get_rows", name, dict(m=M, k=K, n=M)) for name in WEIGHTS)  # a whole tensor
    yield from (Case("get_rows", name, dict(m=128256, k=4096, n=512)) for name in ("Q8_0", "Q6_K", "Q4_K"))


def dequantize():
    yield from (Case(f"dequantize {dtype}", name, dict(m=M, k=K)) for name in WEIGHTS for dtype in ("f32", "f16"))


def quantize():
    yield from (Case("quantize", "f32", dict(n=n, k=k), "hot") for k in (4096, 14336) for n in (1, 512))


def rms_norm():
    yield from (Case("rms_norm", "f32", dict(n=n, k=4096), "hot") for n in (1, 512))


def rms_norm_act():
    yield from (Case("rms_norm_act", "f32", dict(n=n, k=4096), "hot") for n in (1, 512))


def swiglu():
    yield from (Case("swiglu", "f32", dict(n=n, k=K), "hot") for n in (1, 512))


def swiglu_act():
    yield from (Case("swiglu_act", "f32", dict(n=n, k=K), "hot") for n in (1, 512))


def flash_attn_ext():
    for type_ in CACHES:
        yield from (Case("flash_attn_ext", type_, dict(keys=keys, n=n)) for keys in (512, 4096) for n in (1, 512))
        yield from (Case("flash_attn_ext", type_, dict(keys=keys, n=1)) for keys in (16384, 32768))


SUITES = {suite.__name__: suite for suite in (mmvq, mmq, mul_mat_glu, mul_mat_qkv, mul_mat_argmax, mul_mat_id, topk_moe, weighted_sum, get_rows, dequantize,
                                               quantize, rms_norm, rms_norm_act, swiglu, swiglu_act, flash_attn_ext)}


# Work of a case

def mul_mat_work(gpu, kernel, type_, m, k, n, cache) -> Work:
    from ggml_py.kernels.cuda.mul_mat import mul_mat
    from ggml_py.kernels.cuda.quantize import activation_bytes, quantize
    weights, x, out = random_weights(gpu, type_, m, k, cache), random_floats(gpu, n, k), gpu.output(n * m)
    weight_bytes, x_bytes, out_bytes = m * FORMATS[type_].row_bytes(k), 4 * n * k, 4 * n * m
    n_bytes = weight_bytes + x_bytes + out_bytes
    if FORMATS[type_].is_quantized:
        act_bytes = activation_bytes(n, k)
        act = gpu.empty(act_bytes)
        quantization = quantize(gpu.target, x, act, n, k)
        gpu.run(quantization)
        x, n_bytes = act, weight_bytes + act_bytes + out_bytes
    launches = [mul_mat(gpu.target, type_, words, x, out, m, k, n) for words in weights.addresses]
    if kernel == "quantize + mmq":
        launches, n_bytes = [both(quantization, launch) for launch in launches], n_bytes + x_bytes + act_bytes
    return Work(launches, n_bytes, 2 * m * k * n)


def mul_mat_glu_work(gpu, kernel, type_, m, k, n, cache) -> Work:
    """silu(gate x) * (up x) of two matrices m x k."""
    from ggml_py.kernels.cuda.mul_mat_glu import mul_mat_glu
    from ggml_py.kernels.cuda.quantize import activation_bytes, quantize
    gates, ups = random_weights(gpu, type_, m, k, cache).addresses, random_weights(gpu, type_, m, k, cache).addresses
    act, out, scratch = gpu.empty(activation_bytes(n, k)), gpu.output(n * m), gpu.empty(4 * n * m)
    gpu.run(quantize(gpu.target, random_floats(gpu, n, k), act, n, k))
    launches = [mul_mat_glu(gpu.target, "silu", type_, type_, gate, up, act, None, None, out, m, k, n, scratch) for gate, up in zip(gates, ups)]
    return Work(launches, 2 * m * FORMATS[type_].row_bytes(k) + activation_bytes(n, k) + 4 * n * m, 4 * m * k * n)


def mul_mat_qkv_work(gpu, kernel, type_, m, m_kv, k, n, cache) -> Work:
    from ggml_py.kernels.cuda.mul_mat_qkv import mul_mat_qkv
    from ggml_py.kernels.cuda.quantize import activation_bytes, quantize
    n_rows = m, m_kv, m_kv
    words = zip(*(random_weights(gpu, type_, rows, k, cache).addresses for rows in n_rows))
    act, outs = gpu.empty(activation_bytes(n, k)), tuple(gpu.output(n * rows) for rows in n_rows)
    gpu.run(quantize(gpu.target, random_floats(gpu, n, k), act, n, k))
    launches = [mul_mat_qkv(gpu.target, (type_,) * 3, each, act, outs, n_rows, k, n) for each in words]
    return Work(launches, sum(n_rows) * FORMATS[type_].row_bytes(k) + activation_bytes(n, k) + 4 * n * sum(n_rows), 2 * sum(n_rows) * k * n)


def mul_mat_argmax_work(gpu, kernel, type_, m, k, n, cache) -> Work:
    from ggml_py.kernels.cuda.mul_mat_argmax import mul_mat_argmax, scratch_words
    from ggml_py.kernels.cuda.quantize import activation_bytes, quantize
    act, out, scratch = gpu.empty(activation_bytes(n, k)), gpu.output(n), gpu.empty(4 * scratch_words(gpu.target, type_, m, k, n))
    gpu.run(quantize(gpu.target, random_floats(gpu, n, k), act, n, k))
    launches = [mul_mat_argmax(gpu.target, type_, words, act, out, m, k, n, scratch) for words in random_weights(gpu, type_, m, k, cache).addresses]
    return Work(launches, m * FORMATS[type_].row_bytes(k) + activation_bytes(n, k) + 4 * n, 2 * m * k * n)


def routed(n: int, experts: int, used: int, rng) -> np.ndarray:
    """int32 [n, used]: different experts for each token, uniform at random."""
    return np.argsort(rng.random((n, experts)), axis=1)[:, :used].astype(np.int32)


def mul_mat_id_work(gpu, kernel, type_, experts, used, m, k, n, cache) -> Work:
    """Each launch routes its tokens anew. Cold: it takes the experts of the next stack, and so many stacks that more than 3 x L2 are read before one is used
    again."""
    from ggml_py.kernels.cuda.mul_mat_id import mul_mat_id, scratch_words
    from ggml_py.kernels.cuda.quantize import activation_bytes, quantize
    rng, fmt = np.random.default_rng(0), FORMATS[type_]
    expert_bytes, least_bytes = m * fmt.row_bytes(k), activation_bytes(n, k) + 4 * n * used * (m + 1)
    n_likely = int(experts * (1 - (1 - used / experts)**n))
    stacks = gpu.filled(random_tiles(type_, ROWS, k, rng), Tiling(fmt, m, k, experts).n_bytes, copies_of(gpu, n_likely * expert_bytes, cache)).addresses
    ids = [routed(n, experts, used, rng) for _ in stacks]
    act, out, scratch = gpu.empty(activation_bytes(n, k)), gpu.output(n * used * m), gpu.empty(4 * scratch_words("mul_mat_id", type_, experts, m, n, used))
    gpu.run(quantize(gpu.target, random_floats(gpu, n, k), act, n, k))
    launches = [mul_mat_id(gpu.target, type_, words, act, gpu.upload(each), out, experts, m, k, n, used, 1, scratch) for words, each in zip(stacks, ids)]
    n_read = sum(len(np.unique(each)) for each in ids)
    return Work(launches, n_read * expert_bytes // len(ids) + least_bytes, 2 * m * k * n * used)


def topk_moe_work(gpu, kernel, type_, experts, used, n, cache) -> Work:
    from ggml_py.kernels.cuda.topk_moe import topk_moe
    logits, weights, ids = random_floats(gpu, n, experts), gpu.output(n * used), gpu.empty(4 * n * used)
    groups = ("sigmoid", logits, random_floats(gpu, 1, experts), weights, ids, n, experts, used, 8, 4) if "groups" in kernel else (
        "softmax", logits, None, weights, ids, n, experts, used, 0, 0)
    return Work([topk_moe(gpu.target, *groups, True, 1.0)], 4 * n * (experts + 2 * used))


def weighted_sum_work(gpu, kernel, type_, used, k, n, cache) -> Work:
    from ggml_py.kernels.cuda.experts import weighted_sum
    launch = weighted_sum(gpu.target, random_floats(gpu, n * used, k), random_floats(gpu, n, used), gpu.output(n * k), n, used, k)
    return Work([launch], 4 * n * (used * k + used + k))


def both(first, second):
    def launch(stream):
        first(stream)
        second(stream)
    return launch


def get_rows_work(gpu, kernel, type_, m, k, n, cache) -> Work:
    """Each launch takes other rows."""
    from ggml_py.kernels.cuda.get_rows import get_rows
    weights = random_weights(gpu, type_, m, k, cache)
    ids, out = gpu.upload(np.random.default_rng(0).permutation(m).astype(np.int32)), gpu.output(n * k)
    launches = [get_rows(gpu.target, type_, words, ids + 4 * first, out, n, k) for words in weights.addresses for first in range(0, m - n + 1, n)]
    return Work(launches, n * (FORMATS[type_].row_bytes(k) + 4 + 4 * k))


def dequantize_work(gpu, kernel, type_, m, k, cache) -> Work:
    from ggml_py.kernels.cuda.dequantize import dequantize
    dtype = kernel.removeprefix("dequantize ")
    weights, out_bytes = random_weights(gpu, type_, m, k, cache), {"f32": 4, "f16": 2}[dtype] * m * k
    out = gpu.output(out_bytes // 4)  # two finite float16 side by side are no NaN or infinity of float32
    launches = [dequantize(gpu.target, type_, words, out, m, k, dtype) for words in weights.addresses]
    return Work(launches, m * FORMATS[type_].row_bytes(k) + out_bytes)


def quantize_work(gpu, kernel, type_, n, k, cache) -> Work:
    from ggml_py.kernels.cuda.quantize import activation_bytes, quantize
    n_bytes = activation_bytes(n, k)
    return Work([quantize(gpu.target, random_floats(gpu, n, k), gpu.empty(n_bytes), n, k)], 4 * n * k + n_bytes)


def rms_norm_work(gpu, kernel, type_, n, k, cache) -> Work:
    from ggml_py.kernels.cuda.rms_norm import rms_norm
    return Work([rms_norm(gpu.target, random_floats(gpu, n, k), random_floats(gpu, 1, k), gpu.output(n * k), n, k, 1e-5)], 4 * k * (2 * n + 1))


def rms_norm_act_work(gpu, kernel, type_, n, k, cache) -> Work:
    from ggml_py.kernels.cuda.quantize import activation_bytes
    from ggml_py.kernels.cuda.rms_norm_act import rms_norm_act
    n_bytes = activation_bytes(n, k)
    return Work([rms_norm_act(gpu.target, random_floats(gpu, n, k), random_floats(gpu, 1, k), gpu.empty(n_bytes), n, k, 1e-5)], 4 * k * (n + 1) + n_bytes)


def swiglu_work(gpu, kernel, type_, n, k, cache) -> Work:
    from ggml_py.kernels.cuda.elementwise import swiglu
    return Work([swiglu(gpu.target, random_floats(gpu, n, k), random_floats(gpu, n, k), gpu.output(n * k), n, k)], 4 * 3 * n * k)


def swiglu_act_work(gpu, kernel, type_, n, k, cache) -> Work:
    from ggml_py.kernels.cuda.quantize import activation_bytes
    from ggml_py.kernels.cuda.swiglu_act import swiglu_act
    n_bytes = activation_bytes(n, k)
    return Work([swiglu_act(gpu.target, random_floats(gpu, n, k), random_floats(gpu, n, k), gpu.empty(n_bytes), n, k)], 4 * 2 * n * k + n_bytes)


def flash_attn_ext_work(gpu, kernel, type_, keys, n, cache) -> Work:
    """The last n of `keys` positions of one sequence look back."""
    from ggml_py.kernels.cuda.flash_attn_ext import flash_attn_ext, scratch_floats
    cell = N_HEAD_KV * HEAD
    fmt, n_heads = format_of(type_.upper()), (N_HEAD, N_HEAD_KV, HEAD, HEAD)
    cell_bytes = fmt.row_bytes(cell)
    caches = gpu.filled(random_weight(fmt, 128, cell, np.random.default_rng(0)), keys * cell_bytes, 2 * copies_of(gpu, 2 * keys * cell_bytes, cache)).addresses
    pos, seq, present = np.arange(keys - n, keys, dtype=np.int32), np.zeros(n, np.int32), np.ones(keys, np.uint8)
    q, out = random_floats(gpu, n, N_HEAD * HEAD), gpu.output(n * N_HEAD * HEAD)
    rest = gpu.upload(seq), gpu.upload(pos), gpu.upload(present), out, n, *n_heads, keys, HEAD**-0.5, gpu.empty(4 * scratch_floats(n, N_HEAD, HEAD, keys))
    launches = [flash_attn_ext(gpu.target, type_, type_, q, k, v, *rest) for k, v in zip(caches[::2], caches[1::2])]
    return Work(launches, 2 * keys * cell_bytes + 2 * 4 * n * N_HEAD * HEAD, 4 * N_HEAD * HEAD * int((pos + 1).sum()))


WORK = {"mmvq": mul_mat_work, "mmq": mul_mat_work, "quantize + mmq": mul_mat_work, "mul_mat_glu": mul_mat_glu_work, "mul_mat_qkv": mul_mat_qkv_work,
        "mul_mat_argmax": mul_mat_argmax_work, "mul_mat_id": mul_mat_id_work, "topk_moe": topk_moe_work, "topk_moe of groups": topk_moe_work,
        "weighted_sum": weighted_sum_work,
        "get_rows": get_rows_work, "dequantize f32": dequantize_work, "dequantize f16": dequantize_work, "quantize": quantize_work, "rms_norm": rms_norm_work,
        "rms_norm_act": rms_norm_act_work, "swiglu": swiglu_work, "swiglu_act": swiglu_act_work, "flash_attn_ext": flash_attn_ext_work}


def work(gpu, case: Case) -> Work:
    return WORK[case.kernel](gpu, case.kernel, case.type, **case.sizes, cache=case.cache)


# Running

def selected(only: str | None, types: str | None) -> list[Case]:
    """The cases of suites and types, both lists with commas between; ValueError names an unknown one."""
    suites = only.split(",") if only else list(SUITES)
    cases = [case for suite in _known("suite", suites, SUITES) for case in SUITES[suite]()]
    known = {case.type.lower() for suite in SUITES.values() for case in suite()}
    wanted = _known("type", types.lower().split(","), known) if types else known
    return [case for case in cases if case.type.lower() in wanted]


def _known(what, names, known):
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"unknown {what} {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    return names


def compile_kernels(cases: list[Case]) -> None:
    """In a process of its own: the kernels of some cases, compiled, assembled and kept on disk."""
    from ggml_py.kernels.cuda.launch import Target
    gpu = DryRun(Target())
    for case in cases:
        work(gpu, case)
    gpu.target.load(alone=True)


def compile_all(cases: list[Case]) -> None:
    """A type goes to one process whole."""
    groups = {}
    for case in cases:
        groups.setdefault((case.type, WORK[case.kernel], case.sizes.get("n", 0) > 8), []).append(case)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_kernels, groups.values()))


def measure(gpu: GPU, case: Case) -> Row:
    launches, n_bytes, n_ops = work(gpu, case)
    timing = gpu.time(launches)
    row = Row(case.kernel, case.type, case.sizes, case.cache, *(round(us, 3) for us in timing), n_bytes, n_ops)
    gpu.check_outputs(row.name)
    gpu.free()
    return row


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--only", help=f"suites: {','.join(SUITES)}")
    p.add_argument("--types", help="types of weights or caches, f32 for the rest: Q4_K,f16")
    options = p.parse_args()
    from ggml_py.backends.cuda import unavailable
    try:
        cases = selected(options.only, options.types)
    except ValueError as error:
        p.error(str(error))
    reason = unavailable(0)
    if reason:
        p.error(reason)

    started = time.perf_counter()
    compile_all(cases)
    compile_seconds = time.perf_counter() - started
    gpu = GPU()
    copy_GB_s = gpu.copy_GB_s()
    record = {"command": " ".join(["bench/gpu.py", *sys.argv[1:]]), **conditions(gpu.backend), "l2_bytes": gpu.l2_bytes,
              "compile_seconds": round(compile_seconds, 1), "copy_GB_s": round(copy_GB_s, 1)}
    print(f"{record['device']}, driver {record['driver']}, L2 {gpu.l2_bytes / 1e6:.0f} MB, copy {copy_GB_s:.0f} GB/s, "
          f"kernels ready in {compile_seconds:.0f} s", flush=True)
    rows = []
    for case in cases:
        rows.append(measure(gpu, case))
        limit = limits(rows[-1], rows, copy_GB_s)
        print(rows[-1].line(copy_GB_s) + (f"   must {limit.must:.1f} us: {verdict(rows[-1], limit)}" if limit else ""), flush=True)
        options.out.write_text(dump(record, "rows", [asdict(row) for row in rows]))  # what was measured stays, should a later case fail
    return 0


if __name__ == "__main__":
    sys.exit(main())
