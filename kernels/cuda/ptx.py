"""What CUDA kernels are written in: one PTX instruction an intrinsic, with its meaning in Python for the simulator beside it.

NVVM contracts a plain `a * b + c` and ptxas may contract what NVVM leaves, so no float operation is left to them: kernels use
`add`, `sub`, `mul`, `div`, `sqrt`, `fma`, `rint`, `i2f`, `l2f`, `f2i` of this module (and `exp`, `silu`, ..., made of them),
never `+ - * /`. Comparing and selecting floats is free of rounding and written plainly. Integers are plain Python too; numba
makes 64 bits of sums of 32-bit values, so a value that must stay a word is wrapped: `i32(a + b)`.

A kernel takes pointers and scalars. p[i] of a pointer is not used: `ld`, `ld4` and `st`, `st4` read and write global memory that
kernels write (their order is kept), `ldc`, `ldc4` read what no kernel writes while this one runs (they may be moved and merged);
in a kernel that places `wait_for_previous` itself, where they may be moved before it, only what no kernel ever writes: weights,
tables and inputs of a graph. Of these, `ld` and `ld4` ask before that wait where they stand before it; `ldc` may be moved to
where its value is used, and before a test that it stands behind (out of a loop, say): what may not be there to be read is read by
`ld`. The index counts elements of the pointer's type; the four elements of ld4, ldc4 and st4 are 32 bits wide and must lie on 16
bytes.

Under NUMBA_ENABLE_CUDASIM=1 the same names are Python functions on numpy scalars that check the types they are given.
"""
from hashlib import sha256
from inspect import Parameter, Signature
from string import ascii_lowercase
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import cuda, types

from .. import arith
from .device_functions import SIMULATED, device, stage  # noqa: F401  which kernels take from here

f32, f64, i32, u32, i64 = np.float32, np.float64, np.int32, np.uint32, np.int64

if SIMULATED:
    from . import simulator
else:
    from numba.cuda.extending import intrinsic


class _Register(NamedTuple):
    constraint: str  # of inline assembly
    llvm: ir.Type
    numba: types.Type


_REGISTERS = {
    "f": _Register("f", ir.FloatType(), types.float32),
    "r": _Register("r", ir.IntType(32), types.int32),
    "u": _Register("r", ir.IntType(32), types.uint32),
    "l": _Register("l", ir.IntType(64), types.int64),
    "d": _Register("d", ir.DoubleType(), types.float64),
}


@device
def nothing(*args):
    pass


def _named(name, n_parameters):
    """Signature by which numba knows how many arguments an intrinsic takes."""
    def rename(function):
        names = "typingctx", *ascii_lowercase[:n_parameters]
        parameters = [Parameter(p, Parameter.POSITIONAL_OR_KEYWORD) for p in names]
        function.__name__, function.__signature__ = name, Signature(parameters)
        return function
    return rename


def _check(name, operand, actual):
    """Integers of any width are taken as words, since numba widens them; a float must have its width: where float32 is wanted, a
    float64 comes of a forgotten type."""
    if isinstance(actual, types.IntegerLiteral):
        actual = actual.literal_type
    if actual != _REGISTERS[operand].numba if operand in "fd" else not isinstance(actual, types.Integer):
        raise TypeError(f"ptx.{name}: expected {_REGISTERS[operand].numba}, got {actual}")


def _instruction(name, text, result, operands, in_place=False, attrs=()):
    """The intrinsic of one instruction. result, operands: letters of _REGISTERS. in_place: it is neither moved nor merged; its
    meaning in the simulator is the function of its name there. attrs: LLVM's, of the call."""
    if SIMULATED:
        return getattr(simulator, name) if in_place else simulator.checked(name, result, operands)
    registers = [_REGISTERS[o] for o in operands]
    out = _REGISTERS[result]
    constraints = ",".join(["=" + out.constraint, *(r.constraint for r in registers)])
    assembly = ir.InlineAsm(ir.FunctionType(out.llvm, [r.llvm for r in registers]), text, constraints, side_effect=in_place)

    def codegen(context, builder, signature, args):
        return builder.call(assembly, args, attrs=attrs)

    @_named(name, len(operands))
    def typed(typingctx, *actual):
        for operand, a in zip(operands, actual):
            _check(name, operand, a)
        return out.numba(*(r.numba for r in registers)), codegen
    return intrinsic(typed)


