"""out[i, r] = sum over c of w[r, c] * x[i, c], in the order of docs/numerics.md, sections 3 and 4.

A unit of work is a tile of 32 weight rows and up to N_COLUMNS columns (rows of activations): `quantized_products`, or floats
here. Threads share the units of one or of several products as one job.
"""
from functools import lru_cache, partial

import numpy as np
from llvmlite import ir
from numba import float32, int16, int32, int64, types, uint8, uint32
from numba.extending import intrinsic

from ...quant import tile
from ...quant.activation import SUM_COLUMNS
from ...quant.device_functions import device, inlined
from ...quant.formats import CHUNK, format_of
from ...quant.words import f32
from ..compile import jit
from ..threads import THREADS, sharing
from ..together import code_of
from . import amx
from .few import few_product
from .limbs import TILE_COLUMNS, limbs_shape, split_activations
from .quantized_products import BLOCK, N_COLUMNS, pair_product, write
from .scratch import arrays_in, memory_of
from .tile_products import has_tiles, tile_product
from .unpack import COLUMN_BLOCK, ROWS, float_unpacker
from .vector import ISAS, add, available_isas, fma, instructions, stack, store

WIDTH = amx.COLUMNS  # columns of units are multiples of it
UNPACKING = 8    # columns that could be multiplied while a chunk is unpacked (5 for Q4_1, 17 for IQ3_S)
PARALLEL, GRAIN = 1 << 20, 1 << 21   # multiplications that threads share, about 10 us of work; those of a part at most
PARTS = 4        # of a thread at least

f32_2d = float32[:, ::1]
QUANTIZED = types.Tuple((uint32[::1], int16[:, ::1], f32_2d, int32[:, ::1], f32_2d))  # words, q, d, sums, out
FLOAT = types.Tuple((uint32[::1], f32_2d, f32_2d))                                    # words, x, out

# What units take: pointers. Arrays would be counted as references at each call, by all threads in one place.
u8_at, u32_at, f32_at = types.CPointer(uint8), types.CPointer(uint32), types.CPointer(float32)
OPERANDS = {  # words, q, d, sums, limbs, out, bytes of a chunk of limbs, blocks of the last chunk, n, n_chunks, m; words, x, out,
    # n, k, m
    QUANTIZED: types.Tuple((u32_at, u32_at, f32_at, u32_at, u8_at, f32_at, int64, int64, int64, int64, int64)),
    FLOAT: types.Tuple((u32_at, f32_at, f32_at, int64, int64, int64))}


# Units: what is multiplied by whom

@inlined
def parts(n):
    """Into how many units n columns are divided."""
    return (n + N_COLUMNS - 1) // N_COLUMNS


@inlined
def place(u, n, m):
    """Row tile, first column and one past the last of unit u: columns are divided into equal parts of whole WIDTHs, but for the
    last. All rows come with the first part, then all with the next: the activations of one stay in the second cache."""
    n_parts, n_tiles = parts(n), (m + ROWS - 1) // ROWS
    width = (n + WIDTH * n_parts - 1) // (WIDTH * n_parts) * WIDTH
    first = u // n_tiles * width
    return u % n_tiles, first, min(first + width, n)


def quantized_unit(fmt, isa):
    """(operands, u): unit u of out."""
    many = pair_product(fmt, isa)
    few = few_product(fmt, isa) if ISAS[isa].dot4 else many

    def unit(operands, u):
        n = operands[-3]
        row_tile, first, last = place(u, n, operands[-1])
        if n < BLOCK:
            few(operands, row_tile, first, last)
        else:
            many(operands, row_tile, first, last)
    return unit


def tile_unit(fmt, isa, tiles):
    """The same, by tiles."""
    product = tile_product(fmt, isa, tiles)

    def unit(operands, u):
        row_tile, first, last = place(u, operands[-3], operands[-1])
        product(operands, row_tile, first, last)
    return unit


# Float weights

