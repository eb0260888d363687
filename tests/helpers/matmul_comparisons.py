"""The matrix kernels of a machine (`cuda_simulator`) against their definitions, bit for bit (`op_runs`)."""
from zlib import crc32

import numpy as np

from ggml_py.check.evaluate import Value
from ggml_py.kernels.call import Call, Operand
from ggml_py.kernels.cuda import add_rms_norm_topk_moe
from ggml_py.kernels.cuda.dequantize import dequantize
from ggml_py.kernels.cuda.half_forms import half_form
from ggml_py.kernels.cuda.mmq import Block, block_shape, hopper_blocks
from ggml_py.kernels.cuda.mmq_few import FewShape, few_shape, qkv_shape
from ggml_py.quant.formats import CHUNK, FORMATS, format_of
from ggml_py.testing import assert_bitwise_equal
from op_runs import check_op, define, product_input, weight
from random_weights import random_weight

GUARD = 16                                     # elements behind an output that must stay as they are
EPS = np.float32(1e-5)
# Formats of which mmq_half forms products: with float scales, with integer ones by float16, and by int8
HALF_FORMATS = [fmt for fmt in FORMATS.values() if fmt.is_quantized and half_form(fmt)]
SCALED = [fmt for fmt in HALF_FORMATS if half_form(fmt).scaled]
SPLIT = [fmt for fmt in HALF_FORMATS if half_form(fmt).split]
PACKED = [fmt for fmt in HALF_FORMATS if fmt not in SCALED + SPLIT]
SPECIAL = np.float32([0, -0.0, 1e-45, 1e-38, 2.0**-101, 2.0**-100, 3e38, np.inf, -np.inf, np.nan, 65504, 1])


def seeded(name: str) -> np.random.Generator:
    return np.random.default_rng(crc32(name.encode()))


# Operands

def activations(n: int, k: int, rng) -> np.ndarray:
    """float32 [n, k] of many magnitudes."""
    return (rng.standard_normal((n, k)) * np.exp2(rng.integers(-6, 6, (n, k)))).astype(np.float32)


def edges(n: int, k: int, rng) -> np.ndarray:
    """float32 [n, k]: rows of many magnitudes, of values of SPECIAL, of zeros, of an amax around 2^-100, of a zero, a special
    value in its last column, one after the other."""
    x = activations(n, k, rng)
    x[1::4] = rng.choice(SPECIAL, x[1::4].shape)
    x[2::4] = 0
    x[3::4] *= np.float32(2.0**-104)
    x[2::8, -1] = rng.choice(SPECIAL)
    return x