add = _instruction("add", "add.rn.f32 $0, $1, $2;", "f", "ff")
sub = _instruction("sub", "sub.rn.f32 $0, $1, $2;", "f", "ff")
mul = _instruction("mul", "mul.rn.f32 $0, $1, $2;", "f", "ff")
div = _instruction("div", "div.rn.f32 $0, $1, $2;", "f", "ff")
fma = _instruction("fma", "fma.rn.f32 $0, $1, $2, $3;", "f", "fff")
sqrt = _instruction("sqrt", "sqrt.rn.f32 $0, $1;", "f", "f")
rint = _instruction("rint", "cvt.rni.f32.f32 $0, $1;", "f", "f")
i2f = _instruction("i2f", "cvt.rn.f32.s32 $0, $1;", "f", "r")      # the nearest float of an int32, ties to even
l2f = _instruction("l2f", "cvt.rn.f32.s64 $0, $1;", "f", "l")      # the same of an int64
f2i = _instruction("f2i", "cvt.rni.s32.f32 $0, $1;", "r", "f")     # the nearest int32, ties to even, clamped; 0 for NaN
as_f32 = _instruction("as_f32", "mov.b32 $0, $1;", "f", "r")       # the bit pattern of a word as a float, and back
as_i32 = _instruction("as_i32", "mov.b32 $0, $1;", "r", "f")
as_u32 = _instruction("as_u32", "mov.b32 $0, $1;", "u", "f")
# float64, which a draw is defined in (docs/numerics.md, section 5) and nothing else
add64 = _instruction("add64", "add.rn.f64 $0, $1, $2;", "d", "dd")
sub64 = _instruction("sub64", "sub.rn.f64 $0, $1, $2;", "d", "dd")
mul64 = _instruction("mul64", "mul.rn.f64 $0, $1, $2;", "d", "dd")
div64 = _instruction("div64", "div.rn.f64 $0, $1, $2;", "d", "dd")
rint64 = _instruction("rint64", "cvt.rni.f64.f64 $0, $1;", "d", "d")
f2d = _instruction("f2d", "cvt.f64.f32 $0, $1;", "d", "f")          # exact
d2i = _instruction("d2i", "cvt.rni.s32.f64 $0, $1;", "r", "d")      # the nearest int32, ties to even, clamped
as_f64 = _instruction("as_f64", "mov.b64 $0, $1;", "d", "l")        # the bit pattern of 64 bits as a float64
# The float of the half in the low 16 bits, of that in the high ones, and the half nearest to a float
f16_to_f32 = _instruction("f16_to_f32", "{.reg .b16 h, z; mov.b32 {h, z}, $1; cvt.f32.f16 $0, h;}", "f", "u")
f16_high_to_f32 = _instruction("f16_high_to_f32", "{.reg .b16 z, h; mov.b32 {z, h}, $1; cvt.f32.f16 $0, h;}", "f", "u")
f32_to_f16 = _instruction("f32_to_f16", "{.reg .b16 h, z; cvt.rn.f16.f32 h, $1; mov.b16 z, 0; mov.b32 $0, {h, z};}", "u", "f")
dp4a = _instruction("dp4a", "dp4a.s32.s32 $0, $1, $2, $3;", "r", "rrr")  # c + the products of the four signed bytes of a and b
# c + the products of the four bytes of a and b; of the 16-bit halves of a and the signed bytes 0 and 1 of b; a b + c. The pipe of
# products has room where logic, shifts and prmt fill theirs (docs/kernels-log.md)
dot4 = _instruction("dot4", "dp4a.u32.u32 $0, $1, $2, $3;", "r", "uur")
dot2 = _instruction("dot2", "dp2a.lo.u32.s32 $0, $1, $2, $3;", "u", "uuu")
mad = _instruction("mad", "mad.lo.s32 $0, $1, $2, $3;", "r", "rrr")
mad64 = _instruction("mad64", "mad.wide.s32 $0, $1, $2, $3;", "l", "rrl")  # a b + c, c and the result of 64 bits
implied = _instruction("implied", "lop3.b32 $0, $1, $2, $3, 0xda;", "u", "uuu")  # ~a | b where c is set, else a
prmt = _instruction("prmt", "prmt.b32 $0, $1, $2, $3;", "u", "uuu")      # byte i is byte s & 7 of the eight bytes a, b, or
                                                                         # its sign eight times where s & 8; s = c >> 4i
