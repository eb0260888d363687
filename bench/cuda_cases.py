"""What is timed on a GPU: cases by suite (`SUITES`), and the launches of each (`work`), which bench/gpu.py and
bench/test_bench_cuda_kernels.py time. A case counts its bytes and operations; `row` makes figures of its times."""
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import checkout  # noqa: F401
import numpy as np

from figures import EXPERTS, K, M, MUL_MAT_ID, Row
from ggml_py.base.storage import bytes_of
from ggml_py.kernels.call import Call, Operand
from ggml_py.kernels.cuda.gated_delta_net import MANY_TOKENS
from ggml_py.quant.formats import FORMATS, format_of
from ggml_py.quant.tile import ROWS, Tiling
from gpu_timing import DryRun, Timing, blocks, copies_of, floats, launches, matrices, output
from random_weights import random_weight
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

    @property
    def id(self) -> str:
        """As pytest names it: mmvq-Q4_K-m4096-k14336-n1-cold. Nothing in it needs quotes."""
        kernel = self.kernel.replace(" + ", "+").replace(" ", "_")
        return "-".join([kernel, self.type, *(f"{key}{value}" for key, value in self.sizes.items()), self.cache])


class Work(NamedTuple):
    """One round of launches, and what each of them reads and writes and computes."""
    launches: list[Callable]
    n_bytes: int
    n_ops: int = 0


def row(case: Case, timing: Timing, made: Work) -> Row:
    """The measurement of a case, its times rounded to a nanosecond."""
    return Row(case.kernel, case.type, case.sizes, case.cache, *(round(us, 3) for us in timing), made.n_bytes, made.n_ops)


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


def draw():
    """Of one sequence and of 64, among the 40 largest logits."""
    yield from (Case("draw", "f32", dict(n=n, k=k), "hot") for k in (49152, 128256) for n in (1, 64))


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


def layer_norm():
    yield from (Case("layer_norm", "f32", dict(n=n, k=4096), "hot") for n in (1, 512))


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
        yield from (Case("flash_attn_ext", type_, dict(keys=512, n=1, seqs=seqs)) for seqs in (16, 32, 64, 128) if type_ != "f32")


def gated_delta_net():
    """Of Qwen3.6-35B-A3B: n tokens of each of `seqs` sequences, by the kernel for many tokens, and few by the one for few too,
    whose lanes have 1, 2 or 4 columns."""
    tokens = [(n, 1) for n in (1, 4, 16, 64, 512, 2048)] + [(1, seqs) for seqs in (4, 16, 64)] + [(512, 4)]
    yield from (Case("gated_delta_net", "f32", dict(n=n, seqs=seqs, plan=plan))
                for n, seqs in tokens for plan in ((MANY_TOKENS, 1, 2, 4) if n <= 16 else (MANY_TOKENS,)))


def ssm_scan():
    """Of Nemotron 3 Nano 30B-A3B: n tokens of each of `seqs` sequences, by either kernel, as above."""
    tokens = [(n, 1) for n in (1, 4, 16, 64, 512, 2048)] + [(1, seqs) for seqs in (4, 16, 64)] + [(512, 4)]
    yield from (Case("ssm_scan", "f32", dict(n=n, seqs=seqs, plan=plan))
                for n, seqs in tokens for plan in ((MANY_TOKENS, 1, 2) if n <= 16 else (MANY_TOKENS,)))


def ssm_conv():
    yield from (Case("ssm_conv", "f32", dict(n=n, seqs=seqs)) for n, seqs in ((1, 1), (512, 1), (2048, 1), (1, 16), (1, 64)))


def dense_layer():
    """A token of SmolLM2-135M behind so many keys; on compute capability 9.0 alone."""
    yield from (Case("dense_layer", "Q4_1", dict(keys=keys)) for keys in (100, 512, 1024))


SUITES = {suite.__name__: suite
          for suite in (mmvq, mmq, mul_mat_glu, mul_mat_qkv, dense_layer, mul_mat_argmax, draw, mul_mat_id, topk_moe,
                        weighted_sum, get_rows, dequantize, quantize, rms_norm, layer_norm, rms_norm_act, swiglu, swiglu_act,
                        flash_attn_ext, ssm_conv, gated_delta_net, ssm_scan)}


# Work of a case

def activations(gpu, n, k) -> tuple[Operand, Callable]:
    """(activations of random floats, the launch that makes them, which has run)."""
    act = blocks(gpu, n, k)
    quantization, = launches(gpu, "quantize", [dict(x=floats(gpu, n, k), act=act)])
    gpu.run(quantization)
    return act, quantization


