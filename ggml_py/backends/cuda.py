"""One NVIDIA GPU: memory and a stream of cuda-core, and the kernels of kernels/cuda as prepared launches."""
from __future__ import annotations

from importlib import import_module
from math import prod
from typing import Callable

import numpy as np

from ..graph import Tensor
from ..ops import OPS
from ..storage import n_bytes
from .cuda_graphs import GraphCache, bucket
from .transfers import CUDADriver, Pending, Transfers, check_status

BINDERS: dict[str, Callable] = {}  # op -> function of (launch function, target, node, *addresses of operands and of results) that gives a launch


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


class CUDABackend:
    """All work is in the order of one stream, copies included (docs/streams.md)."""

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

    def check(self, node: Tensor) -> None:
        """UserError for a node that has no kernel here."""
        from ..errors import UserError
        if node.op not in (*BINDERS, "cpy"):
            raise UserError(f"{node.name}: cuda: op {node.op} is not implemented yet; --device cpu has it")

    def scratch(self, node: Tensor) -> tuple[str, tuple[int, ...]] | None:
        if node.op == "argmax":
            from ..kernels.cuda.argmax import PARTS
            return "i32", (*node.shape, 2 * PARTS)
        if node.op in ("flash_attn_ext", "flash_attn_ext_act"):
            from ..kernels.cuda.flash_attn_ext import scratch_floats
            from ..kernels.cuda.flash_attn_ext_act import act_scratch_floats
            n_head, present = node.params["n_head"], node.src[5]
            needed = scratch_floats if node.op == "flash_attn_ext" else act_scratch_floats
            n_floats = needed(node.shape[0], n_head, node.shape[1] // n_head, present.shape[1])
            return ("f32", (n_floats,)) if n_floats else None
        return (node.dtype, node.shape) if node.op == "mul_mat_glu" else None

    def bind(self, node: Tensor):
        launch = getattr(import_module(f"..kernels.cuda.{OPS[node.op].module}", __package__), node.op)
        return BINDERS[node.op](launch, self.target, node, *map(address, node.src), *map(address, node.written))

    def address(self, tensor: Tensor) -> int:
        return address(tensor)

    def key_bound(self, n_keys: int, n_ctx: int) -> int:
        return bucket(n_keys, n_ctx)

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


@binds("mul_mat_glu")
def bind_mul_mat_glu(launch, target, node, gate_words, up_words, x, *others):
    *biases, out, scratch = others
    gate, up = node.src[:2]
    gate_bias, up_bias = biases or (None, None)
    return launch(target, node.params["act"], gate.dtype, up.dtype, gate_words, up_words, x, gate_bias, up_bias, out, *gate.shape, node.shape[0], scratch)


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


@binds("add_rms_norm_act")
def bind_add_rms_norm_act(launch, target, node, x, y, w, out, total):
    return launch(target, x, y, w, out, total, *node.shape, node.params["eps"])


@binds("add", "mul")
def bind_binary(launch, target, node, x, y, out):
    return launch(target, x, y, out, *node.shape, node.shape[0] if node.src[1].shape == node.shape else 1)


@binds("scale")
def bind_scale(launch, target, node, x, out):
    return launch(target, x, out, *node.shape, node.params["factor"])


@binds("swiglu", "swiglu_act", "geglu", "reglu")
def bind_swiglu(launch, target, node, gate, up, out):
    return launch(target, gate, up, out, *node.shape)


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