amax2 = _instruction("amax2", "{.reg .b32 m; abs.f16x2 m, $2; max.NaN.f16x2 $0, $1, m;}", "u", "uu")  # of two float16 each: the
                                                                         # larger of a, not negative, and |b|; NaN is above all
distances4 = _instruction("distances4", "{.reg .b32 z; mov.b32 z, 0; vabsdiff4.u32.u32.u32 $0, $1, $2, z;}", "u", "uu")  # |a - b|
                                                                         # of four bytes each
add2 = _instruction("add2", "add.rn.f16x2 $0, $1, $2;", "u", "uu")        # of two float16 each
fma2 = _instruction("fma2", "fma.rn.f16x2 $0, $1, $2, $3;", "u", "uuu")
halves = _instruction("halves", "cvt.rn.f16x2.f32 $0, $2, $1;", "u", "ff")  # the nearest float16 of both, the first one below
# The larger of two floats, +0 above -0: of a number and NaN the number, or NaN
fmax = _instruction("fmax", "max.f32 $0, $1, $2;", "f", "ff")
fmax_nan = _instruction("fmax_nan", "max.NaN.f32 $0, $1, $2;", "f", "ff")
popc = _instruction("popc", "popc.b32 $0, $1;", "r", "r")                # the number of ones
rotate = _instruction("rotate", "shf.r.wrap.b32 $0, $1, $1, $2;", "u", "ur")  # w by s places to the right, by -s to the left
shr = _instruction("shr", "shr.u32 $0, $1, $2;", "u", "uu")              # 0 for shifts of 32 and more


def _void(emit):
    """The codegen of an intrinsic without a result. emit: (context, builder, signature, args)."""
    def codegen(context, builder, signature, args):
        emit(context, builder, signature, args)
        return context.get_dummy_value()
    return codegen


def _elements(context, builder, type_, value):
    """A tuple of the elements of a struct."""
    return context.make_tuple(builder, type_, [builder.extract_value(value, i) for i in range(len(type_))])


# Global memory

_ACCESS = {  # type of the pointer: (suffix of ld and st, register of the value)
    types.float32: ("f32", "f"), types.int32: ("b32", "r"), types.uint32: ("b32", "u"), types.int64: ("b64", "l"),
    types.int8: ("s8", "r"), types.uint8: ("u8", "r"), types.int16: ("s16", "r"), types.uint16: ("u16", "r"),
    types.float64: ("f64", "d"),
}


def _pointer(name, pointer, width):
    """(suffix, register) of an access through a pointer type."""
    if not isinstance(pointer, types.CPointer) or pointer.dtype not in _ACCESS:
        raise TypeError(f"ptx.{name}: expected a pointer to one of {', '.join(map(str, _ACCESS))}, got {pointer}")
    if width > 1 and pointer.dtype.bitwidth != 32:
        raise TypeError(f"ptx.{name}: expected a pointer to 32-bit elements, got {pointer}")
    suffix, register = _ACCESS[pointer.dtype]
    return suffix, _REGISTERS[register]


def _address(builder, pointer, index):
    return builder.ptrtoint(builder.gep(pointer, [index]), ir.IntType(64))


def _load(name, width, constant):
    """(pointer, index) -> element, or (pointer, index) -> two or four elements from there."""
    if SIMULATED:
        return simulator.load(name, width)

    def typed(typingctx, pointer, index):
        suffix, register = _pointer(name, pointer, width)
        _check(name, "l", index)
        result = register.numba if width == 1 else types.UniTuple(register.numba, width)
        space = "global.nc" if constant else "global"
        values = ", ".join(f"${i}" for i in range(width))
        text = f"ld.{space}.{suffix} $0, [$1];" if width == 1 else f"ld.{space}.v{width}.{suffix} {{{values}}}, [${width}];"
        constraints = ",".join([f"={register.constraint}"] * width + ["l"] + ([] if constant else ["~{memory}"]))
        returned = register.llvm if width == 1 else ir.LiteralStructType([register.llvm] * width)
        assembly = ir.InlineAsm(ir.FunctionType(returned, [ir.IntType(64)]), text, constraints, side_effect=not constant)

        def codegen(context, builder, signature, args):
            # Equal loads are merged
            value = builder.call(assembly, [_address(builder, *args)], attrs=("readnone",) if constant else ())
            return value if width == 1 else _elements(context, builder, signature.return_type, value)
        return result(pointer, types.int64), codegen
    return intrinsic(_named(name, 2)(typed))


