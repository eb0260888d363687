"""One case for each op of the op table: operands by what they are, so that any of its rows can be computed alone. A new op needs a line in CASES."""
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from ggml_py.graph import Graph, Tensor
from ggml_py.kernels.reference.set_rows import set_rows
from ggml_py.ops import OPS
from ggml_py.quant import tile
from ggml_py.quant.activation import quantize_activations
from ggml_py.quant.formats import FORMATS, format_of
from ggml_py.recording import Arrays, Capture, named_rows, recompute, results
from ggml_py.storage import CACHE_TYPES
from random_weights import random_weight

N, M, K = 37, 70, 544          # rows, rows of weights, columns (two chunks and a part; whole blocks of 32)
HEADS, HEADS_KV, DIM, CELLS = 4, 2, 64, 3 * 48
EXPERTS, ROUTED = 3, 40         # matrices of a stack; columns of router logits
WEIGHTS = [fmt.name for fmt in FORMATS.values() if fmt.planes]


@dataclass
class Operand:
    dtype: str
    arrays: Arrays
    axis: int | None = None  # of rows that are computed; None: whole for all of them
    shape: tuple[int, ...] | None = None

    def rows(self, chosen) -> "Operand":
        if self.axis is None:
            return self
        return Operand(self.dtype, tuple(np.ascontiguousarray(a.take(chosen, self.axis)) for a in self.arrays), self.axis,
                       self.shape and (len(chosen), *self.shape[1:]))

    def tensor(self, name: str) -> Tensor:
        return Tensor(name, self.dtype, self.shape or self.arrays[0].shape, device="cpu")


