"""The CPU: numpy memory and the kernels of kernels/cpu (or kernels/reference), compiled on first use and kept on disk."""
from functools import partial
from importlib import import_module
from math import prod
from typing import Callable

import llvmlite.binding as llvm
import numpy as np

from ..errors import UserError
from ..graph import Tensor
from ..ops import OPS
from ..quant.formats import CHUNK
from ..storage import CACHE_TYPES, DTYPES, activation_planes, n_bytes
from .transfers import Pending

BINDERS: dict[str, Callable] = {}  # op -> function of (kernel, node, *operands, *what it writes) that gives a step


def binds(*names: str):
    def register(binder):
        BINDERS.update((name, binder) for name in names)
        return binder
    return register


class CPUBackend:
    """room: "cpu", or "reference" to run the definition itself."""
    asynchronous = False  # steps have run when `run` returns
    late_errors: frozenset[str] = frozenset()

    def __init__(self, room: str = "cpu", device: str = "cpu"):
        self.room, self.device = room, device
        from ..kernels.compile import check_cpu
        try:
            check_cpu()
        except RuntimeError as error:
            raise UserError(str(error)) from None

    @property
    def name(self) -> str:
        return llvm.get_host_cpu_name()

    def versions(self) -> dict[str, str]:
        return {}

    def empty(self, n_bytes: int) -> np.ndarray:
        raw = np.zeros(n_bytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        return raw[start:start + n_bytes]

    def upload(self, array: np.ndarray) -> np.ndarray:
        """array: contiguous, any dtype. It is kept, not copied, when its memory is 64-byte aligned (tiles are asked to be)."""
        flat = array.reshape(-1).view(np.uint8)
        if flat.ctypes.data % 64:
            flat, source = self.empty(flat.size), flat
            flat[:] = source
        return flat

    def free(self, buffer) -> None:
        pass

    def write(self, buffer: np.ndarray, offset: int, data: np.ndarray) -> None:
        buffer[offset:offset + data.size] = data

    def read(self, buffer: np.ndarray, offset: int, n_bytes: int) -> Pending:
        return Pending(buffer[offset:offset + n_bytes].copy())

    def copy(self, buffer: np.ndarray, offset: int, source: "CPUBackend", source_buffer: np.ndarray, source_offset: int, n_bytes: int) -> None:
        buffer[offset:offset + n_bytes] = source_buffer[source_offset:source_offset + n_bytes]

    def report(self) -> str:
        return ""

    def view(self, tensor: Tensor):
        """A tensor's memory as its kernels take it: an array; (q, d, sums) of activation blocks; uint32 words of tiles; rows of a cache."""
        buffer, offset = tensor.base.storage

        def part(first, n, dtype, shape):
            return buffer[offset + first:offset + first + n * np.dtype(dtype).itemsize].view(dtype).reshape(shape)

        if tensor.dtype == "act":
            n_rows, n_chunks = tensor.shape[0], -(-tensor.shape[1] // CHUNK)
            q, d, sums, _ = activation_planes(*tensor.shape)
            return (part(q, n_rows * n_chunks * CHUNK, np.int16, (n_rows, -1)), part(d, n_rows * n_chunks, np.float32, (n_rows, -1)),
                    part(sums, n_rows * n_chunks * 16, np.int32, (n_rows, -1)))
        if tensor.dtype in DTYPES:
            return part(0, prod(tensor.shape), DTYPES[tensor.dtype], tensor.shape)
        if tensor.dtype in CACHE_TYPES:
            return buffer[offset:offset + n_bytes(tensor)].view(CACHE_TYPES[tensor.dtype][2]).reshape(tensor.shape[0], -1)
        return part(0, n_bytes(tensor) // 4, np.uint32, -1)

    def address(self, tensor: Tensor) -> int:
        buffer, offset = tensor.base.storage
        return buffer.ctypes.data + offset

    def new_graphs(self) -> None:
        return None

    def declines(self, op: str, match) -> bool:
        return False

    def check(self, node: Tensor) -> None:
        pass

    def scratch(self, node: Tensor) -> tuple[str, tuple[int, ...]] | None:
        if node.op == "mul_mat_argmax":
            w, x = node.src
            return "f32", (x.shape[0], w.shape[0])
        return ("f32", node.shape) if node.op in ("mul_mat_glu", "add_rms_norm_mul_mat_glu", "mul_mat_id_glu", "flash_attn_ext_act") else None

    def bind(self, node: Tensor) -> Callable[[], None]:
        return BINDERS[node.op](self.kernel(node.op), node, *map(self.view, node.src), *map(self.view, node.written))

    def kernel(self, op: str):
        if op == "cpy":
            return np.copyto
        return getattr(import_module(f"..kernels.{self.room}.{OPS[op].module}", __package__), op)

    def run(self, steps) -> None:
        for step in steps:
            step()

    def close(self) -> None:
        pass


# Binders: (kernel, node, *operands, *what the node writes, as `view` gives them) -> step.
# The kernel is the function of the op's name in the backend's room.

@binds("quantize", "swiglu_act")
def bind_quantize(kernel, node, *operands):
    *operands, act = operands
    return partial(kernel, *operands, *act)


@binds("mul_mat")
def bind_mul_mat(kernel, node, words, x, out):
    return partial(kernel(node.src[0].dtype), words, *(x if isinstance(x, tuple) else (x,)), out)


@binds("mul_mat_qkv")
def bind_mul_mat_qkv(kernel, node, q, k, v, x, *others):
    *biases, out_v, out_q, out_k = others
    return partial(kernel(*(w.dtype for w in node.src[:3])), (q, k, v), x if isinstance(x, tuple) else (x,), biases, (out_q, out_k, out_v))


@binds("mul_mat_argmax")
def bind_mul_mat_argmax(kernel, node, words, x, out, scratch):
    return partial(kernel(node.src[0].dtype), words, x if isinstance(x, tuple) else (x,), out, scratch)


@binds("mul_mat_id")
def bind_mul_mat_id(kernel, node, words, x, ids, out):
    return partial(kernel(node.src[0].dtype), words.reshape(node.src[0].shape[0], -1), *(x if isinstance(x, tuple) else (x,)), ids, out, node.name)


@binds("mul_mat_id_glu")
def bind_mul_mat_id_glu(kernel, node, gate, up, x, ids, *others):
    *biases, out, scratch = others
    types, n_expert, p = (w.dtype for w in node.src[:2]), node.src[0].shape[0], node.params
    return partial(kernel(p["act"], *types), gate.reshape(n_expert, -1), up.reshape(n_expert, -1), x if isinstance(x, tuple) else (x,), ids, biases,
                   np.float32(p["alpha"]), np.float32(p["limit"]), out, scratch, node.name)


@binds("mul_mat_heads")
def bind_mul_mat_heads(kernel, node, words, x, out):
    return partial(kernel(node.src[0].dtype), words.reshape(node.src[0].shape[0], -1), *(x if isinstance(x, tuple) else (x,)), out)


@binds("add_id", "scale_id")
def bind_add_id(kernel, node, x, of_experts, ids, out):
    return partial(kernel, x, of_experts, ids, out, node.name)


@binds("take_columns")
def bind_take_columns(kernel, node, x, ids, out):
    return partial(kernel, x, ids, out, node.name)


@binds("weighted_sum")
def bind_weighted_sum(kernel, node, x, w, out):
    return partial(kernel, x.reshape(*w.shape, -1), w, out)


@binds("topk_moe")
def bind_topk_moe(kernel, node, logits, *others):
    *bias, weights, ids = others
    p = node.params
    return partial(kernel(p["gating"]), logits, *bias or [np.empty(0, np.float32)], p["n_group"], p["n_group_used"], p["norm"], np.float32(p["factor"]),
                   weights, ids)


@binds("mask_groups")
def bind_mask_groups(kernel, node, x, out):
    return partial(kernel, x, node.params["n_group"], node.params["n_group_used"], out)


@binds("swiglu_oai")
def bind_swiglu_oai(kernel, node, gate, up, out):
    return partial(kernel, gate, up, np.float32(node.params["alpha"]), np.float32(node.params["limit"]), out)


@binds("slice_heads")
def bind_slice_heads(kernel, node, x, out):
    heads = lambda a: a.reshape(len(a), node.params["n_head"], a.shape[1] // node.params["n_head"])
    return partial(kernel, heads(x), node.params["first"], heads(out))


@binds("concat_heads")
def bind_concat_heads(kernel, node, x, y, out):
    heads = lambda a, n_head: a.reshape(len(a), n_head, a.shape[1] // n_head)
    n_head = node.params["n_head"]
    return partial(kernel, heads(x, n_head), heads(y, node.params["n_head_y"]), heads(out, n_head))


@binds("get_rows")
def bind_get_rows(kernel, node, words, ids, out):
    return partial(kernel(node.src[0].dtype), words, ids, out)


@binds("mul_mat_glu")
def bind_mul_mat_glu(kernel, node, gate, up, x, *others):
    *biases, out, scratch = others
    types = (w.dtype for w in node.src[:2])
    return partial(kernel(node.params["act"], *types), gate, up, x if isinstance(x, tuple) else (x,), biases, out, scratch)


@binds("take_rows", "swiglu", "geglu", "reglu", "argmax", "sigmoid", "soft_max", "top_k", "normalize")
def bind_plain(kernel, node, *operands):
    return partial(kernel, *operands)


@binds("rms_norm")
def bind_rms_norm(kernel, node, x, w, out):
    return partial(kernel, x.reshape(-1, w.size), w, np.float32(node.params["eps"]), out.reshape(-1, w.size))


@binds("rms_norm_act")
def bind_rms_norm_act(kernel, node, x, w, act):
    return partial(kernel, x, w, np.float32(node.params["eps"]), *act)


@binds("add_rms_norm")
def bind_add_rms_norm(kernel, node, x, y, w, out, total):
    x, y, out, total = (a.reshape(-1, w.size) for a in (x, y, out, total))
    return partial(kernel, x, y, w, np.float32(node.params["eps"]), out, total)


@binds("add_rms_norm_act", "add_rms_norm_and_act")
def bind_add_rms_norm_act(kernel, node, x, y, w, act, *others):
    return partial(kernel, x, y, w, np.float32(node.params["eps"]), *act, *others)


@binds("add_rms_norm_mul_mat_qkv")
def bind_add_rms_norm_mul_mat_qkv(kernel, node, x, y, w, q, k, v, *others):
    *biases, out_v, total, out_q, out_k = others
    types = (each.dtype for each in node.src[3:6])
    return partial(kernel(*types), x, y, w, np.float32(node.params["eps"]), (q, k, v), biases, (out_q, out_k, out_v), total)


@binds("add_rms_norm_mul_mat_glu")
def bind_add_rms_norm_mul_mat_glu(kernel, node, x, y, w, gate, up, *others):
    *biases, out, total, scratch = others
    types = (each.dtype for each in node.src[3:5])
    return partial(kernel(node.params["act"], *types), x, y, w, np.float32(node.params["eps"]), gate, up, biases, out, scratch, total)


@binds("add", "mul")
def bind_binary(kernel, node, x, y, out):
    return partial(kernel, x, y.reshape(-1, x.shape[-1]), out)


@binds("scale")
def bind_scale(kernel, node, x, out):
    return partial(kernel, x, np.float32(node.params["factor"]), out)


@binds("rope")
def bind_rope(kernel, node, x, pos, table, out):
    heads = (len(x), node.params["n_head"], x.shape[1] // node.params["n_head"])
    return partial(kernel, x.reshape(heads), pos, table, node.params["neox"], out.reshape(heads))


@binds("set_rows")
def bind_set_rows(kernel, node, cache, x, rows, out):
    return partial(kernel(node.dtype), x, rows, cache)


@binds("rope_set_rows")
def bind_rope_set_rows(kernel, node, cache_v, cache_k, v, k, q, pos, table, dst, *others):
    *norms, out, q_out, also_cache_k = others
    heads = lambda x, n_head: x.reshape(len(x), n_head, x.shape[1] // n_head)
    n_head, n_head_kv, eps, slots = node.params["n_head"], node.params["n_head_kv"], np.float32(node.params["eps"]), node.params["slots"]
    dst_k, dst_v = (dst, dst) if slots is None else (dst[slot] for slot in slots)
    return partial(kernel(node.src[1].dtype, node.dtype, slots is not None), heads(q, n_head), heads(k, n_head_kv), v, norms, eps, pos, table,
                   node.params["neox"], dst_k, dst_v, heads(q_out, n_head), cache_k, cache_v)


@binds("cpy_rows")
def bind_cpy_rows(kernel, node, cache, x, out):
    return partial(kernel(node.dtype), x, node.params["cell"], cache)


@binds("cpy_rows_indirect")
def bind_cpy_rows_indirect(kernel, node, cache, x, dst, out):
    return partial(kernel(node.dtype), x, dst[node.params["slot"]], cache)


@binds("flash_attn_ext", "flash_attn_ext_act")
def bind_flash_attn_ext(kernel, node, q, k, v, seq, pos, present, *others):
    sinks, results = others[:len(node.src) - 6], others[len(node.src) - 6:]
    *act, out = results  # activations, and what is scratch for them
    n_head, given = node.params["n_head"], {"window": node.params["window"]} if node.params["window"] else {}
    given.update(zip(("sinks",), sinks))
    q, out = (a.reshape(len(a), n_head, a.shape[1] // n_head) for a in (q, out))
    return partial(kernel(node.src[1].dtype, node.src[2].dtype), q, k, v, node.params["n_head_kv"], seq, pos, present, np.float32(node.params["scale"]), out,
                   *act, **given)


@binds("cpy")
def bind_cpy(kernel, node, x, out):
    return partial(np.copyto, out, x)