def _store(name, width):
    """(pointer, index, value) or (pointer, index, two or four values)."""
    if SIMULATED:
        return simulator.store(name, width)

    def typed(typingctx, pointer, index, *values):
        suffix, register = _pointer(name, pointer, width)
        _check(name, "l", index)
        for v in values:
            _check(name, "f" if pointer.dtype == types.float32 else "r", v)
        suffix = suffix.replace("s", "b").replace("u", "b") if pointer.dtype.bitwidth < 32 else suffix
        put = ", ".join(f"${i + 1}" for i in range(width))
        text = f"st.global.{suffix} [$0], $1;" if width == 1 else f"st.global.v{width}.{suffix} [$0], {{{put}}};"
        constraints = ",".join(["l"] + [register.constraint] * width + ["~{memory}"])
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] + [register.llvm] * width)
        assembly = ir.InlineAsm(kind, text, constraints, True)
        return types.void(pointer, types.int64, *[register.numba] * width), _void(
            lambda context, builder, signature, args: builder.call(assembly, [_address(builder, *args[:2]), *args[2:]]))
    return intrinsic(_named(name, 2 + width)(typed))


ld, ld2, ld4 = (_load(name, width, False) for name, width in (("ld", 1), ("ld2", 2), ("ld4", 4)))
ldc, ldc4 = _load("ldc", 1, True), _load("ldc4", 4, True)
st, st2, st4 = (_store(name, width) for name, width in (("st", 1), ("st2", 2), ("st4", 4)))


def _ordered(name, text, is_load, kind="r"):
    """(pointer, index) -> a value, or (pointer, index, value), of what devices tell each other. kind: the value's register."""
    if SIMULATED:
        return getattr(simulator, name)
    register, address = _REGISTERS[kind], ir.IntType(64)
    function = ir.FunctionType(*((register.llvm, [address]) if is_load else (ir.VoidType(), [address, register.llvm])))
    constraints = f"={register.constraint},l,~{{memory}}" if is_load else f"l,{register.constraint},~{{memory}}"
    assembly = ir.InlineAsm(function, text, constraints, True)

    def typed(typingctx, pointer, index, *value):
        if _pointer(name, pointer, 1)[1].llvm != register.llvm:
            raise TypeError(f"ptx.{name}: expected a pointer to {register.numba}, got {pointer}")
        _check(name, "l", index)
        for v in value:
            _check(name, kind, v)
        if is_load:
            return pointer.dtype(pointer, types.int64), lambda context, builder, signature, args: builder.call(
                assembly, [_address(builder, *args)])
        return types.void(pointer, types.int64, register.numba), _void(
            lambda context, builder, signature, args: builder.call(assembly, [_address(builder, *args[:2]), args[2]]))
    return intrinsic(_named(name, 2 if is_load else 3)(typed))


# A word of global memory, for what devices tell each other. Who acquires what another one has released sees all that was written
# before: by that thread, and by those that it met at a barrier
ld_acquire = _ordered("ld_acquire", "ld.acquire.sys.global.b32 $0, [$1];", True)
st_release = _ordered("st_release", "st.release.sys.global.b32 [$0], $1;", False)
# A word of an operand that is settled (`kernels.call`), before the wait: not out of a cache that other kernels' stores pass by
ld_settled = _ordered("ld_settled", "ld.relaxed.gpu.global.b32 $0, [$1];", True)
# 64 bits that come as one, and say nothing of what else was written
ld_relaxed = _ordered("ld_relaxed", "ld.relaxed.sys.global.b64 $0, [$1];", True, "l")
st_relaxed = _ordered("st_relaxed", "st.relaxed.sys.global.b64 [$0], $1;", False, "l")


def _pointer_at():
    """(pointer, address) -> what lies at an address that a kernel has read, int64, as elements of the pointer's type."""
    if SIMULATED:
        return simulator.pointer_at

    def typed(typingctx, pointer, address):
        _pointer("pointer_at", pointer, 1)
        _check("pointer_at", "l", address)
        return pointer(pointer, types.int64), lambda context, builder, signature, args: builder.inttoptr(args[1], args[0].type)
    return intrinsic(_named("pointer_at", 2)(typed))


