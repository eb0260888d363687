"""One NVIDIA GPU: memory and a stream of cuda-core, and the kernels of kernels/cuda as prepared launches."""
from __future__ import annotations

import subprocess
from functools import partial
from importlib import import_module
from math import prod
from typing import Callable

import numpy as np

from ..graph import Tensor
from ..ops import OPS
from ..storage import n_bytes
from .cuda_graphs import GraphCache
from .transfers import CUDADriver, Pending, Transfers, check_status

BINDERS: dict[str, Callable] = {}  # op -> function of (launch function, target, node, *addresses of operands and of results) that gives a launch


class BadIds:
    """Where kernels leave the first id that is no expert (kernels/cuda/dispatch.py): int32 [node or 0, pair, id, -] in device memory."""

    def __init__(self, backend: CUDABackend):
        self.backend, self.buffer = backend, backend.empty(16)
        self.nodes: dict[tuple, int] = {}  # (name, experts of a token, experts) -> number, from 1

    def arguments(self, node: Tensor) -> dict:
        """What the launch function of a node takes."""
        key = node.name, *next(t for t in node.src if t.dtype == "i32").shape[1:], node.src[0].shape[0]
        return {"fault": int(self.buffer.handle), "node": self.nodes.setdefault(key, len(self.nodes) + 1)}

    def forget(self) -> None:
        self.backend.write(self.buffer, 0, np.zeros(16, np.uint8))

    def read(self) -> Callable[[], None]:
        pending = self.backend.read(self.buffer, 0, 16)

        def raise_error():
            number, pair, found, _ = map(int, pending.result().view(np.int32))
            if number:
                name, n_used, n_expert = list(self.nodes)[number - 1]
                raise IndexError(f"{name}: token {pair // n_used} has expert {found} at rank {pair % n_used}, allowed: 0 to {n_expert - 1}")
        return raise_error


def unavailable(ordinal: int) -> str | None:
    """Why cuda:ordinal cannot be used, in a few words; None if it can."""
    try:
        from numba import cuda as numba_cuda
        from cuda.bindings import driver
    except ImportError as error:
        return f"numba-cuda is not installed ({error}); install ggml-py[cu13] or ggml-py[cu12]"
    if "numba_cuda" not in numba_cuda.__file__:
        return "numba.cuda is numba's built-in target, numba-cuda is not in effect"
    try:
        if driver.cuInit(0)[0] != driver.CUresult.CUDA_SUCCESS:
            return "no NVIDIA GPU found"
        status, count = driver.cuDeviceGetCount()
    except RuntimeError:  # the driver's library is not there
        return "no NVIDIA driver found"
    if status != driver.CUresult.CUDA_SUCCESS or not count:
        return "no NVIDIA GPU found"
    return None if ordinal < count else f"this machine has {count} GPUs, cuda:0 to cuda:{count - 1}"