@lru_cache(None)
def float_multiplier(isa, n_columns):
    """(weights, x, c, chunk, total): total[c + i] = add(total[c + i], acc) for the n_columns columns from c.
    x = (values, first, k): rows of k values, c counts from column `first`; total: float32 [columns][32]."""
    n_rows, zeros, load, rows, columns, *_ = instructions(isa, n_columns)

    @device
    def multiply(weights, x, c, chunk, total):
        values, first, k = x
        start = (first + c) * k + chunk * CHUNK
        for r in range(0, ROWS, n_rows):
            acc = zeros(weights)
            for i in range(min(CHUNK, k - chunk * CHUNK)):
                acc = fma(rows(weights, i * ROWS + r), columns(values, start + i, k), acc)
            t = c * ROWS + r
            store(total, t, ROWS, add(load(total, t, ROWS), acc))
    return multiply


def float_unit(fmt, isa):
    """(operands, u): unit u of out."""
    unpack, multiply_one, multiply = float_unpacker(fmt), float_multiplier(isa, 1), float_multiplier(isa, BLOCK)
    tile_words = tile.tile_bytes(fmt) // 4
    weight_words, total_words = stack(float32, CHUNK * ROWS), stack(float32, N_COLUMNS * ROWS)

    def unit(operands, u):
        words, values, out, n, k, m = operands
        n_chunks = (k + CHUNK - 1) // CHUNK
        row_tile, first, last = place(u, n, m)
        weights, total = weight_words(), total_words()
        x = values, first, k
        for i in range((last - first) * ROWS):
            total[i] = f32(0)
        whole = (last - first) // BLOCK * BLOCK
        for chunk in range(n_chunks):
            unpack(words, (row_tile * n_chunks + chunk) * tile_words, weights)
            for c in range(0, whole, BLOCK):
                multiply(weights, x, c, chunk, total)
            for c in range(whole, last - first):
                multiply_one(weights, x, c, chunk, total)
        write(total, row_tile, first, last, out, m)
    return unit


# Launch. Products that threads share as one job are rows of a table: one past the last unit, counted through all rows; the
# address of a unit's code; what units take (OPERANDS), as integers.

COLUMNS = 2 + len(OPERANDS[QUANTIZED].types)


@lru_cache(None)
def operands_in(is_quantized):
    """Device function (words i64, first): what units take, from word `first` on."""
    result = OPERANDS[QUANTIZED if is_quantized else FLOAT]

    @intrinsic
    def operands(typingctx, words, first):
        def codegen(context, builder, signature, args):
            start = builder.gep(context.make_array(signature.args[0])(context, builder, args[0]).data, [args[1]])
            loaded = [builder.load(builder.gep(start, [ir.IntType(64)(i)])) for i in range(len(result.types))]
            return context.make_tuple(builder, result, [
                builder.inttoptr(word, context.get_value_type(t)) if isinstance(t, types.CPointer) else word
                for word, t in zip(loaded, result.types)])
        return result(words, types.int64), codegen
    return operands


@intrinsic
def call(typingctx, address, operands, u):
    """Calls the function (operands, int64) -> None that was compiled for these types to code at `address`."""
    def codegen(context, builder, signature, args):
        argtypes = signature.args[1:]
        function = builder.inttoptr(args[0], context.call_conv.get_function_type(types.none, argtypes).as_pointer())
        # units raise nothing: no status to pass on
        context.call_conv.call_function(builder, function, types.none, argtypes, args[1:])
        return context.get_dummy_value()
    return types.none(types.int64, operands, types.int64), codegen


