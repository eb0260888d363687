"""Products of a warpgroup on Hopper's tensor cores: D = A B or D + A B of int8, A 64 x 32 in registers, B 32 x n in shared memory
(PTX ISA, "wgmma": m64n8k32 to m64n256k32, target sm_90a); or of float16, A 64 x 16 and B 16 x n (m64n8k16 to m64n256k16), whose
sums are float32, and exact where all are integers and no partial sum can pass 2^24 (docs/kernels-log.md).

A and D are fragments as of `ptx.mma32`, warp w of the four with rows 16 w .. 16 w + 15; D in eights of columns: D[4 i + k] of a
lane is C[k] of the columns 8 i .. 8 i + 7. B is rows of 128 bytes, eight to an *atom* of 1024 bytes on 1024 bytes, piece p of 16
bytes of row r at place p ^ r (128-byte swizzle); atoms of the next eight columns of B follow each other. A product takes 32 bytes
of each row. Or B has no swizzle (`start_unswizzled`) and is what one product takes: of eight columns the first 16 bytes of each,
then the other 16. So may A lie in shared memory (`start_tiles`), of all rows.

A product runs on while the warps do: between `start` and `wait` neither D nor A may be touched, and B must stay. What was copied
to shared memory is seen behind `fence`.
"""
from functools import lru_cache
from typing import NamedTuple

from llvmlite import ir
from numba import types

from .ptx import SIMULATED, _check, _effect, _named, _shared_address, _void, device, i32, redux_max

ATOM_WORDS = 256     # eight columns
# Words, high and low, to which the place is added: 128-byte swizzle, atoms 1024 bytes apart
DESCRIPTOR = 1 << 30 | 8 * 128 >> 4, 1 << 16
PLACE = 4            # words that a place counts
PAIR_ROWS = 64       # of A in shared memory: two row tiles
ADDRESS = 0x3fff     # its bits that are an address

if SIMULATED:
    from . import simulator
else:
    from numba.cuda.extending import intrinsic

# Copies to shared memory, which a thread waited for, are seen by products
fence = _effect("fence", "fence.proxy.async.shared::cta;")