def driver_release() -> str:
    """Of the NVIDIA driver, such as 580.159.04, or none where nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "none"


class CUDABackend:
    """All work is in the order of one stream, copies included (docs/streams.md)."""
    asynchronous = True
    late_errors = frozenset(("mul_mat_id", "mul_mat_id_glu"))
    bad_ids: BadIds | None = None  # from the first of these nodes on

    def __init__(self, ordinal: int = 0):
        from ..errors import UserError
        from ..kernels.cuda.launch import Target
        try:
            self.target = Target(ordinal)
        except RuntimeError as error:
            raise UserError(f"--device: {error}") from None
        self.device = f"cuda:{ordinal}"
        self.stream = self.target.device.create_stream()
        self.transfers = Transfers(CUDADriver(ordinal), self.stream)

    @property
    def name(self) -> str:
        return self.target.device.name

    def driver_version(self) -> str:
        """The CUDA version of the driver, such as 13.0."""
        from cuda.bindings import driver
        status, number = driver.cuDriverGetVersion()
        check_status((status,))
        return f"{number // 1000}.{number % 1000 // 10}"

    def versions(self) -> dict[str, str]:
        from ..kernels.cuda.launch import nvvm_release
        return {"nvidia-driver": driver_release(), "nvvm": nvvm_release()}

    def empty(self, n_bytes: int):
        return self.transfers.allocate(max(n_bytes, 256), zeroed=True)

    def upload(self, array: np.ndarray):
        buffer = self.transfers.allocate(max(array.nbytes, 256))
        self.transfers.write(buffer, 0, array)
        return buffer

    def free(self, buffer) -> None:
        self.transfers.free(buffer)

    def write(self, buffer, offset: int, data: np.ndarray) -> None:
        self.transfers.write(buffer, offset, data)

    def read(self, buffer, offset: int, n_bytes: int) -> Pending:
        return self.transfers.read(buffer, offset, n_bytes)

    def copy(self, buffer, offset: int, source: CUDABackend, source_buffer, source_offset: int, n_bytes: int) -> None:
        self.transfers.copy(buffer, offset, source.transfers, source_buffer, source_offset, n_bytes)

    def report(self) -> str:
        return self.transfers.report()

    def declines(self, op: str, match) -> bool:
        if op == "mul_mat_glu":
            from ..kernels.cuda.mul_mat_glu import takes_less_apart
            gate, up, x, *biases = match.src
            return takes_less_apart(self.target, match.params["act"], (gate.dtype, up.dtype), bool(biases), *gate.shape, x.shape[0])
        if op == "flash_attn_ext_act":
            from ..kernels.cuda.flash_attn_ext import NO_WINDOW
            from ..kernels.cuda.flash_attn_ext_act import takes_less_apart
            n_head, present, (n, n_cols) = match.params["n_head"], match.src[5], match.taken[0].shape
            return takes_less_apart(n, n_head, n_cols // n_head, present.shape[1], match.params["window"] or NO_WINDOW, self.target.n_multiprocessors)
        return False

    def check(self, node: Tensor) -> None:
        """UserError for a node that has no kernel here."""
        from ..errors import UserError
        if node.op not in (*BINDERS, "cpy") and not node.is_view:
            raise UserError(f"{node.name}: cuda: op {node.op} is not implemented yet; --device cpu has it")
        if node.op in ("top_k", "topk_moe"):  # either, so that models are refused when they are loaded
            from ..kernels.cuda.topk_moe import MOST_USED
            from ..kernels.cuda.warp_row import MOST_COLUMNS
            k, n_cols = node.params["k"], node.src[0].shape[1]
            if k > MOST_USED or n_cols > MOST_COLUMNS:
                raise UserError(f"{node.name}: cuda: {node.op} of {k} of {n_cols} columns, allowed: up to {MOST_USED} of up to {MOST_COLUMNS}; "
                                "--device cpu takes more")

    def scratch(self, node: Tensor) -> tuple[str, tuple[int, ...]] | None:
        if node.op == "argmax":
            from ..kernels.cuda.argmax import scratch_words
            return "i32", (scratch_words(*node.shape),)
        if node.op == "mul_mat_argmax":
            from ..kernels.cuda.mul_mat_argmax import scratch_words
            w = node.src[0]
            return "i32", (scratch_words(self.target, w.dtype, *w.shape, *node.shape),)
        if node.op in ("flash_attn_ext", "flash_attn_ext_act"):
            from ..kernels.cuda.flash_attn_ext import scratch_floats
            from ..kernels.cuda.flash_attn_ext_act import act_scratch_floats
            n_head, present = node.params["n_head"], node.src[5]
            needed = scratch_floats if node.op == "flash_attn_ext" else act_scratch_floats
            n_floats = needed(node.shape[0], n_head, node.shape[1] // n_head, present.shape[1])
            return ("f32", (n_floats,)) if n_floats else None
        if node.op in ("mul_mat_id", "mul_mat_id_glu"):
            from ..kernels.cuda.mul_mat_id import scratch_words
            w, (n_tokens, n_used) = node.src[0], next(t for t in node.src if t.dtype == "i32").shape
            return "i32", (scratch_words(node.op, w.dtype, *w.shape[:2], n_tokens, n_used),)
        return (node.dtype, node.shape) if node.op == "mul_mat_glu" else None

    def bind(self, node: Tensor):
        launch = getattr(import_module(f"..kernels.cuda.{OPS[node.op].module}", __package__), node.op)
        if node.op in self.late_errors:
            self.bad_ids = self.bad_ids or BadIds(self)
            launch = partial(launch, **self.bad_ids.arguments(node))
        return BINDERS[node.op](launch, self.target, node, *map(address, node.src), *map(address, node.written))

    def forget_error(self) -> None:
        self.bad_ids.forget()

    def read_error(self) -> Callable[[], None]:
        return self.bad_ids.read()

    def address(self, tensor: Tensor) -> int:
        return address(tensor)

    def new_graphs(self) -> GraphCache:
        return GraphCache(self)

    def run(self, steps) -> None:
        stream = self.stream
        for step in steps:
            step(stream)

    def close(self) -> None:
        self.transfers.close()
        self.stream.sync()
        self.stream.close()


def address(tensor: Tensor) -> int:
    buffer, offset = tensor.base.storage
    return int(buffer.handle) + offset


# Binders: (launch function, target, node, *addresses of operands, *of what the node writes) -> launch.
# The launch function is the one of the op's name in kernels/cuda.

def binds(*names: str):
    def register(binder):
        BINDERS.update((name, binder) for name in names)
        return binder
    return register


@binds("quantize")
def bind_quantize(launch, target, node, x, out):
    return launch(target, x, out, *node.shape)


@binds("mul_mat")
def bind_mul_mat(launch, target, node, words, x, out):
    w = node.src[0]
    return launch(target, w.dtype, words, x, out, *w.shape, node.shape[0])


@binds("mul_mat_qkv")
def bind_mul_mat_qkv(launch, target, node, q, k, v, x, *others):
    *biases, out_v, out_q, out_k = others
    matrices = node.src[:3]
    return launch(target, tuple(w.dtype for w in matrices), (q, k, v), x, (out_q, out_k, out_v), tuple(w.shape[0] for w in matrices), matrices[0].shape[1],
                  node.shape[0], biases)


@binds("mul_mat_glu")
def bind_mul_mat_glu(launch, target, node, gate_words, up_words, x, *others):
    *biases, out, scratch = others
    gate, up = node.src[:2]
    gate_bias, up_bias = biases or (None, None)
    return launch(target, node.params["act"], gate.dtype, up.dtype, gate_words, up_words, x, gate_bias, up_bias, out, *gate.shape, node.shape[0], scratch)


@binds("mul_mat_argmax")
def bind_mul_mat_argmax(launch, target, node, words, x, out, scratch):
    w = node.src[0]
    return launch(target, w.dtype, words, x, out, *w.shape, *node.shape, scratch)


@binds("mul_mat_id")
def bind_mul_mat_id(launch, target, node, words, x, ids, out, scratch):
    w, rows, chosen = node.src
    return launch(target, w.dtype, words, x, ids, out, *w.shape, *chosen.shape, rows.shape[0] // chosen.shape[0], scratch)


@binds("mul_mat_id_glu")
def bind_mul_mat_id_glu(launch, target, node, gate_words, up_words, x, ids, *others):
    *biases, out, scratch = others
    (gate, up, rows, chosen), p = node.src[:4], node.params
    gate_bias, up_bias = biases or (None, None)
    return launch(target, p["act"], gate.dtype, up.dtype, gate_words, up_words, x, ids, gate_bias, up_bias, p["alpha"], p["limit"], out, *gate.shape,
                  *chosen.shape, rows.shape[0] // chosen.shape[0], scratch)


@binds("mul_mat_heads")
def bind_mul_mat_heads(launch, target, node, words, x, out):
    w = node.src[0]
    return launch(target, w.dtype, words, x, out, *w.shape, node.shape[0])


@binds("get_rows")
def bind_get_rows(launch, target, node, words, ids, out):
    return launch(target, node.src[0].dtype, words, ids, out, *node.shape)


@binds("take_rows")
def bind_take_rows(launch, target, node, x, ids, out):
    return launch(target, x, ids, out, *node.shape)


@binds("rms_norm")
def bind_rms_norm(launch, target, node, x, w, out):
    n_cols = node.src[1].shape[0]
    return launch(target, x, w, out, prod(node.shape) // n_cols, n_cols, node.params["eps"])


@binds("rms_norm_act")
def bind_rms_norm_act(launch, target, node, x, w, out):
    return launch(target, x, w, out, *node.shape, node.params["eps"])


@binds("add_rms_norm")
def bind_add_rms_norm(launch, target, node, x, y, w, out, total):
    n_cols = node.src[2].shape[0]
    return launch(target, x, y, w, out, total, prod(node.shape) // n_cols, n_cols, node.params["eps"])


@binds("add_rms_norm_act", "add_rms_norm_and_act")
def bind_add_rms_norm_act(launch, target, node, *addresses):
    return launch(target, *addresses, *node.shape, node.params["eps"])


@binds("add_rms_norm_mul_mat_qkv")
def bind_add_rms_norm_mul_mat_qkv(launch, target, node, x, y, w, q, k, v, *others):
    *biases, out_v, total, out_q, out_k = others
    matrices = node.src[3:6]
    return launch(target, x, y, w, node.params["eps"], total, tuple(m.dtype for m in matrices), (q, k, v), (out_q, out_k, out_v),
                  tuple(m.shape[0] for m in matrices), matrices[0].shape[1], biases)


@binds("add_rms_norm_mul_mat_glu")
def bind_add_rms_norm_mul_mat_glu(launch, target, node, x, y, w, gate_words, up_words, *others):
    *biases, out, total = others
    gate, up = node.src[3:5]
    gate_bias, up_bias = biases or (None, None)
    return launch(target, x, y, w, node.params["eps"], total, node.params["act"], gate.dtype, up.dtype, gate_words, up_words, gate_bias, up_bias, out,
                  *gate.shape)


@binds("add", "mul")
def bind_binary(launch, target, node, x, y, out):
    return launch(target, x, y, out, *node.shape, node.shape[0] if node.src[1].shape == node.shape else 1)


@binds("scale")
def bind_scale(launch, target, node, x, out):
    return launch(target, x, out, *node.shape, node.params["factor"])


@binds("swiglu", "swiglu_act", "geglu", "reglu")
def bind_swiglu(launch, target, node, gate, up, out):
    return launch(target, gate, up, out, *node.shape)


@binds("swiglu_oai")
def bind_swiglu_oai(launch, target, node, gate, up, out):
    return launch(target, gate, up, out, *node.shape, node.params["alpha"], node.params["limit"])


@binds("sigmoid", "soft_max", "normalize")
def bind_rows(launch, target, node, x, out):
    return launch(target, x, out, *node.shape)


@binds("top_k")
def bind_top_k(launch, target, node, x, out):
    return launch(target, x, out, *node.src[0].shape, node.params["k"])


@binds("mask_groups")
def bind_mask_groups(launch, target, node, x, out):
    return launch(target, x, out, *node.shape, node.params["n_group"], node.params["n_group_used"])


@binds("take_columns")
def bind_take_columns(launch, target, node, x, ids, out):
    return launch(target, x, ids, out, *node.src[0].shape, node.shape[1])


@binds("topk_moe")
def bind_topk_moe(launch, target, node, logits, *others):
    *bias, weights, ids = others
    p = node.params
    return launch(target, p["gating"], logits, *bias or [None], weights, ids, *node.src[0].shape, p["k"], p["n_group"], p["n_group_used"], p["norm"],
                  p["factor"])


@binds("add_id", "scale_id")
def bind_add_id(launch, target, node, x, of_experts, ids, out):
    return launch(target, x, of_experts, ids, out, *node.shape, node.src[1].shape[0])


@binds("weighted_sum")
def bind_weighted_sum(launch, target, node, x, w, out):
    return launch(target, x, w, out, *node.src[1].shape, node.shape[1])


@binds("slice_heads")
def bind_slice_heads(launch, target, node, x, out):
    p = node.params
    return launch(target, x, out, node.shape[0], p["n_head"], node.src[0].shape[1] // p["n_head"], p["first"], p["n"])


@binds("concat_heads")
def bind_concat_heads(launch, target, node, x, y, out):
    n_head, n_head_y = node.params["n_head"], node.params["n_head_y"]
    return launch(target, x, y, out, node.shape[0], n_head, n_head_y, node.src[0].shape[1] // n_head, node.src[1].shape[1] // n_head_y)


@binds("rope")
def bind_rope(launch, target, node, x, pos, table, out):
    n_head = node.params["n_head"]
    return launch(target, x, pos, table, out, node.shape[0], n_head, node.shape[1] // n_head, 2 * node.src[2].shape[1], node.params["neox"])


@binds("set_rows")
def bind_set_rows(launch, target, node, cache, x, rows, out):
    return launch(target, node.dtype, x, rows, cache, *node.src[1].shape)


@binds("argmax")
def bind_argmax(launch, target, node, x, out, scratch):
    return launch(target, x, out, *node.src[0].shape, scratch)


@binds("rope_set_rows")
def bind_rope_set_rows(launch, target, node, cache_v, cache_k, v, k, q, pos, table, dst, *others):
    *norms, out, q_out, also_cache_k = others
    (n, v_cols), (_, k_cols), n_head_kv, slots = node.src[2].shape, node.src[3].shape, node.params["n_head_kv"], node.params["slots"]
    dst_k, dst_v = (dst, dst) if slots is None else (dst + 8 * n * slot for slot in slots)
    return launch(target, node.src[1].dtype, node.dtype, q, k, v, norms, node.params["eps"], pos, table, slots is not None, dst_k, dst_v, q_out,
                  cache_k, cache_v, n, node.params["n_head"], n_head_kv, k_cols // n_head_kv, 2 * node.src[6].shape[1], node.params["neox"], v_cols)


@binds("cpy_rows")
def bind_cpy_rows(launch, target, node, cache, x, out):
    return launch(target, node.dtype, x, cache + n_bytes(node) // node.shape[0] * node.params["cell"], *node.src[1].shape)


@binds("cpy_rows_indirect")
def bind_cpy_rows_indirect(launch, target, node, cache, x, dst, out):
    n, k = node.src[1].shape
    return launch(target, node.dtype, x, dst + 8 * n * node.params["slot"], cache, n, k)


@binds("flash_attn_ext", "flash_attn_ext_act")
def bind_flash_attn_ext(launch, target, node, q, k, v, seq, pos, present, *others):
    n_head, n_head_kv = node.params["n_head"], node.params["n_head_kv"]
    n, q_cols = node.src[0].shape
    sinks, (out, *scratch) = (others[0], others[1:]) if len(node.src) > 6 else (None, others)
    given = {"window": node.params["window"]} if node.params["window"] else {}
    return launch(target, node.src[1].dtype, node.src[2].dtype, q, k, v, seq, pos, present, out, n, n_head, n_head_kv, q_cols // n_head,
                  node.shape[1] // n_head, node.src[5].shape[1], node.params["scale"], *scratch, sinks=sinks,
                  row_v=node.src[2].shape[1], **given)
