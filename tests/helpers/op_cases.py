"""One case for each op of the op table: operands by what they are, so that any of its rows can be computed alone.
A new op needs a line in CASES."""
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np
from op_runs import cache, plain, product_input, weight

from ggml_py.base.storage import CACHE_TYPES, Arrays
from ggml_py.check.evaluate import Value, evaluate, make_node
from ggml_py.check.recording import Capture
from ggml_py.ops.table import OPS
from ggml_py.quant.formats import FORMATS, format_of
from random_weights import random_weight

N, M, K = 37, 70, 544          # rows, rows of weights, columns (two chunks and a part; whole blocks of 32)
HEADS, HEADS_KV, DIM, CELLS = 4, 2, 64, 3 * 48
EXPERTS, ROUTED = 3, 40         # matrices of a stack; columns of router logits
WEIGHTS = [fmt.name for fmt in FORMATS.values() if fmt.planes]


@dataclass(eq=False)
class Operand(Value):
    """axis: of the rows that are computed; None: the operand is whole for all of them."""
    axis: int | None = None

    def rows(self, chosen) -> "Operand":
        if self.axis is None:
            return self
        shape = *self.shape[:self.axis], len(chosen), *self.shape[self.axis + 1:]
        return replace(self, shape=shape, arrays=tuple(array.take(chosen, self.axis) for array in self.arrays))


class Runs(Operand):
    """Of each row a run of one token (`ops.primitive`), which is where the row is among those that are computed."""

    def rows(self, chosen) -> "Operand":
        found = super().rows(chosen)
        found.arrays[0][:, 0] = np.arange(len(chosen))
        return found


def whole(value: Value) -> Operand:
    return Operand(**vars(value))


def in_rows(value: Value, axis: int = 0) -> Operand:
    return Operand(**vars(value), axis=axis)