def weight_bytes(type_, m, k) -> int:
    return m * FORMATS[type_].row_bytes(k)


def operand_bytes(*operands) -> int:
    """Of any but weights."""
    return sum(bytes_of(operand.dtype, operand.shape) for operand in operands)


def mul_mat_work(gpu, kernel, type_, m, k, n, cache) -> Work:
    x, quantization = activations(gpu, n, k) if FORMATS[type_].is_quantized else (floats(gpu, n, k), None)
    out = output(gpu, n, m)
    made = launches(gpu, "mul_mat", [dict(w=w, x=x, out=out) for w in matrices(gpu, type_, m, k, cache)])
    n_bytes = weight_bytes(type_, m, k) + operand_bytes(x, out)
    if kernel == "quantize + mmq":
        made, n_bytes = [both(quantization, launch) for launch in made], n_bytes + 4 * n * k + operand_bytes(x)
    return Work(made, n_bytes, 2 * m * k * n)


def mul_mat_glu_work(gpu, kernel, type_, m, k, n, cache) -> Work:
    """silu(gate x) * (up x) of two matrices m x k."""
    (x, _), out = activations(gpu, n, k), output(gpu, n, m)
    pairs = zip(*(matrices(gpu, type_, m, k, cache) for _ in range(2)))
    made = launches(gpu, "mul_mat_glu", [dict(gate=gate, up=up, x=x, act="silu", out=out) for gate, up in pairs])
    return Work(made, 2 * weight_bytes(type_, m, k) + operand_bytes(x, out), 4 * m * k * n)


def mul_mat_qkv_work(gpu, kernel, type_, m, m_kv, k, n, cache) -> Work:
    n_rows, (x, _) = (m, m_kv, m_kv), activations(gpu, n, k)
    outs = {name: output(gpu, n, rows) for name, rows in zip(("q_out", "k_out", "v_out"), n_rows)}
    triples = zip(*(matrices(gpu, type_, rows, k, cache) for rows in n_rows))
    made = launches(gpu, "mul_mat_qkv", [dict(zip("qkv", three), x=x, **outs) for three in triples])
    return Work(made, weight_bytes(type_, sum(n_rows), k) + operand_bytes(x, *outs.values()), 2 * sum(n_rows) * k * n)


def dense_layer_work(gpu, kernel, type_, keys, cache) -> Work:
    """SmolLM2-135M's token at position keys - 1 of a context of 1024."""
    k, kv, n_ff, n_ctx, rng = 576, 192, 1536, 1024, np.random.default_rng(0)
    sizes = dict(q=(k, k), k=(kv, k), v=(kv, k), o=(k, k), gate=(n_ff, k), up=(n_ff, k), down=(k, n_ff))
    n_bytes = sum(weight_bytes(type_, *size) for size in sizes.values())
    stacks = {name: gpu.filled(random_tiles(type_, ROWS, size[1], rng), Tiling(FORMATS[type_], *size).n_bytes,
                               copies_of(gpu, n_bytes, cache)).addresses for name, size in sizes.items()}
    layers = [{name: Operand(type_, sizes[name], address) for name, address in zip(stacks, each)}
              for each in zip(*stacks.values())]
    cells = random_weight(format_of("F16"), 128, kv, rng)
    caches = [Operand("f16", (n_ctx, kv), address) for address in gpu.filled(cells, 2 * n_ctx * kv, 2).addresses]
    pos, seq, dst = (Operand(dtype, (1,), gpu.upload(np.array([i], numpys)))
                     for dtype, numpys, i in (("i32", np.int32, keys - 1), ("i32", np.int32, 0), ("i64", np.int64, keys - 1)))
    x, norm = floats(gpu, 1, k), floats(gpu, k)
    operands = dict(x=x, y=x, att_norm=norm, ffn_norm=norm, pos=pos, seq=seq, dst=dst, cache_k=caches[0], cache_v=caches[1],
                    table=floats(gpu, n_ctx, 32, 2), present=Operand("u8", (1, n_ctx), gpu.upload(np.ones((1, n_ctx), np.uint8))),
                    sum=output(gpu, 1, k), out=output(gpu, 1, k), n_head=9, n_head_kv=3, neox=False, scale=0.125, eps=1e-5)
    made = launches(gpu, kernel, [{**operands, **layer} for layer in layers])
    return Work(made, n_bytes + 4 * keys * kv, 2 * sum(m * k for m, k in sizes.values()))