def extreme_weight(fmt, n_rows: int, n_cols: int, fill: int, scales: int) -> np.ndarray:
    """Blocks of one byte throughout, but for float scales of 1 and integer scales of bytes `scales`: the largest sums."""
    blocks = np.full((n_rows, n_cols // fmt.block_size, fmt.type_size), fill, np.uint8)
    first = 0
    for field, size in fmt.fields:
        if field in ("d", "dmin", "m") and size == 2:
            blocks[..., first:first + 2] = np.float16([1]).view(np.uint8)
        elif field.startswith("scales") or field in ("sc", "sl", "sh"):
            blocks[..., first:first + size] = scales
            if fmt.name == "IQ1_M":
                set_scale_of_iq1_m(blocks[..., first:first + size], 0x3c00)
        first += size
    blocks, one = blocks.reshape(n_rows, -1), np.ones((n_rows, 1), np.float32 if fmt.header_bytes == 4 else np.float16)
    return np.concatenate([one.view(np.uint8), blocks], axis=1) if fmt.header_bytes else blocks


def set_scale_of_iq1_m(scales: np.ndarray, d) -> None:
    """d: uint16 of float16, whose nibbles become the upper ones of four words. scales: uint8 [.., 8]."""
    words = np.ascontiguousarray(scales).view(np.uint16)
    nibbles = np.asarray(d, np.uint16)[..., None] >> np.uint16([0, 4, 8, 12]) & 15
    scales[...] = (words & 0xfff | nibbles << 12).astype(np.uint16).view(np.uint8)


def weight_of_scales(fmt, n_cols: int, rng) -> np.ndarray:
    """Random blocks but for their float scales: zeros of both signs, subnormal, largest and special ones, those of float16 or of
    E8M0 or, four of them in a block, E4M3; d of every second block and m of the others, the same in a row, or that of the row."""
    names, sizes = zip(*fmt.header, *fmt.fields)
    first, scale = dict(zip(names, np.cumsum([0, *sizes]))), "d" if "d" in names else "e"
    scale = "scales" if fmt.name == "IQ1_M" else scale
    specials = {4: np.repeat(np.uint8([0, 1, 7, 8, 120, 126, 127, 128, 254, 255]), 4).view(np.uint32),
                2: np.uint16([0, 0x8000, 1, 0x83ff, 0x0400, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e01]),
                1: np.uint8([0, 1, 2, 3, 126, 253, 254, 255, 127, 128])}[2 if scale == "scales" else sizes[names.index(scale)]]
    rows, bytes_of = random_weight(fmt, len(specials), n_cols, rng), specials.view(np.uint8).reshape(len(specials), -1)
    if fmt.header:
        rows[:, first["d"]:first["d"] + specials.itemsize] = bytes_of
        return rows
    blocks = rows.reshape(len(specials), -1, fmt.type_size)
    if fmt.name == "IQ1_M":
        set_scale_of_iq1_m(blocks[:, ::2, first["scales"]:first["scales"] + 8], specials[:, None])
        return blocks.reshape(len(specials), -1)
    for parity, name in enumerate((scale, next((name for name in ("m", "dmin") if name in first), None))):
        if name:
            blocks[:, parity::2, first[name]:first[name] + specials.itemsize] = bytes_of[:, None]
    return blocks.reshape(len(specials), -1)


def random_matrix(name: str, type_: str, n_rows: int, n_cols: int, rng) -> Value:
    return weight(name, type_, random_weight(format_of(type_), n_rows, n_cols, rng), n_cols)


def biases_of(biased: bool, n_rows, rng) -> list[np.ndarray]:
    """Of a matrix of each number of rows, or none."""
    return [activations(1, m, rng)[0] for m in n_rows] if biased else []


# Plans

def few(machine, types, n_rows, n_cols, n) -> FewShape:
    """That of mmq_few, for one matrix or two."""
    return few_shape(tuple(types), n_rows, n_cols, n, machine.target.n_multiprocessors, machine.target.shared_limit)


def largest_block(machine, types) -> Block:
    """Of mmq."""
    blocks = hopper_blocks(tuple(types), machine.target.shared_limit) if machine.target.warpgroups else ()
    return blocks[0] if blocks else block_shape(tuple(types), machine.target.shared_limit)


# Products

def check_mul_mat(machine, type_, n_rows, n_cols, n, plan=None, x=None, blocks=None) -> None:
    """blocks: of the weight, as files have them."""
    name = f"mul_mat[{type_}, n_rows={n_rows}, n_cols={n_cols}, n={n}]"
    rng = seeded(name)
    w = random_matrix("w", type_, n_rows, n_cols, rng) if blocks is None else weight("w", type_, blocks, n_cols)
    check_op(machine, name, "mul_mat", w, product_input(type_, activations(n, n_cols, rng) if x is None else x), plan=plan)


def check_extremes(machine, type_, fill, scales, n=1, plan=None) -> None:
    """Sums at the bounds of the format table."""
    blocks = extreme_weight(format_of(type_), 1, CHUNK, fill, scales)
    check_mul_mat(machine, type_, 1, CHUNK, n, plan, np.full((n, CHUNK), 3, np.float32), blocks)


def check_mul_mat_glu(machine, act, types, n_rows, n_cols, n, biased, plan=None) -> None:
    """types: of gate and up."""
    name = f"mul_mat_glu[{act}, {types}, n_rows={n_rows}, n_cols={n_cols}, n={n}{', biased' * biased}]"
    rng = seeded(name)
    matrices = [random_matrix(f"w-{i}", t, n_rows, n_cols, rng) for i, t in enumerate(types)]
    biases, x = biases_of(biased, (n_rows,) * 2, rng), product_input(types[0], activations(n, n_cols, rng))
    check_op(machine, name, "mul_mat_glu", *matrices, x, *biases, plan=plan, act=act)


def check_mul_mat_qkv(machine, types, n_rows, n_cols, n, biased, plan=None) -> None:
    """types, n_rows: of the three matrices."""
    name = f"mul_mat_qkv[{types}, n_rows={n_rows}, n_cols={n_cols}, n={n}{', biased' * biased}]"
    rng = seeded(name)
    matrices, biases = [random_matrix(*each, n_cols, rng) for each in zip("qkv", types, n_rows)], biases_of(biased, n_rows, rng)
    check_op(machine, name, "mul_mat_qkv", *matrices, product_input(types[0], activations(n, n_cols, rng)), *biases, plan=plan)


def check_mmq_few_qkv(machine, types, n_rows, n_cols, n, shape=None) -> None:
    """In one kernel, whether or not it would be chosen. shape: another than its own."""
    shape = shape or qkv_shape(types, n_rows, n_cols, n, machine.target.n_multiprocessors, machine.target.shared_limit)
    check_mul_mat_qkv(machine, types, n_rows, n_cols, n, False, shape)


def check_add_rms_norm_mul_mat(machine, types, n_rows, n_cols, act=None, biased=False, kind=0, eps=EPS) -> None:
    """Of Q, K and V with n_rows each, or, with an activation, of gate and up. kind: which row of `edges` is added to an ordinary
    one."""
    sizes = f"n_rows={n_rows}, n_cols={n_cols}, kind={kind}, eps={eps}"
    name = f"add_rms_norm_mul_mat[{act or 'qkv'}, {types}, {sizes}{', biased' * biased}]"
    rng, rows = seeded(name), n_rows if act is None else (n_rows,) * 2
    matrices = [random_matrix(f"w-{i}", t, m, n_cols, rng) for i, (t, m) in enumerate(zip(types, rows))]
    x, y, w = edges(kind + 1, n_cols, rng)[kind:], activations(1, n_cols, rng), activations(1, n_cols, rng)[0]
    if kind > 1:
        y[:] = x[:, ::-1]
    op, params = ("add_rms_norm_mul_mat_qkv", {}) if act is None else ("add_rms_norm_mul_mat_glu", {"act": act})
    operands = x, y, w, *matrices, *biases_of(biased, rows, rng)
    check_op(machine, name, op, *operands, eps=np.float32(eps), **params)


def check_add_rms_norm_topk_moe(machine, type_, n_expert, n_cols, k=4, gating="softmax", norm=True, factor=1, bias_of=None,
                                most_warps=16, limit=None, kind=0) -> None:
    """Of a router whose every third row is its first one, so that there are ties. bias_of: None: there is no bias. most_warps:
    of a block. limit: as of `shape_of`, where it is not the machine's. kind: as of `check_add_rms_norm_mul_mat`."""
    name = (f"add_rms_norm_topk_moe[{type_}, {n_expert=}, {n_cols=}, {k=}, {gating}, {norm=}, {factor=}, {bias_of=}, "
            f"{most_warps=}, {limit=}, {kind=}]")
    rng = seeded(name)
    blocks = random_weight(format_of(type_), n_expert, n_cols, rng)
    blocks[::3] = blocks[0]
    x, y, w = edges(kind + 1, n_cols, rng)[kind:], activations(1, n_cols, rng), activations(1, n_cols, rng)[0]
    if kind > 1:
        y[:] = x[:, ::-1]
    operands = x, y, w, weight("router", type_, blocks, n_cols), *biases_of(bias_of is not None, (n_expert,), rng)
    limit = limit or machine.target.shared_limit - add_rms_norm_topk_moe.STATIC
    plan = add_rms_norm_topk_moe.shape_of(type_, n_expert, n_cols, limit, most_warps)
    check_op(machine, name, "add_rms_norm_topk_moe", *operands, plan=plan, eps=EPS, k=k, gating=gating, norm=norm, factor=factor,
             bias_of=bias_of or "choice")


def check_mul_mat_bias(machine, type_, n_rows, n_cols, n) -> None:
    name = f"mul_mat_bias[{type_}, n_rows={n_rows}, n_cols={n_cols}, n={n}]"
    rng = seeded(name)
    w, x = random_matrix("w", type_, n_rows, n_cols, rng), product_input(type_, activations(n, n_cols, rng))
    check_op(machine, name, "mul_mat_bias", w, x, *biases_of(True, (n_rows,), rng))


def check_mul_mat_argmax(machine, type_, n_rows, n_cols, n, zeros=False, plan=None) -> None:
    """The first token's largest product is that of two rows half the matrix apart; the others are its negative, of zeros, with a
    NaN, random. zeros: all products are, of both signs, by MXFP4's least scale."""
    name = f"mul_mat_argmax[{type_}, n_rows={n_rows}, n_cols={n_cols}, n={n}{', zeros' * zeros}]"
    rng = seeded(name)
    blocks, x = random_weight(format_of(type_), n_rows, n_cols, rng), activations(n, n_cols, rng)

    def product_of_first() -> np.ndarray:
        (product,), = define("mul_mat", weight("w", type_, blocks, n_cols), product_input(type_, x[:1]))
        return product[0]
    if zeros:
        blocks.reshape(n_rows, -1, format_of(type_).type_size)[..., 0] = 0
        x *= np.float32(2.0**-40)
        product = product_of_first()
        assert not product.any() and {False, True} == set(np.signbit(product)), name
    else:
        x[1:2] = -x[:1]
        x[2::4] = 0
        x[3::4, rng.integers(n_cols)] = np.nan
        best = product_of_first().argmax()
        blocks[(best + n_rows // 2) % n_rows] = blocks[best]
        product = product_of_first()
        assert (product == product.max()).sum() == 1 + (n_rows > 1), name
    check_op(machine, name, "mul_mat_argmax", weight("w", type_, blocks, n_cols), product_input(type_, x), plan=plan)


# Everything else

def check_quantize(machine, x, name) -> None:
    check_op(machine, name, "quantize", x)


def check_get_rows(machine, type_, n_rows, n_cols, ids) -> None:
    name = f"get_rows[{type_}, n_rows={n_rows}, n_cols={n_cols}, ids={list(ids)[:8]}]"
    check_op(machine, name, "get_rows", random_matrix("w", type_, n_rows, n_cols, seeded(name)), np.asarray(ids, np.int32))


def check_take_rows(machine, n_rows, n_cols, ids) -> None:
    name = f"take_rows[n_rows={n_rows}, n_cols={n_cols}, n={len(ids)}]"
    check_op(machine, name, "take_rows", activations(n_rows, n_cols, seeded(name)), np.asarray(ids, np.int32))


def check_dequantize(machine, type_, n_rows, n_cols, dtype, blocks=None) -> None:
    """dequantize is not an op: every row of get_rows, as `dtype`, f32 or f16."""
    name = f"dequantize[{type_}, n_rows={n_rows}, n_cols={n_cols}, {dtype}]"
    w = random_matrix("w", type_, n_rows, n_cols, seeded(name)) if blocks is None else weight("w", type_, blocks, n_cols)
    (expected,), = define("get_rows", w, np.arange(n_rows, dtype=np.int32))
    if dtype == "f16":
        with np.errstate(over="ignore"):  # to infinity
            expected = expected.astype(np.float16)
    out = machine.upload(np.full(expected.size + GUARD, np.nan, expected.dtype))
    operands = {"w": Operand(type_, w.shape, machine.upload(w.arrays[0])), "out": Operand(dtype, expected.shape, out)}
    machine.run(dequantize(Call("dequantize", name, machine.target, operands)))
    found = machine.download(out, expected.dtype, expected.size + GUARD)
    assert_bitwise_equal(found[:expected.size].reshape(expected.shape), expected, name)
    assert np.isnan(found[expected.size:]).all(), f"{name}: written behind the end"
    machine.free()


def float16_edges(n_cols: int) -> np.ndarray:
    """float32 weights [4, n_cols], around which the rounding to float16 changes: ties, the largest value, subnormals, zeros,
    NaN; and between them."""
    edges = np.float32([0, 2.0**-25, 1.5 * 2.0**-25, 2.0**-24, 1.5 * 2.0**-24, 2.0**-14, 1, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 65504,
                        65519.996, 65520, 3e38, np.inf])
    around = np.concatenate([edges, np.nextafter(edges, np.float32(0)), np.float32([np.nan])])
    return np.resize(np.concatenate([around, -around]), (4, n_cols))