def _moved():
    """(pointer, n) -> the pointer n bytes on. n: int64."""
    if SIMULATED:
        return simulator.moved

    def typed(typingctx, pointer, n):
        _pointer("moved", pointer, 1)
        _check("moved", "l", n)

        def codegen(context, builder, signature, args):
            address = builder.add(builder.ptrtoint(args[0], ir.IntType(64)), args[1])
            return builder.inttoptr(address, args[0].type)
        return pointer(pointer, types.int64), codegen
    return intrinsic(_named("moved", 2)(typed))


pointer_at, moved = _pointer_at(), _moved()


def constant(entries):
    """(i) -> entries[i], uint32, of a table that lies in global memory beside the code. entries: numpy array [n] of unsigned
    integers."""
    words = np.ascontiguousarray(entries, u32)
    assert words.ndim == 1 and np.asarray(entries).dtype.kind == "u", entries
    if SIMULATED:
        return lambda i: words[i]
    name, type_ = f"table_{sha256(words).hexdigest()[:16]}", ir.ArrayType(ir.IntType(32), len(words))
    assembly = ir.InlineAsm(ir.FunctionType(ir.IntType(32), [ir.IntType(64)]), "ld.global.nc.b32 $0, [$1];", "=r,l",
                            side_effect=False)

    def typed(typingctx, i):
        _check("constant", "l", i)

        def codegen(context, builder, signature, args):
            table = builder.module.globals.get(name)
            if table is None:
                table = ir.GlobalVariable(builder.module, type_, name, addrspace=1)
                table.initializer = ir.Constant(type_, [int(w) for w in words])
                table.global_constant, table.linkage = True, "internal"
            place = builder.gep(table, [ir.IntType(64)(0), args[0]])
            # Equal loads are merged
            return builder.call(assembly, [builder.ptrtoint(place, ir.IntType(64))], attrs=("readnone",))
        return types.uint32(types.int64), codegen
    return intrinsic(_named("constant", 1)(typed))


def hidden(words):
    """(i) -> words[i], uint32, of a few words that the compiler does not know. One that it knows is moved to a register anew for
    each instruction that has another constant. What is added to it is always 0, the ones of t and of ~t less 32, t the thread's
    number, and made once, before a loop: by an operation of LLVM's, which moves what assembly makes out of no loop. Loads would
    wait for memory (docs/kernels-log.md). i: known to the compiler."""
    words = tuple(map(u32, words))
    if SIMULATED:
        return lambda i: words[i]

    @device
    def word(i):
        t = i32(cuda.threadIdx.x)
        return u32(words[i] + u32(i32(cuda.popc(t)) + i32(cuda.popc(i32(~t))) - 32))
    return word


# Shared memory: one-dimensional arrays of words, without Python's negative indices, which cost two instructions an access

def _shared(name, width):
    """Parts of an access to a shared array: check(array type, index type), pointer(context, builder, array type, array, index,
    element)."""
    def check(array, index):
        allowed = [types.int32, types.uint32, types.float32] + [types.float64] * (width == 1)
        if not isinstance(array, types.Array) or array.ndim != 1 or array.dtype not in allowed:
            raise TypeError(f"ptx.{name}: expected a one-dimensional array of {', '.join(map(str, allowed))}, got {array}")
        _check(name, "l", index)
        return _REGISTERS[_ACCESS[array.dtype][1]]

    def pointer(context, builder, array_type, array, index, element):
        data = context.make_array(array_type)(context, builder, array).data
        if width < 1:  # bytes
            return builder.gep(builder.bitcast(data, ir.PointerType(element)), [index])
        return builder.bitcast(builder.gep(data, [index]), ir.PointerType(element))
    return check, pointer