class Operands:
    """What the lines of CASES are made of; every array has a seed of its own. type_: of weights and caches."""

    def __init__(self, op: str, type_: str, n_cols: int):
        self.rng, self.type, self.k = np.random.default_rng(crc32(f"{op} {type_}".encode())), type_, n_cols

    def x(self, k: int = 0, n: int = N) -> Operand:
        x = self.rng.standard_normal((n, k or self.k)) * np.exp2(self.rng.integers(-12, 12, (n, 1)))
        x[1::9] = 0
        return Operand("f32", (x.astype(np.float32),), 0)

    def act(self) -> Operand:
        return Operand("act", quantize_activations(self.x().arrays[0]), 0, (N, self.k))

    def input(self) -> Operand:
        """What a product with a weight of the type takes."""
        return self.act() if format_of(self.type).is_quantized else self.x()

    def table(self) -> Operand:
        return Operand("f32", self.x(n=M).arrays)

    def vector(self, n: int = 0) -> Operand:
        return Operand("f32", (self.rng.standard_normal(n or self.k).astype(np.float32),))

    def matrix(self) -> Operand:
        fmt = format_of(self.type)
        return Operand(self.type, (tile.pack(random_weight(fmt, M, self.k, self.rng), fmt, M, self.k).reshape(-1).view(np.uint32),), shape=(M, self.k))

    def matrices(self, n: int = EXPERTS) -> Operand:
        each = [self.matrix() for _ in range(n)]
        return Operand(self.type, (np.concatenate([m.arrays[0] for m in each]),), shape=(n, M, self.k))

    def experts(self) -> Operand:
        """One of each token, so that rows of the result are rows of tokens."""
        return Operand("i32", (self.rng.integers(0, EXPERTS, (N, 1)).astype(np.int32),), 0)

    def biases(self) -> Operand:
        return Operand("f32", self.x(M, EXPERTS).arrays)

    def columns(self, k: int, n: int) -> Operand:
        return Operand("i32", (self.rng.integers(0, k, (N, n)).astype(np.int32),), 0)

    def ids(self, most: int = M) -> Operand:
        return Operand("i32", (self.rng.integers(0, most, N).astype(np.int32),), 0)

    def angles(self) -> Operand:
        a = self.rng.uniform(0, 6, (48, DIM // 2))
        return Operand("f32", (np.stack([np.cos(a), np.sin(a)], axis=2).astype(np.float32),))

    def cache(self, k: int = HEADS_KV * DIM) -> Operand:
        """A cache whose every cell is written."""
        block, size, dtype = CACHE_TYPES[self.type]
        cells = np.zeros((CELLS, k // block * size // dtype.itemsize), dtype)
        set_rows(self.type)(self.x(k, CELLS).arrays[0], np.arange(CELLS), cells)
        return Operand(self.type, (cells,), shape=(CELLS, k))

    def cells(self) -> Operand:
        return Operand("i64", (self.rng.permutation(CELLS)[:N].astype(np.int64),), 0)

    def addresses(self, k: int) -> Operand:
        """Of cells, two rows of a table, from address 0 on."""
        block, size, _ = CACHE_TYPES[self.type]
        return Operand("i64", (np.stack([self.cells().arrays[0]] * 2) * (k // block * size),), 1)

    def present(self) -> Operand:
        return Operand("u8", ((self.rng.random((3, 48)) < 0.9).astype(np.uint8),))


KV, Q = HEADS_KV * DIM, HEADS * DIM
WEIGHT, CACHE, PLAIN = WEIGHTS, list(CACHE_TYPES), [""]
GATES = ["Q4_K", "Q8_0", "F16"]  # mul_mat has them all
NORMED = ["Q4_K", "Q8_0"]        # products of a norm's activations

# op, and what a further case of it is -> (types that it is tried with, its operands, its parameters)
CASES = {
    "get_rows": (WEIGHT, lambda o: [o.matrix(), o.ids()], {}),
    "take_rows": (PLAIN, lambda o: [o.table(), o.ids()], {}),
    "quantize": (PLAIN, lambda o: [o.x()], {}),
    "mul_mat": (WEIGHT, lambda o: [o.matrix(), o.input()], {}),
    "mul_mat_qkv": (GATES, lambda o: [o.matrix(), o.matrix(), o.matrix(), o.input(), *(o.vector(M) for _ in range(3))], {}),
    "mul_mat_glu": (GATES, lambda o: [o.matrix(), o.matrix(), o.input(), o.vector(M), o.vector(M)], {"act": "silu"}),
    "rms_norm": (PLAIN, lambda o: [o.x(), o.vector()], {"eps": 1e-5}),
    "rms_norm_act": (PLAIN, lambda o: [o.x(), o.vector()], {"eps": 1e-5}),
    "add_rms_norm": (PLAIN, lambda o: [o.x(), o.x(), o.vector()], {"eps": 1e-5}),
    "add_rms_norm_act": (PLAIN, lambda o: [o.x(), o.x(), o.vector()], {"eps": 1e-5}),
    "add_rms_norm_and_act": (PLAIN, lambda o: [o.x(), o.x(), o.vector()], {"eps": 1e-5}),
    "add_rms_norm_mul_mat_qkv": (NORMED, lambda o: [o.x(), o.x(), o.vector(), *(o.matrix() for _ in range(3)), *(o.vector(M) for _ in range(3))],
                                 {"eps": 1e-5}),
    "add_rms_norm_mul_mat_glu": (NORMED, lambda o: [o.x(), o.x(), o.vector(), o.matrix(), o.matrix(), o.vector(M), o.vector(M)], {"eps": 1e-5, "act": "silu"}),
    "add": (PLAIN, lambda o: [o.x(), o.x()], {}),
    "mul": (PLAIN, lambda o: [o.x(), o.vector()], {}),
    "scale": (PLAIN, lambda o: [o.x()], {"factor": 0.3}),
    "swiglu": (PLAIN, lambda o: [o.x(), o.x()], {}),
    "geglu": (PLAIN, lambda o: [o.x(), o.x()], {}),
    "reglu": (PLAIN, lambda o: [o.x(), o.x()], {}),
    "swiglu_act": (PLAIN, lambda o: [o.x(), o.x()], {}),
    "rope": (PLAIN, lambda o: [o.x(Q), o.ids(48), o.angles()], {"n_head": HEADS, "neox": True}),
    "set_rows": (CACHE, lambda o: [o.cache(), o.x(KV), o.cells()], {}),
    "cpy_rows": (CACHE, lambda o: [o.cache(), o.x(KV)], {"cell": 5}),
    "cpy_rows_indirect": (CACHE, lambda o: [o.cache(), o.x(KV), o.addresses(KV)], {"slot": 1}),
    "rope_set_rows": (["f32", "f16"], lambda o: [o.cache(), o.cache(), o.x(KV), o.x(KV), o.x(Q), o.ids(48), o.angles(), o.cells()],
                      {"n_head": HEADS, "n_head_kv": HEADS_KV, "neox": False, "eps": 0.0, "slots": None}),
    "flash_attn_ext": (CACHE, lambda o: [o.x(Q), o.cache(), o.cache(), o.ids(3), o.ids(48), o.present()],
                       {"n_head": HEADS, "n_head_kv": HEADS_KV, "scale": DIM**-0.5}),
    "flash_attn_ext: window, sinks": (CACHE, lambda o: [o.x(Q), o.cache(), o.cache(), o.ids(3), o.ids(48), o.present(), o.vector(HEADS)],
                                      {"n_head": HEADS, "n_head_kv": HEADS_KV, "scale": DIM**-0.5, "window": 20}),
    "flash_attn_ext: latent": (CACHE, lambda o: [o.x(HEADS * KV), *[o.cache()] * 2, o.ids(3), o.ids(48), o.present()],
                               {"n_head": HEADS, "n_head_kv": 1, "scale": KV**-0.5, "n_embd_head_v": DIM}),
    "flash_attn_ext_act": (CACHE, lambda o: [o.x(Q), o.cache(), o.cache(), o.ids(3), o.ids(48), o.present(), o.vector(HEADS)],
                           {"n_head": HEADS, "n_head_kv": HEADS_KV, "scale": DIM**-0.5, "window": 30}),
    "soft_max": (PLAIN, lambda o: [o.x(ROUTED)], {}),
    "sigmoid": (PLAIN, lambda o: [o.x(ROUTED)], {}),
    "mask_groups": (PLAIN, lambda o: [o.x(ROUTED)], {"n_group": 8, "n_group_used": 3}),
    "top_k": (PLAIN, lambda o: [o.x(ROUTED)], {"k": 5}),
    "take_columns": (PLAIN, lambda o: [o.x(ROUTED), o.columns(ROUTED, 5)], {}),
    "normalize": (PLAIN, lambda o: [o.x(ROUTED)], {}),
    "topk_moe": (PLAIN, lambda o: [o.x(ROUTED), o.vector(ROUTED)],
                 {"k": 5, "gating": "sigmoid", "norm": True, "factor": 2.5, "n_group": 8, "n_group_used": 3}),
    "mul_mat_id": (GATES, lambda o: [o.matrices(), o.input(), o.experts()], {}),
    "mul_mat_id_glu": (GATES, lambda o: [o.matrices(), o.matrices(), o.input(), o.experts(), o.biases(), o.biases()],
                       {"act": "swiglu_oai", "alpha": 1.702, "limit": 7.0}),
    "mul_mat_heads": (GATES, lambda o: [o.matrices(1), o.input()], {}),
    "add_id": (PLAIN, lambda o: [o.x(M), o.biases(), o.experts()], {}),
    "scale_id": (PLAIN, lambda o: [o.x(M), o.vector(EXPERTS), o.experts()], {}),
    "weighted_sum": (PLAIN, lambda o: [o.x(), o.x(1)], {}),
    "swiglu_oai": (PLAIN, lambda o: [o.x(), o.x()], {"alpha": 1.702, "limit": 7.0}),
    "slice_heads": (PLAIN, lambda o: [o.x(Q)], {"n_head": HEADS, "first": 8, "n": 20}),
    "concat_heads": (PLAIN, lambda o: [o.x(Q), o.x(DIM)], {"n_head": HEADS, "n_head_y": 1}),
    "argmax": (PLAIN, lambda o: [o.x()], {}),
    "mul_mat_argmax": (GATES, lambda o: [o.matrix(), o.input()], {}),
    "cpy": (PLAIN, lambda o: [o.x()], {}),
}
WHOLE = {"cpy_rows"}  # whose rows lie where the first one does
SINGLE = {"add_rms_norm_mul_mat_qkv", "add_rms_norm_mul_mat_glu"}  # of one row


def op_of(case: str) -> str:
    return case.split(":")[0]


def op_cases():
    """(op, and what a further case of it is, type) of every case."""
    return [(op, type_) for op, (types, _, _) in CASES.items() for type_ in types]


def operands_of(op: str, type_: str) -> list[Operand]:
    block = FORMATS[type_].block_size if type_ in FORMATS else 1
    n_cols = -(-K // block) * block
    return CASES[op][1](Operands(op, type_, n_cols))


def compute(op: str, operands: list[Operand], backend) -> dict[str, Arrays]:
    """The results of an op, without scratch memory."""
    return recompute(capture_of(op, operands), backend)


def capture_of(op: str, operands: list[Operand]) -> Capture:
    """A node as if it had been recorded, but for what it gave."""
    capture = Capture.__new__(Capture)
    capture.node, capture.operands = node_of(op, operands), [operand.arrays for operand in operands]
    capture.addresses = [0] * len(named_rows(capture.node))
    return capture


def node_of(op: str, operands: list[Operand]) -> Tensor:
    name = op_of(op)
    tensors = {id(operand): operand.tensor(name) for name, operand in zip(OPS[name].operands, operands)}  # the same one may be read twice
    return Graph().apply(name, *(tensors[id(operand)] for operand in operands), name="out", **CASES[op][2])


def compute_rows(op: str, operands: list[Operand], backend, parts: list[np.ndarray]) -> dict[str, Arrays]:
    """The results of rows, some after the others, in the order of the operands again; caches are handed on."""
    found, caches = [], {}
    operands = list(operands)
    for part in parts:
        mine = [operand.rows(part) for operand in operands]
        made = compute(op, mine, backend)
        for name, i in caches_of(node_of(op, mine)).items():
            operands[i] = Operand(operands[i].dtype, made[name], None, operands[i].shape)
            caches[name] = made.pop(name)
        found.append(made)
    order = np.argsort(np.concatenate(parts), kind="stable")
    rows = {name: tuple(np.concatenate([each[name][i] for each in found])[order] for i in range(len(found[0][name]))) for name in found[0]}
    return {**rows, **caches}


def caches_of(node: Tensor) -> dict[str, int]:
    """Names of results that are caches -> the operand each is."""
    return {tensor.name: next(i for i, source in enumerate(node.src) if source is tensor.base) for tensor in results(node) if tensor.base is not tensor}