class Operands:
    """What the lines of CASES are made of; every array has a seed of its own. type_: of weights and caches."""

    def __init__(self, op: str, type_: str, n_cols: int):
        self.rng, self.type, self.k = np.random.default_rng(crc32(f"{op} {type_}".encode())), type_, n_cols

    def floats(self, n: int, k: int = 0) -> np.ndarray:
        x = self.rng.standard_normal((n, k or self.k)) * np.exp2(self.rng.integers(-12, 12, (n, 1)))
        x[1::9] = 0
        return x.astype(np.float32)

    def x(self, k: int = 0) -> Operand:
        return in_rows(plain("x", self.floats(N, k)))

    def act(self) -> Operand:
        return in_rows(product_input("Q8_0", self.floats(N)))

    def input(self) -> Operand:
        """What a product with a weight of the type takes."""
        return in_rows(product_input(self.type, self.floats(N)))

    def table(self) -> Operand:
        return whole(plain("table", self.floats(M)))

    def vector(self, n: int = 0) -> Operand:
        return whole(plain("vector", self.rng.standard_normal(n or self.k).astype(np.float32)))

    def matrix(self) -> Operand:
        return whole(weight("w", self.type, random_weight(format_of(self.type), M, self.k, self.rng), self.k))

    def matrices(self, n: int = EXPERTS) -> Operand:
        blocks = random_weight(format_of(self.type), n * M, self.k, self.rng)
        return whole(weight("w", self.type, blocks.reshape(n, M, -1), self.k))

    def experts(self, least: int = 0) -> Operand:
        """One of each token, so that rows of the result are rows of tokens. least: -1 for tokens without."""
        return in_rows(plain("ids", self.rng.integers(least, EXPERTS, (N, 1)).astype(np.int32)))

    def counts(self) -> Operand:
        return whole(plain("counts", self.rng.integers(0, 99, ROUTED).astype(np.int32)))

    def slots(self) -> Operand:
        """Of three of the columns."""
        slots = np.full(ROUTED, -1, np.int32)
        slots[self.rng.permutation(ROUTED)[:3]] = range(3)
        return whole(plain("slots", slots))

    def biases(self) -> Operand:
        return whole(plain("biases", self.floats(EXPERTS, M)))

    def columns(self, k: int, n: int) -> Operand:
        return in_rows(plain("columns", self.rng.integers(0, k, (N, n)).astype(np.int32)))

    def draws(self) -> Operand:
        """Settings of draws: top_k, temperature (of some 0), top_p, min_p, u."""
        low, high = [1, -0.2, 0.5, 0, 0], [41, 2, 1, 0.1, 1]
        settings = self.rng.uniform(low, high, (N, 5)).clip(0)
        settings[:, 0] = np.floor(settings[:, 0])
        return in_rows(plain("settings", settings))

    def states(self, k: int) -> Operand:
        """Two for each row: one that is read, or none, and one that is written."""
        return whole(plain("states", self.floats(2 * N, k)))

    def runs(self) -> Operand:
        rows = self.rng.permutation(2 * N).reshape(2, N)
        runs = np.stack([np.arange(N), np.ones(N), np.where(np.arange(N) % 4, rows[0], -1), rows[1]], axis=1)
        return Runs(**vars(plain("runs", runs.astype(np.int32))), axis=0)

    def decays(self) -> Operand:
        return in_rows(plain("decays", -self.rng.random((N, HEADS)).astype(np.float32)))

    def taps(self) -> Operand:
        return whole(plain("taps", self.rng.standard_normal((M, 4)).astype(np.float32)))

    def ids(self, most: int = M) -> Operand:
        return in_rows(plain("ids", self.rng.integers(0, most, N).astype(np.int32)))

    def angles(self) -> Operand:
        a = self.rng.uniform(0, 6, (48, DIM // 2))
        return whole(plain("angles", np.stack([np.cos(a), np.sin(a)], axis=2).astype(np.float32)))

    def cache(self, k: int = HEADS_KV * DIM) -> Operand:
        """A cache whose every cell is written."""
        return whole(cache("cache", self.type, self.floats(CELLS, k)))

    def cells(self) -> Operand:
        return in_rows(plain("cells", self.rng.permutation(CELLS)[:N]))

    def addresses(self, *n_cols: int) -> Operand:
        """Of the same cells in caches of so many columns, each from address 0 on: a row of the table for each cache, behind one
        that nobody reads."""
        cells, (block, size, _) = self.rng.permutation(CELLS)[:N], CACHE_TYPES[self.type]
        return in_rows(plain("addresses", np.stack([np.full(N, -1), *(cells * (k // block * size) for k in n_cols)])), 1)

    def qkv_and_caches(self) -> list[Operand]:
        """What rope_set_rows takes before the cells."""
        return [self.x(Q), self.x(KV), self.x(KV), self.ids(48), self.angles(), self.cache(), self.cache()]

    def layer(self) -> list[Operand]:
        """What dense_layer takes: each row is a token of a sequence of its own."""
        def matrix(m: int, k: int) -> Operand:
            return whole(weight("w", self.type, random_weight(format_of(self.type), m, k, self.rng), k))
        n_ctx, n_ff = 48, 320
        pos, seq = self.rng.integers(0, n_ctx, N).astype(np.int32), np.arange(N, dtype=np.int32)
        present = (self.rng.random((N, n_ctx)) < 0.9).astype(np.uint8)
        present[seq, pos] = 1
        caches = [whole(cache(f"cache_{part}", "f16", self.floats(N * n_ctx, KV))) for part in "kv"]
        return [self.x(), self.x(), self.vector(), matrix(Q, self.k), matrix(KV, self.k), matrix(KV, self.k),
                in_rows(plain("pos", pos)), self.angles(), *caches, in_rows(plain("dst", np.int64(seq) * n_ctx + pos)),
                in_rows(plain("seq", seq)), whole(plain("present", present)), matrix(self.k, Q), self.vector(),
                matrix(n_ff, self.k), matrix(n_ff, self.k), matrix(self.k, n_ff)]

    def present(self) -> Operand:
        return whole(plain("present", (self.rng.random((3, 48)) < 0.9).astype(np.uint8)))


KV, Q = HEADS_KV * DIM, HEADS * DIM
WEIGHT, CACHE, PLAIN = WEIGHTS, list(CACHE_TYPES), [""]
GATES = ["Q4_K", "Q8_0", "F16"]  # mul_mat has them all
NORMED = ["Q4_K", "Q8_0"]        # products of a norm's activations
LAYERS = ["Q4_1", "Q8_0"]

# op, and what a further case of it is -> (types that it is tried with, its operands, its parameters)
CASES = {
    "get_rows": (WEIGHT, lambda o: [o.matrix(), o.ids()], {}),
    "take_rows": (PLAIN, lambda o: [o.table(), o.ids()], {}),
    "quantize": (PLAIN, lambda o: [o.x()], {}),
    "mul_mat": (WEIGHT, lambda o: [o.matrix(), o.input()], {}),
    "mul_mat_qkv": (GATES, lambda o: [o.matrix(), o.matrix(), o.matrix(), o.input(), *(o.vector(M) for _ in range(3))], {}),
    "mul_mat_glu": (GATES, lambda o: [o.matrix(), o.matrix(), o.input(), o.vector(M), o.vector(M)], {"act": "silu"}),
    "mul_mat_bias": (GATES, lambda o: [o.matrix(), o.input(), o.vector(M)], {}),
    "rms_norm": (PLAIN, lambda o: [o.x(), o.vector()], {"eps": 1e-5}),
    "layer_norm": (PLAIN, lambda o: [o.x(), o.vector()], {"eps": 1e-5}),
    "layer_norm: bias": (PLAIN, lambda o: [o.x(), o.vector(), o.vector()], {"eps": 1e-5}),
    "rms_norm_act": (PLAIN, lambda o: [o.x(), o.vector()], {"eps": 1e-5}),
    "add_rms_norm": (PLAIN, lambda o: [o.x(), o.x(), o.vector()], {"eps": 1e-5}),
    "add_rms_norm_act": (PLAIN, lambda o: [o.x(), o.x(), o.vector()], {"eps": 1e-5}),
    "add_rms_norm_and_act": (PLAIN, lambda o: [o.x(), o.x(), o.vector()], {"eps": 1e-5}),
    "add_rms_norm_mul_mat_qkv": (NORMED,
                                 lambda o: [o.x(), o.x(), o.vector(), *(o.matrix() for _ in range(3)),
                                            *(o.vector(M) for _ in range(3))],
                                 {"eps": 1e-5}),
    "add_rms_norm_mul_mat_glu": (NORMED, lambda o: [o.x(), o.x(), o.vector(), o.matrix(), o.matrix(), o.vector(M), o.vector(M)],
                                 {"eps": 1e-5, "act": "silu"}),
    "add_rms_norm_topk_moe": (["F32", "BF16"], lambda o: [o.x(), o.x(), o.vector(), o.matrix(), o.vector(M)],
                              {"eps": 1e-5, "k": 5, "gating": "sigmoid", "norm": True, "factor": 2.5}),
    "dense_layer": (LAYERS, lambda o: o.layer(), {"n_head": HEADS, "n_head_kv": HEADS_KV, "neox": False, "scale": DIM**-0.5,
                                                  "eps": 1e-5}),
    "add": (PLAIN, lambda o: [o.x(), o.x()], {}),
    "mul": (PLAIN, lambda o: [o.x(), o.vector()], {}),
    "scale": (PLAIN, lambda o: [o.x()], {"factor": 0.3}),
    "softcap": (PLAIN, lambda o: [o.x()], {"cap": 0.7}),
    "swiglu": (PLAIN, lambda o: [o.x(), o.x()], {}),
    "geglu": (PLAIN, lambda o: [o.x(), o.x()], {}),
    "reglu": (PLAIN, lambda o: [o.x(), o.x()], {}),
    "swiglu_act": (PLAIN, lambda o: [o.x(), o.x()], {}),
    "rms_norm_swiglu_act": (PLAIN, lambda o: [o.x(), o.x(), o.vector(32)], {"eps": 1e-5}),
    "mul_sigmoid_act": (PLAIN, lambda o: [o.x(), o.x()], {}),
    "weighted_sum_gated": (PLAIN, lambda o: [o.x(), o.x(1), o.x(), o.x(1)], {}),
    "weighted_sum_biased": (PLAIN, lambda o: [o.x(M), o.biases(), o.experts(), o.x(1)], {}),
    "weighted_sum_biased: some of no expert": (PLAIN, lambda o: [o.x(M), o.biases(), o.experts(-1), o.x(1)], {"may_skip": True}),
    "rope": (PLAIN, lambda o: [o.x(Q), o.ids(48), o.angles()], {"n_head": HEADS, "neox": True}),
    "set_rows": (CACHE, lambda o: [o.cache(), o.x(KV), o.cells()], {}),
    "cpy_rows": (CACHE, lambda o: [o.cache(), o.x(KV)], {"cell": 5}),
    "cpy_rows_indirect": (CACHE, lambda o: [o.cache(), o.x(KV), o.addresses(KV)], {"slot": 1}),
    "rope_set_rows": (CACHE, lambda o: [*o.qkv_and_caches(), o.cells()],
                      {"n_head": HEADS, "n_head_kv": HEADS_KV, "neox": False}),
    "rope_set_rows: norms, by address": (
        CACHE, lambda o: [*o.qkv_and_caches(), o.addresses(KV, KV), o.vector(DIM), o.vector(DIM)],
        {"n_head": HEADS, "n_head_kv": HEADS_KV, "neox": True, "eps": 1e-5, "slot_k": 1, "slot_v": 2}),
    "flash_attn_ext": (CACHE, lambda o: [o.x(Q), o.cache(), o.cache(), o.ids(3), o.ids(48), o.present()],
                       {"n_head": HEADS, "n_head_kv": HEADS_KV, "scale": DIM**-0.5}),
    "flash_attn_ext: window, sinks": (CACHE,
                                      lambda o: [o.x(Q), o.cache(), o.cache(), o.ids(3), o.ids(48), o.present(), o.vector(HEADS)],
                                      {"n_head": HEADS, "n_head_kv": HEADS_KV, "scale": DIM**-0.5, "window": 20}),
    "flash_attn_ext: cap": (CACHE, lambda o: [o.x(Q), o.cache(), o.cache(), o.ids(3), o.ids(48), o.present()],
                            {"n_head": HEADS, "n_head_kv": HEADS_KV, "scale": DIM**-0.5, "softcap": 1.5}),
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
    "topk_moe: bias of logits": (PLAIN, lambda o: [o.x(ROUTED), o.vector(ROUTED)],
                                 {"k": 5, "gating": "softmax_of_chosen", "norm": False, "bias_of": "logits"}),
    "mul_mat_id": (GATES, lambda o: [o.matrices(), o.input(), o.experts()], {}),
    "mul_mat_id: some of no expert": (GATES, lambda o: [o.matrices(), o.input(), o.experts(-1)], {"may_skip": True}),
    "mul_mat_id_glu": (GATES, lambda o: [o.matrices(), o.matrices(), o.input(), o.experts(), o.biases(), o.biases()],
                       {"act": "swiglu_oai", "alpha": 1.702, "limit": 7.0}),
    "mul_mat_id_glu: some of no expert": (
        GATES, lambda o: [o.matrices(), o.matrices(), o.input(), o.experts(-1), o.biases(), o.biases()],
        {"act": "silu", "may_skip": True}),
    "mul_mat_heads": (GATES, lambda o: [o.matrices(1), o.input()], {}),
    "softplus": (PLAIN, lambda o: [o.x()], {}),
    "l2_norm": (PLAIN, lambda o: [o.x()], {"n_head": 3, "dim": 32, "eps": 1e-6}),
    "gelu": (PLAIN, lambda o: [o.x()], {}),
    "relu_sqr": (PLAIN, lambda o: [o.x()], {}),
    "relu_sqr_act": (PLAIN, lambda o: [o.x()], {}),
    "ssm_conv": (PLAIN, lambda o: [o.states(3 * M), o.x(M), o.taps(), o.runs()], {}),
    "ssm_conv: bias, no activation": (PLAIN, lambda o: [o.states(3 * M), o.x(M), o.taps(), o.runs(), o.vector(M)],
                                      {"activation": "none"}),
    "ssm_scan": (PLAIN, lambda o: [o.states(HEADS * 16 * 32), o.x(HEADS * 16 + 2 * HEADS_KV * 32), o.x(HEADS),
                                   *(o.vector(HEADS) for _ in range(3)), o.runs()],
                 {"n_head": HEADS, "n_group": HEADS_KV, "n_state": 32}),
    "gated_delta_net": (PLAIN, lambda o: [o.states(HEADS * 16 * 16), o.x((2 * HEADS_KV + HEADS) * 16), o.decays(), o.decays(),
                                          o.runs()],
                        {"n_head_k": HEADS_KV, "n_head_v": HEADS, "tiled": False}),
    "gated_delta_net_gates": (PLAIN, lambda o: [o.states(HEADS * 16 * 16), o.x((2 * HEADS_KV + HEADS) * 16), o.decays(),
                                                o.vector(HEADS), o.vector(HEADS), o.decays(), o.runs()],
                              {"n_head_k": HEADS_KV, "n_head_v": HEADS, "tiled": True}),
    "add_id": (PLAIN, lambda o: [o.x(M), o.biases(), o.experts()], {}),
    "scale_id": (PLAIN, lambda o: [o.x(M), o.vector(EXPERTS), o.experts()], {}),
    "add_id: some of no expert": (PLAIN, lambda o: [o.x(M), o.biases(), o.experts(-1)], {"may_skip": True}),
    "scale_id: some of no expert": (PLAIN, lambda o: [o.x(M), o.vector(EXPERTS), o.experts(-1)], {"may_skip": True}),
    "split_ids": (PLAIN, lambda o: [o.counts(), o.columns(ROUTED, 5), o.slots()], {"n_slots": 3}),
    "pick_rows": (PLAIN, lambda o: [o.x(), o.x(), o.experts(-1)], {}),
    "weighted_sum": (PLAIN, lambda o: [o.x(), o.x(1)], {}),
    "swiglu_oai": (PLAIN, lambda o: [o.x(), o.x()], {"alpha": 1.702, "limit": 7.0}),
    "slice_heads": (PLAIN, lambda o: [o.x(Q)], {"n_head": HEADS, "first": 8, "n": 20}),
    "concat_heads": (PLAIN, lambda o: [o.x(Q), o.x(DIM)], {"n_head": HEADS, "n_head_y": 1}),
    "argmax": (PLAIN, lambda o: [o.x()], {}),
    "draw": (PLAIN, lambda o: [o.x(), o.draws()], {}),
    "log_soft_max": (PLAIN, lambda o: [o.x(), o.columns(K, 3)], {}),
    "mul_mat_argmax": (GATES, lambda o: [o.matrix(), o.input()], {}),
    "cpy": (PLAIN, lambda o: [o.x(), o.x()], {}),
    "cpy: activations": (PLAIN, lambda o: [o.act(), o.act()], {}),
}
WHOLE = {"cpy_rows"}  # whose rows lie where the first one does
OF_THE_CPU = {case for case, (_, _, params) in CASES.items() if params.get("may_skip")}  # kernels of a GPU refuse them
SINGLE = {"add_rms_norm_mul_mat_qkv", "add_rms_norm_mul_mat_glu", "add_rms_norm_topk_moe", "dense_layer"}  # of one row


def op_of(case: str) -> str:
    return case.split(":")[0]


def op_cases():
    """(op, and what a further case of it is, type) of every case."""
    return [(op, type_) for op, (types, _, _) in CASES.items() for type_ in types]


def operands_of(op: str, type_: str) -> list[Operand]:
    block = FORMATS[type_].block_size if type_ in FORMATS else 1
    n_cols = -(-K // block) * block
    return CASES[op][1](Operands(op, type_, n_cols))


def compute(case: str, operands: list[Operand], backend) -> dict[str, Arrays]:
    """The results by name."""
    op = op_of(case)
    return dict(zip(OPS[op].results, evaluate(backend, op, operands, CASES[case][2])))


def capture_of(case: str, operands: list[Operand], backend) -> Capture:
    """The case's node as if it had been recorded."""
    op, params = op_of(case), CASES[case][2]
    node, _ = make_node(backend, op, operands, params, "out")
    arrays = evaluate(backend, op, operands, params)
    results = {result.name: Value(result.name, result.dtype, result.shape, made) for result, made in zip(node.results, arrays)}
    return Capture(node.name, op, params, operands, results, backend.kernel_name(node), backend.device)


def compute_rows(case: str, operands: list[Operand], backend, parts: list[np.ndarray]) -> dict[str, Arrays]:
    """The results of rows, some after the others, in the order of the operands again; states that are whole for all rows are
    handed on."""
    op, operands, found = OPS[op_of(case)], list(operands), []
    states = {name: i for i, name in enumerate(op.operands[:len(operands)]) if name in op.results and operands[i].axis is None}
    for part in parts:
        found.append(compute(case, [operand.rows(part) for operand in operands], backend))
        for name, i in states.items():
            operands[i] = replace(operands[i], arrays=found[-1][name])
    order = np.argsort(np.concatenate(parts), kind="stable")

    def joined(name: str) -> Arrays:
        return tuple(np.concatenate(arrays)[order] for arrays in zip(*(each[name] for each in found), strict=True))
    return {name: found[-1][name] if name in states else joined(name) for name in op.results}