def _load_shared(name, width):
    """(array, index) -> element, or (array, index) -> two or four elements, which must lie on 8 or 16 bytes."""
    if SIMULATED:
        def get(array, index):
            simulator.check_elements(name, array, index, width)
            return array[index] if width == 1 else tuple(array[index:index + width])
        return get
    check, pointer = _shared(name, width)

    def typed(typingctx, array, index):
        register = check(array, index)

        def codegen(context, builder, signature, args):
            element = register.llvm if width == 1 else ir.VectorType(register.llvm, width)
            value = builder.load(pointer(context, builder, array, *args, element), align=array.dtype.bitwidth // 8 * width)
            if width == 1:
                return value
            elements = [builder.extract_element(value, ir.IntType(32)(i)) for i in range(width)]
            return context.make_tuple(builder, signature.return_type, elements)
        return (register.numba if width == 1 else types.UniTuple(register.numba, width))(array, types.int64), codegen
    return intrinsic(_named(name, 2)(typed))


def _store_shared(name, n_bytes):
    """(array, index, value): an element, or the low byte of an integer at byte `index`."""
    if SIMULATED:
        def put(array, index, value):
            if n_bytes == 1:
                array, value = array.view(np.uint8), int(value) & 255
            elif (array.dtype in (f32, f64) or isinstance(value, np.floating)) and type(value) is not array.dtype.type:
                raise TypeError(f"{name}: {type(value).__name__} into {array.dtype}")
            if not 0 <= index < len(array):
                raise IndexError(f"{name}: element {index} of {len(array)}")
            array[index] = value if array.dtype in (f32, f64) else simulator.as_int(array.dtype.type)(value)
        return put
    check, pointer = _shared(name, n_bytes // 4)

    def typed(typingctx, array, index, value):
        register = check(array, index)
        _check(name, _ACCESS[array.dtype][1] if n_bytes == 4 else "r", value)
        taken = register.numba if n_bytes == 4 else types.int32

        def emit(context, builder, signature, args):
            value = args[2] if n_bytes == 4 else builder.trunc(args[2], ir.IntType(8))
            align = array.dtype.bitwidth // 8 if n_bytes == 4 else 1
            builder.store(value, pointer(context, builder, array, *args[:2], value.type), align=align)
        return types.void(array, types.int64, taken), _void(emit)
    return intrinsic(_named(name, 3)(typed))


def _store4_shared(name):
    """(array, index, four words), on 16 bytes."""
    if SIMULATED:
        def put(array, index, *values):
            simulator.check_elements(name, array, index, 4)
            array[index:index + 4] = [simulator.as_int(array.dtype.type)(v) for v in values]
        return put
    check, pointer = _shared(name, 4)

    def typed(typingctx, array, index, *values):
        check(array, index)
        for v in values:
            _check(name, "r", v)

        def emit(context, builder, signature, args):
            vector = ir.VectorType(ir.IntType(32), 4)
            value = ir.Constant(vector, ir.Undefined)
            for i in range(4):
                value = builder.insert_element(value, args[2 + i], ir.IntType(32)(i))
            builder.store(value, pointer(context, builder, array, *args[:2], vector), align=16)
        return types.void(array, types.int64, *[types.int32] * 4), _void(emit)
    return intrinsic(_named(name, 6)(typed))


lds, lds2, lds4 = (_load_shared(name, width) for name, width in (("lds", 1), ("lds2", 2), ("lds4", 4)))
sts, sts4, sts8 = _store_shared("sts", 4), _store4_shared("sts4"), _store_shared("sts8", 1)


# What the lanes of a warp do together

if SIMULATED:
    syncwarp = simulator.syncwarp
else:
    @device
    def syncwarp():
        cuda.syncwarp()
# (x, lane) -> the int32 x of the lane `lane`, for every lane
shuffle = _instruction("shuffle", "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "r", "rr", in_place=True)
# (x) -> the lanes whose int32 x is not 0, as bits of an int32
ballot = _instruction("ballot", "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }", "r", "r",
                      in_place=True, attrs=("convergent",))
# (x) -> the lanes that have the same int32 x, as bits of an int32: of all that have it, each gets the same
match = _instruction("match", "match.any.sync.b32 $0, $1, 0xffffffff;", "r", "r", in_place=True, attrs=("convergent",))
# (x) -> the largest or the smallest int32 x of the lanes, for every lane
redux_max, redux_min = (_instruction(f"redux_{operation}", f"redux.sync.{operation}.s32 $0, $1, 0xffffffff;", "r", "r",
                                     in_place=True, attrs=("convergent",)) for operation in ("max", "min"))


# Tensor cores. All lanes of a warp execute these together; lane l holds the fragments of row or column l / 4, words l % 4 (PTX
# ISA, "mma")

def _matrix_product(name, n_a, n_b, a_type="s8"):
    """(a.., b.., c0, c1, c2, c3) -> four int32: the fragments of C + A B, A 16 x 16 n_b of int8 (or uint8) by rows, B 16 n_b x 8
    of int8 by columns, C 16 x 8."""
    if SIMULATED:
        return simulator.matrix_product(n_a, n_b, a_type)
    shape = f"m16n8k{16 * n_b}"
    operands = [f"${i}" for i in range(4, 8 + n_a + n_b)]
    a, b, c = (", ".join(operands[i:j]) for i, j in ((0, n_a), (n_a, n_a + n_b), (n_a + n_b, None)))
    text = f"mma.sync.aligned.{shape}.row.col.s32.{a_type}.s8.s32 {{$0, $1, $2, $3}}, {{{a}}}, {{{b}}}, {{{c}}};"
    word = ir.IntType(32)
    assembly = ir.InlineAsm(ir.FunctionType(ir.LiteralStructType([word] * 4), [word] * len(operands)), text,
                            ",".join(["=r"] * 4 + ["r"] * len(operands)), side_effect=False)

    def codegen(context, builder, signature, args):
        return _elements(context, builder, signature.return_type, builder.call(assembly, args))

    def typed(typingctx, *actual):
        for t in actual:
            _check(name, "r", t)
        return types.UniTuple(types.int32, 4)(*[types.int32] * len(operands)), codegen
    return intrinsic(_named(name, len(operands))(typed))


mma16, mma32, mma32u = _matrix_product("mma16", 2, 1), _matrix_product("mma32", 4, 2), _matrix_product("mma32u", 4, 2, "u8")


def _shared_address(context, builder, array_type, array, index):
    """The address in the window of shared memory, 32 bits, of an element."""
    data = context.make_array(array_type)(context, builder, array).data
    element = builder.gep(data, [index])
    return builder.ptrtoint(builder.addrspacecast(element, ir.PointerType(element.type.pointee, addrspace=3)), ir.IntType(32))


if SIMULATED:
    ldmatrix4 = simulator.ldmatrix4
else:
    def _typed_ldmatrix4(typingctx, array, index):
        """(array, index) -> four int32. Lane 8 m + r gives the element, on 16 bytes, at which row r of matrix m begins; each lane
        gets word l % 4 of row l / 4 of the four matrices."""
        _shared("ldmatrix4", 4)[0](array, index)
        word = ir.IntType(32)
        assembly = ir.InlineAsm(ir.FunctionType(ir.LiteralStructType([word] * 4), [word]),
                                "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r,~{memory}",
                                side_effect=True)

        def codegen(context, builder, signature, args):
            value = builder.call(assembly, [_shared_address(context, builder, array, *args)])
            return _elements(context, builder, signature.return_type, value)
        return types.UniTuple(types.int32, 4)(array, types.int64), codegen
    ldmatrix4 = intrinsic(_named("ldmatrix4", 2)(_typed_ldmatrix4))


# Copies from global to shared memory that run on while the thread does

def _copy_async(name, width, n=1, step=128, stride=128):
    """(array, index, pointer, index of it): copies an element, two on 8 bytes or four on 16, of words or float32; n times,
    `stride` elements of the array and `step` of the pointer's on each time: so a warp copies n * 512 bytes. Done behind
    `copies_wait` and a barrier."""
    if SIMULATED:
        return simulator.copy(name, width, n, step, stride)

    def typed(typingctx, array, index, pointer, first):
        if _pointer(name, pointer, 4)[1].llvm != _shared(name, width)[0](array, index).llvm:
            raise TypeError(f"ptx.{name}: expected a pointer to elements of {array}, got {pointer}")
        _check(name, "l", first)
        copy = f"cp.async.{'cg' if width == 4 else 'ca'}.shared.global"
        text = " ".join(f"{copy} [$0 + {4 * stride * i}], [$1 + {4 * step * i}], {4 * width};" for i in range(n))
        assembly = ir.InlineAsm(ir.FunctionType(ir.VoidType(), [ir.IntType(32), ir.IntType(64)]), text, "r,l,~{memory}", True)
        return types.void(array, types.int64, pointer, types.int64), _void(
            lambda context, builder, signature, args: builder.call(
                assembly, [_shared_address(context, builder, array, *args[:2]), _address(builder, *args[2:])]))
    return intrinsic(_named(name, 4)(typed))


def _effect(name, text):
    """() of one instruction that memory depends on."""
    if SIMULATED:
        return getattr(simulator, name, lambda: None)
    assembly = ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), text, "~{memory}", True)

    def typed(typingctx):
        return types.void(), _void(lambda context, builder, signature, args: builder.call(assembly, []))
    return intrinsic(_named(name, 0)(typed))


# An int32 as it is, of which the compiler knows nothing: what is computed from it is computed here, not kept in registers from
# earlier
afresh = _instruction("afresh", "mov.b32 $0, $1;", "r", "r", in_place=True)
# () -> cuda.gridDim.x, read where it stands: no register keeps it from earlier
blocks_of_grid = _instruction("blocks_of_grid", "mov.u32 $0, %nctaid.x;", "r", "", in_place=True)


@device
def quotient(a, b):
    """a // b of int32 that are not negative, in 32 bits: numba's own has 64."""
    return i32(u32(a) // u32(b))


@device
def remainder(a, b):
    """a % b likewise."""
    return i32(u32(a) % u32(b))


@device
def least(a, b):
    """The lesser of two int32, in 32 bits: numba's own `min` has 64."""
    return i32(a) if i32(a) < i32(b) else i32(b)


@device
def greatest(a, b):
    """The greater of two int32, in 32 bits."""
    return i32(a) if i32(a) > i32(b) else i32(b)


if SIMULATED:
    def architecture():
        return i32(simulator.ARCHITECTURE)
else:
    @intrinsic
    def architecture(typingctx):
        """100 times the compute capability that the kernel is compiled for, a constant: what a test of it leaves out is not
        compiled."""
        def codegen(context, builder, signature, args):
            name, reflect = context.insert_const_string(builder.module, "__CUDA_ARCH"), "__nvvm_reflect"
            function = (builder.module.globals.get(reflect)
                        or ir.Function(builder.module, ir.FunctionType(ir.IntType(32), [name.type]), reflect))
            return builder.call(function, [name])
        return types.int32(), codegen


@device
def before_blackwell():
    """Whether this is 9.0, on which kernels were tuned, or older. For 10.0 and 12.0 ptxas must be given less to keep on its way
    at a time, or it takes more registers than there are (docs/kernels-log.md)."""
    return architecture() <= 900


@device
def kept(x, lane):
    """x, int32, by all lanes of a warp. lane: the caller's own. Up to 9.0 it passes through a shuffle: the assembler does not
    know how it was made, and keeps it in a register, where it would make it anew at each use. On later ones registers are
    short."""
    return shuffle(x, lane) if before_blackwell() else i32(x)


@device
def apart():
    """But for 9.0, a barrier of the warp: what is loaded behind it is not loaded before it."""
    if architecture() != 900:
        syncwarp()


copy1, copy2, copy4 = _copy_async("copy1", 1), _copy_async("copy2", 2), _copy_async("copy4", 4)


def copies4(n: int, step: int = 128, stride: int = 128):
    """`copy4` n times, `stride` words of the array and `step` of memory on each time."""
    return _copy_async("copies4", 4, n, step, stride)


copies_wait = _effect("copies_wait", "cp.async.wait_all;")          # for this thread's own copies
copies_commit = _effect("copies_commit", "cp.async.commit_group;")  # those since the last one are a group
# By all threads: until the kernel before in the stream has ended (launch)
wait_for_previous = _effect("wait_for_previous", "griddepcontrol.wait;")


def copies_wait_but(n: int):
    """The intrinsic that waits for this thread's groups of copies but for the last n."""
    return simulator.copies_wait_but(n) if SIMULATED else _effect("copies_wait_but", f"cp.async.wait_group {n};")


# The functions of arith, for this target

if SIMULATED:
    exp, log, sigmoid, silu, softplus, tanh, gelu = (simulator.checked(name, "f", "f") for name in arith.Functions._fields)
else:
    exp, log, sigmoid, silu, softplus, tanh, gelu = arith.functions(
        device, arith.Primitives(add, sub, mul, div, fma, i2f, as_i32, as_f32))