@lru_cache(None)
def registers(n: int, more: int, fewer: int):
    """Two intrinsics, (), for a kernel of n warpgroups, which starts with what ptxas leaves to so many threads, in eights. By the
    second one the last warpgroup keeps `fewer` registers a thread. What it gives up, all warps of the others take by the first
    one, `more`, and wait until it is there."""
    assert more % 8 == fewer % 8 == 0 and 24 <= fewer <= more <= 256, (more, fewer)
    assert (n - 1) * more + fewer <= n * (65536 // (128 * n) // 8 * 8), (n, more, fewer)
    return (_effect("more_registers", f"setmaxnreg.inc.sync.aligned.u32 {more};"),
            _effect("fewer_registers", f"setmaxnreg.dec.sync.aligned.u32 {fewer};"))


class Products(NamedTuple):
    """The intrinsics of products with n columns of B, whose D is a local array of n / 2 int32."""
    start: object         # (d, array, place, a0, a1, a2, a3, keep): starts D = A B, or D + A B if keep; B begins at `place` of
                          # the array
    start_u: object       # the same with A of uint8
    wait: object          # (d): behind it D is what the product left there
    wait_but_one: object  # the same, but for the product started last
    start_tiles: object   # (d, array, place, tiles): starts D = A B, A in shared memory, too (`tiles_place`)


class HalfProducts(NamedTuple):
    """The same of float16, with D a local array of n / 2 float32. Words of A and B are pairs of float16."""
    start: object
    start_unswizzled: object  # (d, array, place, a0, a1, a2, a3): starts D = A B, B without swizzle, of `unswizzled_place`
    wait: object
    wait_but_one: object      # the same, but for what was started last
    start_steps: object       # (offsets) -> (d, array, place, a0, .., a7): starts D = A B of as many products as there are
                              # offsets, to `place`, of their B; A is a0 .. a3 and a4 .. a7 by turns


def _tied(n_sums, text, extra=lambda args: [], constraints=(), floats=False):
    """The codegen of assembly whose first operands, the n_sums elements of the local array d, int32 or float32, are read and
    written: they stay in the registers they are in. extra: (args) -> the other operands."""
    def emit(context, builder, signature, args):
        word, data = ir.IntType(32), context.make_array(signature.args[0])(context, builder, args[0]).data
        pointers = [builder.gep(data, [word(i)]) for i in range(n_sums)]
        operands = [builder.load(p) for p in pointers] + extra(args)
        kind = ir.FunctionType(ir.LiteralStructType([ir.FloatType() if floats else word] * n_sums), [o.type for o in operands])
        tied = ["=f" if floats else "=r"] * n_sums + [str(i) for i in range(n_sums)]
        value = builder.call(ir.InlineAsm(kind, text, ",".join([*tied, *constraints, "~{memory}"]), True), operands)
        for i, p in enumerate(pointers):
            builder.store(builder.extract_value(value, i), p)
    return _void(emit)


def _start(name, a_type, n):
    if SIMULATED:
        return simulator.group_product(a_type, n)
    n_sums, floats = n // 2, a_type == "f16"
    kind, more = (f"k16.f32.{a_type}.f16", ", 1, 1, 0") if floats else (f"k32.s32.{a_type}.s8", "")
    results = ", ".join(f"${i}" for i in range(n_sums))
    a, b, keep = ", ".join(f"${i}" for i in range(2 * n_sums, 2 * n_sums + 4)), f"${2 * n_sums + 4}", f"${2 * n_sums + 5}"
    text = (f"{{ .reg .pred keep; setp.ne.b32 keep, {keep}, 0; wgmma.fence.sync.aligned; "
            f".reg .b64 b; mov.b64 b, {{{b}, {DESCRIPTOR[0]}}}; "
            f"wgmma.mma_async.sync.aligned.m64n{n}{kind} {{{results}}}, {{{a}}}, b, keep{more}; "
            f"wgmma.commit_group.sync.aligned; }}")

    def typed(typingctx, d, array, place, a0, a1, a2, a3, keep):
        for t in (place, a0, a1, a2, a3, keep):
            _check(name, "r", t)
        codegen = _tied(n_sums, text, lambda args: [*args[3:7], args[2], args[7]], ["r"] * 6, floats)
        return types.void(d, array, *[types.int32] * 6), codegen
    return intrinsic(_named(name, 8)(typed))


def _start_tiles(n):
    if SIMULATED:
        return simulator.product_of_tiles(n)
    n_sums = n // 2
    d, (tiles, b) = ", ".join(f"${i}" for i in range(n_sums)), (f"${i}" for i in range(2 * n_sums, 2 * n_sums + 2))
    # Eight rows of A are 128 bytes (stride byte offset); above the place is how far its halves are apart (leading byte offset)
    text = (f"{{ .reg .b64 a, b; mov.b64 a, {{{tiles}, {128 >> 4}}}; mov.b64 b, {{{b}, {DESCRIPTOR[0]}}}; "
            f"wgmma.fence.sync.aligned; wgmma.mma_async.sync.aligned.m64n{n}k32.s32.s8.s8 {{{d}}}, a, b, 0; "
            "wgmma.commit_group.sync.aligned; }")

    def typed(typingctx, d, array, place, tiles):
        for t in (place, tiles):
            _check("start_tiles", "r", t)
        return types.void(d, array, types.int32, types.int32), _tied(n_sums, text, lambda args: [args[3], args[2]], ["r"] * 2)
    return intrinsic(_named("start_tiles", 4)(typed))


def _start_unswizzled(n):
    if SIMULATED:
        return simulator.unswizzled_product(n)
    n_sums = n // 2
    d, (*a, b) = ", ".join(f"${i}" for i in range(n_sums)), (f"${i}" for i in range(2 * n_sums, 2 * n_sums + 5))
    # Eight columns are 256 bytes (stride byte offset), their halves 128 bytes apart (leading byte offset)
    text = (f"{{ .reg .b32 t; .reg .b64 b; add.s32 t, {b}, {128 >> 4 << 16}; mov.b64 b, {{t, {256 >> 4}}}; "
            f"wgmma.fence.sync.aligned; wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {{{d}}}, {{{', '.join(a)}}}, b, "
            "0, 1, 1, 0; wgmma.commit_group.sync.aligned; }")

    def typed(typingctx, d, array, place, a0, a1, a2, a3):
        for t in (place, a0, a1, a2, a3):
            _check("start_unswizzled", "r", t)
        return types.void(d, array, *[types.int32] * 5), _tied(n_sums, text, lambda args: [*args[3:7], args[2]], ["r"] * 5, True)
    return intrinsic(_named("start_unswizzled", 7)(typed))


def _start_steps(n, offsets):
    if SIMULATED:
        return simulator.group_products(n, offsets)
    n_sums, lines = n // 2, []
    d, operands = ", ".join(f"${i}" for i in range(n_sums)), [f"${2 * n_sums + i}" for i in range(9)]
    for step, offset in enumerate(offsets):
        a = ", ".join(operands[4 * (step % 2):][:4])
        lines.append(f"add.s32 t, {operands[8]}, {offset}; mov.b64 b, {{t, {DESCRIPTOR[0]}}}; "
                     f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {{{d}}}, {{{a}}}, b, {int(step > 0)}, 1, 1, 0; ")
    text = "".join(["{ .reg .b32 t; .reg .b64 b; wgmma.fence.sync.aligned; ", *lines, "wgmma.commit_group.sync.aligned; }"])

    def typed(typingctx, d, array, place, a0, a1, a2, a3, a4, a5, a6, a7):
        for t in (place, a0, a1, a2, a3, a4, a5, a6, a7):
            _check("start_steps", "r", t)
        return types.void(d, array, *[types.int32] * 9), _tied(n_sums, text, lambda args: [*args[3:11], args[2]], ["r"] * 9, True)
    return intrinsic(_named("start_steps", 11)(typed))


def _wait(but, n, floats=False):
    """but: products started last that it does not wait for."""
    if SIMULATED:
        return simulator.products_wait_but(but)

    def typed(typingctx, d):
        return types.void(d), _tied(n // 2, f"wgmma.wait_group.sync.aligned {but};", floats=floats)
    return intrinsic(_named("wait", 1)(typed))


def _typed_place(typingctx, array, index):
    """(array, index) -> the place of an element, int32, of which the next 16 bytes are the next one: what a product takes."""
    _check("place", "r", index)

    def codegen(context, builder, signature, args):
        word = ir.IntType(32)
        return builder.add(builder.lshr(_shared_address(context, builder, array, *args), word(4)), word(DESCRIPTOR[1]))
    return types.int32(array, types.int64), codegen


place = simulator.place if SIMULATED else intrinsic(_named("place", 2)(_typed_place))


@device
def uniform_place(array, index):
    """`place`, which is the same for all lanes: what `redux` gives, the assembler knows to be that, and counts on from it in
    registers of the warp, in which products take places."""
    return redux_max(place(array, index))


@device
def unswizzled_place(array, index):
    """`uniform_place` for `start_unswizzled`. Above an address a place has the number of the block in its cluster. A product with
    swizzle does not look at it, one without takes it for a leading byte offset."""
    return i32(uniform_place(array, index) & i32(ADDRESS))


@device
def tiles_place(array, index):
    """`uniform_place` of A for `start_tiles`: of PAIR_ROWS rows the first 16 bytes each, then the other 16."""
    return i32((uniform_place(array, index) & i32(ADDRESS)) | i32(16 * PAIR_ROWS >> 4 << 16))


@lru_cache(None)
def products(n: int) -> Products:
    return Products(_start("start", "s8", n), _start("start_u", "u8", n), _wait(0, n), _wait(1, n), _start_tiles(n))


@lru_cache(None)
def half_products(n: int) -> HalfProducts:
    return HalfProducts(_start("start", "f16", n), _start_unswizzled(n), _wait(0, n, floats=True), _wait(1, n, floats=True),
                        lru_cache(None)(lambda offsets: _start_steps(n, offsets)))


@lru_cache(None)
def wait_for_all_but(n: int):
    """The intrinsic that waits for all products but the n started last."""
    if SIMULATED:
        return simulator.products_wait_but(n)
    return _effect(f"wait_for_all_but_{n}", f"wgmma.wait_group.sync.aligned {n};")


wait_for_all_but_one, wait_for_all_but_two = wait_for_all_but(1), wait_for_all_but(2)


@lru_cache(None)
def limb_sums(n: int, steps: int):
    """The intrinsic (d, array, hi, lo, a_hi, a_lo) of sums of products of limbs, for 32 steps columns of A and n columns of B:
    starts the products and waits for them. d: local array of 3 n / 2 int32, written: HH, MID and LL as three D; hi, lo: places of
    the limbs of B, from which the steps follow each other; a_hi, a_lo: local arrays of four words of A a step."""
    if SIMULATED:
        return simulator.limb_sums(n, steps)
    n_sums, lines = n // 2, []
    n_d, n_a = 3 * n_sums, 4 * steps
    hh, mid, ll = (", ".join(f"${i}" for i in range(k * n_sums, (k + 1) * n_sums)) for k in range(3))
    for step in range(steps):
        high, low = (", ".join(f"${n_d + 2 + k * n_a + i}" for i in range(4 * step, 4 * step + 4)) for k in range(2))
        for name, operand in ("h", n_d), ("l", n_d + 1):
            lines.append(f"add.s32 t, ${operand}, {32 * step // (4 * PLACE)}; mov.b64 {name}, {{t, {DESCRIPTOR[0]}}};")
        for d, a, b, keep in (hh, high, "h", step), (mid, high, "l", step), (ll, low, "l", step), (mid, low, "h", 1):
            lines.append(f"wgmma.mma_async.sync.aligned.m64n{n}k32.s32.s8.s8 {{{d}}}, {{{a}}}, {b}, {int(keep > 0)};")
    text = "".join(["{ .reg .b32 t; .reg .b64 h, l; wgmma.fence.sync.aligned; ", *(f"{line} " for line in lines),
                    "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"])

    def words(context, builder, array_type, array, count):
        data = context.make_array(array_type)(context, builder, array).data
        return [builder.gep(data, [ir.IntType(32)(i)]) for i in range(count)]

    def emit(context, builder, signature, args):
        a = [builder.load(p) for k in (4, 5) for p in words(context, builder, signature.args[k], args[k], n_a)]
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.LiteralStructType([word] * n_d), [word] * (2 + 2 * n_a))
        assembly = ir.InlineAsm(kind, text, ",".join(["=&r"] * n_d + ["r"] * (2 + 2 * n_a) + ["~{memory}"]), True)
        value = builder.call(assembly, [args[2], args[3], *a])
        for i, p in enumerate(words(context, builder, signature.args[0], args[0], n_d)):
            builder.store(builder.extract_value(value, i), p)

    def typed(typingctx, d, array, hi, lo, a_hi, a_lo):
        for t in hi, lo:
            _check("limb_sums", "r", t)
        return types.void(d, array, types.int32, types.int32, a_hi, a_lo), _void(emit)
    return intrinsic(_named("limb_sums", 6)(typed))