@inlined
def parts_of(control, n_units, n_multiplications):
    """How many parts threads share. A part is of neighbouring units: its thread has asked for the next tile when it comes to
    it."""
    return 1 if n_multiplications < PARALLEL else min(n_units, max(PARTS * control[THREADS], n_multiplications // GRAIN))


@lru_cache(None)
def runner(is_quantized):
    """(table i64 [products, COLUMNS], n_multiplications): all units of all products, in parallel where that pays. One loop for
    all formats: with its own each format would take twice as long to compile."""
    operands = operands_in(is_quantized)

    @inlined
    def units_of_part(i, args):
        table, n_parts = args
        n_units, row = table[table.shape[0] - 1, 0], 0
        for u in range(i * n_units // n_parts, (i + 1) * n_units // n_parts):
            while u >= table[row, 0]:
                row += 1
            call(table[row, 1], operands(table, row * COLUMNS + 2), u - (table[row - 1, 0] if row else 0))

    each = sharing(units_of_part)

    @jit(key=is_quantized, parallel=True)
    def run(control, table, n_multiplications):
        if is_quantized:
            _, q, _, sums, limbs, _, chunk_bytes, _, n, n_chunks, _ = operands(table, 2)
            if chunk_bytes > 0:
                split_activations(control, q, sums, limbs, chunk_bytes, n, n_chunks)
        n_parts = parts_of(control, table[table.shape[0] - 1, 0], n_multiplications)
        each(control, n_parts, (table, n_parts))
    return run


class Products:
    """A step: out = w x of several matrices with the same x, which threads share as one job."""

    def __init__(self, matrices, x, n_cols: int, limbs=None, isa: str | None = None, tiles=None):
        """matrices: of each (format, words u32 of its tiles, out f32 [n, m]); x: quantized activations (q, d, sums) of n_cols
        columns, or (values f32 [n, k],) for float weights. limbs: memory u8 for those of the activations, of `limbs_shape`, where
        `limbs_for` says so; of many columns products are by tiles then, where they can be. isa: a name in vector.ISAS, by default
        the best. tiles: by which, as of `amx`; None: `tiles_for`. The bits are the same with each."""
        many = limbs is not None and len(x[0]) >= TILE_COLUMNS
        units = [compiled_unit(name, isa, (tiles or tiles_for(format_of(name), len(x[0]), isa)) if many else None)
                 for name, _, _ in matrices]
        self.table, self.n_multiplications, n_units = np.zeros((len(matrices), COLUMNS), np.int64), 0, 0
        for row, (address, fmt, _), (_, words, out) in zip(self.table, units, matrices):
            operands = operands_of(fmt, words, x, limbs, out, n_cols)
            (n, m), k = out.shape, x[0].shape[1]
            n_chunks = -(-k // CHUNK)
            needed = -(-m // ROWS) * n_chunks * tile.tile_bytes(fmt) // 4
            assert words.size == needed, (f"mul_mat: {fmt.name} tiles of {m} rows x {n_chunks} chunks are {needed} words, "
                                          f"got {words.size}")
            n_parts = parts.py_func(n)
            n_units += -(-m // ROWS) * n_parts
            self.n_multiplications += m * k * (n + UNPACKING * n_parts)
            row[:2 + len(operands)] = n_units, address, *operands
        self.kernel = partial(runner(units[0][1].is_quantized), self.table, self.n_multiplications)
        self.kept = matrices, x, limbs, units  # the memory and the code that rows of the table name

    def __call__(self) -> None:
        self.kernel()


def operands_of(fmt, words, x, limbs, out, n_cols: int) -> list[int]:
    """What units of these arrays take, as integers. n_cols: of the activations, of which more may be there as zeros."""
    kinds = QUANTIZED if fmt.is_quantized else FLOAT
    arrays = words, *x, out
    found = [(array.dtype, array.ndim) for array in arrays]
    allowed = [(np.dtype(kind.dtype.name), kind.ndim) for kind in kinds]
    assert found == allowed and all(array.flags.c_contiguous for array in arrays), (
        f"mul_mat: {fmt.name}: arrays {found}, not {allowed}, or not contiguous")
    (n, k), shapes = x[0].shape, [array.shape for array in (*x[1:], out[:, 0])]
    assert shapes == ([(n, k // CHUNK), (n, k // SUM_COLUMNS), (n,)] if fmt.is_quantized else [(n,)]), (
        f"mul_mat: {fmt.name}: x {x[0].shape}, {shapes}")
    addresses = [array.ctypes.data for array in arrays]
    if not fmt.is_quantized:
        return [*addresses, n, k, out.shape[1]]
    *addresses, to = addresses
    of_limbs = (0, to, 0) if limbs is None else (limbs.ctypes.data, to, limbs[0].size)
    n_blocks = -(-n_cols // COLUMN_BLOCK) - (k - CHUNK) // COLUMN_BLOCK  # of the last chunk
    return [*addresses, *of_limbs, n_blocks, n, k // CHUNK, out.shape[1]]


@lru_cache(None)
def compiled_unit(format_name: str, isa: str | None = None, tiles=None):
    """(address of the code that `call` calls, format, the function whose code it is) of a weight format; isa as of `Products`;
    tiles: by which, where the format has them, or None."""
    fmt, isa = format_of(format_name, "mul_mat"), known(isa)
    arrays, make = (QUANTIZED, quantized_unit) if fmt.is_quantized else (FLOAT, float_unit)
    if tiles and has_tiles(fmt):
        make = partial(tile_unit, tiles=tiles)
    unit = jit(key=(fmt.name, isa, tiles and tiles.__name__))(make(fmt, isa))
    return code_of(unit, (OPERANDS[arrays], int64)), fmt, unit


def known(isa: str | None) -> str:
    """A name in vector.ISAS, by default the best one."""
    if isa is not None and isa not in ISAS:
        raise ValueError(f"mul_mat: unknown instruction set {isa!r}; known: {', '.join(ISAS)}")
    return isa or available_isas()[0]


def mul_mat_arrays(format_name: str, isa: str | None = None, n_cols: int | None = None):
    """The product for a weight format: (words, q, d, sums, out), or (words, x, out) for F32, F16 and BF16; as of `Products`,
    without tiles where an instruction set is named. n_cols: all that x has by default."""
    fmt = format_of(format_name, "mul_mat")
    known(isa)

    def product(words, *x_and_out):
        *x, out = x_and_out
        limbs = limbs_for([fmt], len(out), x[0].shape[-1], isa)
        Products([(format_name, words, out)], x, n_cols or x[0].shape[-1], limbs and np.empty(limbs[1], limbs[0]), isa)()
    return product


def tiles_for(fmt, n: int, isa: str | None = None):
    """By which tiles, as of `amx`, a product of n columns is; None where it is without."""
    there = n >= TILE_COLUMNS and isa is None and amx.available() and ISAS[known(isa)].dot4  # the last: levels come as limbs
    return amx.tiles if there and has_tiles(fmt) else None


def limbs_for(fmts, n: int, n_cols: int, isa: str | None = None, least: int | None = None):
    """(dtype, shape) of the limbs of n rows of activations; None where no product with weights of these formats takes them.
    least: columns of the smallest product, which has all n by default."""
    few = (n if least is None else least) < BLOCK and ISAS[known(isa)].dot4
    needed = any(fmt.is_quantized and (few or tiles_for(fmt, n, isa)) for fmt in fmts)
    return (np.uint8, limbs_shape(n, -(-n_cols // CHUNK))) if needed else None


def limbs_of(call, weights, n: int | None = None, least: int | None = None):
    """The same for the activations call.x, or for n like them."""
    return limbs_for([format_of(w.dtype, call.op) for w in weights], n or call.x.n_rows, call.x.n_cols, least=least)


def products_of(call, matrices, limbs) -> Products:
    """matrices: pairs of weights and the array of their result."""
    return Products([(w.dtype, w.data, out) for w, out in matrices], call.x.factors, call.x.n_cols, limbs)


def scratch(call):
    return memory_of([limbs_of(call, [call.w])])


def mul_mat(call):
    """As in kernels/reference."""
    return products_of(call, [(call.w, call.out.data)], *arrays_in(call.scratch, [limbs_of(call, [call.w])]))