def mul_mat_argmax_work(gpu, kernel, type_, m, k, n, cache) -> Work:
    (x, _), out = activations(gpu, n, k), Operand("i32", (n,), gpu.output(n))
    made = launches(gpu, "mul_mat_argmax", [dict(w=w, x=x, out=out) for w in matrices(gpu, type_, m, k, cache)])
    return Work(made, weight_bytes(type_, m, k) + operand_bytes(x, out), 2 * m * k * n)


def draw_work(gpu, kernel, type_, n, k, cache) -> Work:
    settings = np.tile([40, 0.8, 0.95, 0.05, 0.5], (n, 1))
    operands = dict(x=floats(gpu, n, k), settings=Operand("f64", settings.shape, gpu.upload(settings)),
                    out=Operand("i32", (n,), gpu.output(n)))
    return Work(launches(gpu, "draw", [operands]), operand_bytes(*operands.values()))


def routed(n: int, experts: int, used: int, rng) -> np.ndarray:
    """int32 [n, used]: different experts for each token, uniform at random."""
    return np.argsort(rng.random((n, experts)), axis=1)[:, :used].astype(np.int32)


def mul_mat_id_work(gpu, kernel, type_, experts, used, m, k, n, cache) -> Work:
    """Each launch routes its tokens anew. Cold: it takes the experts of the next stack, and so many stacks that more than 3 x L2
    are read before one is used again."""
    rng, expert_bytes = np.random.default_rng(0), weight_bytes(type_, m, k)
    n_likely = int(experts * (1 - (1 - used / experts)**n))
    tiles, n_stacks = random_tiles(type_, ROWS, k, rng), copies_of(gpu, n_likely * expert_bytes, cache)
    stacks = gpu.filled(tiles, Tiling(FORMATS[type_], m, k, experts).n_bytes, n_stacks).addresses
    ids = [routed(n, experts, used, rng) for _ in stacks]
    (x, _), out = activations(gpu, n, k), output(gpu, n * used, m)
    matrices_of_experts = [Operand(type_, (experts, m, k), stack) for stack in stacks]
    chosen = [Operand("i32", (n, used), gpu.upload(each)) for each in ids]
    made = launches(gpu, "mul_mat_id", [dict(w=w, x=x, ids=each, out=out) for w, each in zip(matrices_of_experts, chosen)])
    n_read = sum(len(np.unique(each)) for each in ids)
    return Work(made, n_read * expert_bytes // len(ids) + operand_bytes(x, out) + 4 * n * used, 2 * m * k * n * used)


def topk_moe_work(gpu, kernel, type_, experts, used, n, cache) -> Work:
    ids = Operand("i32", (n, used), gpu.empty(4 * n * used))
    operands, params = dict(logits=floats(gpu, n, experts), weights=output(gpu, n, used), ids=ids), dict(gating="softmax")
    if "groups" in kernel:
        params = dict(bias=floats(gpu, experts), gating="sigmoid", n_group=8, n_group_used=4)
    return Work(launches(gpu, "topk_moe", [dict(**operands, **params, k=used, norm=True)]), operand_bytes(*operands.values()))


def weighted_sum_work(gpu, kernel, type_, used, k, n, cache) -> Work:
    operands = dict(x=floats(gpu, n * used, k), w=floats(gpu, n, used), out=output(gpu, n, k))
    return Work(launches(gpu, "weighted_sum", [operands]), operand_bytes(*operands.values()))


def both(first, second):
    def launch(stream):
        first(stream)
        second(stream)
    return launch


def get_rows_work(gpu, kernel, type_, m, k, n, cache) -> Work:
    """Each launch takes other rows."""
    weights, out = matrices(gpu, type_, m, k, cache), output(gpu, n, k)
    ids = gpu.upload(np.random.default_rng(0).permutation(m).astype(np.int32))
    runs = [Operand("i32", (n,), ids + 4 * first) for first in range(0, m - n + 1, n)]
    made = launches(gpu, "get_rows", [dict(w=w, ids=run, out=out) for w in weights for run in runs])
    return Work(made, weight_bytes(type_, n, k) + 4 * n + operand_bytes(out))


def dequantize_work(gpu, kernel, type_, m, k, cache) -> Work:
    from ggml_py.kernels.cuda.dequantize import dequantize
    dtype = kernel.removeprefix("dequantize ")
    out_bytes = {"f32": 4, "f16": 2}[dtype] * m * k
    out = Operand(dtype, (m, k), gpu.output(out_bytes // 4))  # two finite float16 side by side are a finite float32
    made = [dequantize(Call("dequantize", kernel, gpu.target, dict(w=w, out=out))) for w in matrices(gpu, type_, m, k, cache)]
    return Work(made, weight_bytes(type_, m, k) + out_bytes)


def quantize_work(gpu, kernel, type_, n, k, cache) -> Work:
    operands = dict(x=floats(gpu, n, k), act=blocks(gpu, n, k))
    return Work(launches(gpu, "quantize", [operands]), operand_bytes(*operands.values()))


def rms_norm_work(gpu, kernel, type_, n, k, cache) -> Work:
    operands = dict(x=floats(gpu, n, k), w=floats(gpu, k), out=output(gpu, n, k))
    return Work(launches(gpu, "rms_norm", [dict(**operands, eps=1e-5)]), operand_bytes(*operands.values()))


def layer_norm_work(gpu, kernel, type_, n, k, cache) -> Work:
    operands = dict(x=floats(gpu, n, k), w=floats(gpu, k), b=floats(gpu, k), out=output(gpu, n, k))
    return Work(launches(gpu, "layer_norm", [dict(**operands, eps=1e-5)]), operand_bytes(*operands.values()))


def rms_norm_act_work(gpu, kernel, type_, n, k, cache) -> Work:
    operands = dict(x=floats(gpu, n, k), w=floats(gpu, k), act=blocks(gpu, n, k))
    return Work(launches(gpu, "rms_norm_act", [dict(**operands, eps=1e-5)]), operand_bytes(*operands.values()))


def swiglu_work(gpu, kernel, type_, n, k, cache) -> Work:
    operands = dict(gate=floats(gpu, n, k), up=floats(gpu, n, k), out=output(gpu, n, k))
    return Work(launches(gpu, "swiglu", [operands]), operand_bytes(*operands.values()))


def swiglu_act_work(gpu, kernel, type_, n, k, cache) -> Work:
    operands = dict(gate=floats(gpu, n, k), up=floats(gpu, n, k), act=blocks(gpu, n, k))
    return Work(launches(gpu, "swiglu_act", [operands]), operand_bytes(*operands.values()))


def flash_attn_ext_work(gpu, kernel, type_, keys, n, cache, seqs=1) -> Work:
    """The last n of `keys` positions of each sequence look back."""
    cell = N_HEAD_KV * HEAD
    fmt = format_of(type_.upper())
    cell_bytes = fmt.row_bytes(cell)
    cells = random_weight(fmt, 128, cell, np.random.default_rng(0))
    n_all, n_bytes = n * seqs, keys * seqs * cell_bytes
    caches = [Operand(type_, (keys * seqs, cell), address)
              for address in gpu.filled(cells, n_bytes, 2 * copies_of(gpu, 2 * n_bytes, cache)).addresses]
    pos, seq = np.tile(np.arange(keys - n, keys, dtype=np.int32), seqs), np.repeat(np.arange(seqs, dtype=np.int32), n)
    n_seen, q = int((pos + 1).sum()), floats(gpu, n_all, N_HEAD * HEAD)
    present = Operand("u8", (seqs, keys), gpu.upload(np.ones((seqs, keys), np.uint8)))
    seq, pos = (Operand("i32", (n_all,), gpu.upload(each)) for each in (seq, pos))
    rest = dict(q=q, seq=seq, pos=pos, present=present, n_head=N_HEAD, n_head_kv=N_HEAD_KV, scale=HEAD**-0.5, apart=seqs > 1)
    # Of several sequences, what models launch: as floats their pieces take much longer to combine
    op, name, make = ("flash_attn_ext_act", "act", blocks) if seqs > 1 else ("flash_attn_ext", "out", output)
    result = make(gpu, n_all, N_HEAD * HEAD)
    made = launches(gpu, op, [dict(k=k, v=v, **rest, **{name: result}) for k, v in zip(caches[::2], caches[1::2])])
    return Work(made, 2 * n_bytes + operand_bytes(q, result), 4 * N_HEAD * HEAD * n_seen)


N_HEAD_K, N_HEAD_V, DIM_V = 16, 32, 128  # of Qwen3.6-35B-A3B's gated delta nets


def runs_of(gpu, n: int, seqs: int, first_row: int) -> Operand:
    """Of n tokens of each sequence: its state is read and written in one row, from first_row on."""
    rows = first_row + np.arange(seqs)
    runs = np.stack([n * np.arange(seqs), np.full(seqs, n), rows, rows], axis=1).astype(np.int32)
    return Operand("i32", runs.shape, gpu.upload(runs))


def recurrent_work(gpu, op: str, n: int, seqs: int, n_values: int, operands: dict, cache, plan=None) -> Work:
    """A round of launches on as many states as are not in L2 any more when they come again."""
    n_copies = copies_of(gpu, 4 * seqs * n_values, cache)
    state = floats(gpu, n_copies * seqs, n_values)
    made = launches(gpu, op, [dict(state=state, runs=runs_of(gpu, n, seqs, i * seqs), **operands) for i in range(n_copies)], plan)
    arrays = [operand for operand in operands.values() if isinstance(operand, Operand)]
    return Work(made, 2 * 4 * seqs * n_values + operand_bytes(*arrays))


def gated_delta_net_work(gpu, kernel, type_, n, seqs, plan, cache) -> Work:
    rows = n * seqs
    qkv = floats(gpu, rows, (2 * N_HEAD_K + N_HEAD_V) * DIM_V, change=lambda x: x / np.float32(DIM_V**0.5))  # of length 1
    g, beta = (floats(gpu, rows, N_HEAD_V, change=change) for change in (lambda x: -np.abs(x), lambda x: 1 / (1 + np.exp(-x))))
    operands = dict(qkv=qkv, g=g, beta=beta, out=output(gpu, rows, N_HEAD_V * DIM_V), n_head_k=N_HEAD_K, n_head_v=N_HEAD_V,
                    tiled=True)
    return recurrent_work(gpu, kernel, n, seqs, N_HEAD_V * DIM_V * DIM_V, operands, cache, plan)


N_HEAD_SCAN, DIM_SCAN, N_GROUP, N_STATE = 64, 64, 8, 128  # of Nemotron 3 Nano 30B-A3B's Mamba 2 layers


def ssm_scan_work(gpu, kernel, type_, n, seqs, plan, cache) -> Work:
    rows, inner = n * seqs, N_HEAD_SCAN * DIM_SCAN
    vectors = {name: floats(gpu, 1, N_HEAD_SCAN, change=change)
               for name, change in (("bias", np.negative), ("a", lambda x: -np.exp(x)), ("d", np.abs))}
    operands = dict(x=floats(gpu, rows, inner + 2 * N_GROUP * N_STATE), dt=floats(gpu, rows, N_HEAD_SCAN), **vectors,
                    out=output(gpu, rows, inner), n_head=N_HEAD_SCAN, n_group=N_GROUP, n_state=N_STATE)
    return recurrent_work(gpu, kernel, n, seqs, inner * N_STATE, operands, cache, plan)


def ssm_conv_work(gpu, kernel, type_, n, seqs, cache) -> Work:
    n_channels = (2 * N_HEAD_K + N_HEAD_V) * DIM_V
    operands = dict(x=floats(gpu, n * seqs, n_channels), w=floats(gpu, n_channels, 4), out=output(gpu, n * seqs, n_channels))
    return recurrent_work(gpu, kernel, n, seqs, 3 * n_channels, operands, cache)


WORK = {"mmvq": mul_mat_work, "mmq": mul_mat_work, "quantize + mmq": mul_mat_work, "mul_mat_glu": mul_mat_glu_work,
        "mul_mat_qkv": mul_mat_qkv_work, "dense_layer": dense_layer_work,
        "mul_mat_argmax": mul_mat_argmax_work, "draw": draw_work, "mul_mat_id": mul_mat_id_work, "topk_moe": topk_moe_work,
        "topk_moe of groups": topk_moe_work,
        "weighted_sum": weighted_sum_work,
        "get_rows": get_rows_work, "dequantize f32": dequantize_work, "dequantize f16": dequantize_work,
        "quantize": quantize_work, "rms_norm": rms_norm_work, "layer_norm": layer_norm_work,
        "rms_norm_act": rms_norm_act_work, "swiglu": swiglu_work, "swiglu_act": swiglu_act_work,
        "flash_attn_ext": flash_attn_ext_work, "gated_delta_net": gated_delta_net_work, "ssm_conv": ssm_conv_work,
        "ssm_scan": ssm_scan_work}


def work(gpu, case: Case) -> Work:
    return WORK[case.kernel](gpu, case.kernel, case.type, **case.sizes, cache=case.cache)


# Selection and compilation

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
