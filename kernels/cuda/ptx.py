"""What CUDA kernels are written in: one PTX instruction an intrinsic, with its meaning in Python for the simulator beside it.

NVVM contracts a plain `a * b + c` and ptxas may contract what NVVM leaves, so no float operation is left to them: kernels use `add`,
`sub`, `mul`, `div`, `sqrt`, `fma`, `rint`, `i2f`, `l2f`, `f2i` of this module (and `exp`, `silu`, ..., made of them), never `+ - * /`.
Comparing and selecting floats is free of rounding and written plainly. Integers are plain Python too; numba makes 64 bits of sums
of 32-bit values, so a value that must stay a word is wrapped: `i32(a + b)`.

A kernel takes pointers and scalars. p[i] of a pointer is not used: `ld`, `ld4` and `st`, `st4` read and write global memory that kernels
write (their order is kept), `ldc`, `ldc4` read what no kernel ever writes, weights and tables (they may be moved and merged).
The index counts elements of the pointer's type; the four elements of ld4, ldc4 and st4 are 32 bits wide and must lie on 16 bytes.

Under NUMBA_ENABLE_CUDASIM=1 the same names are Python functions on numpy scalars that check the types they are given.
"""
from inspect import Parameter, Signature
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.cuda.core import config

from .. import arith

f32, i32, u32, i64 = np.float32, np.int32, np.uint32, np.int64

SIMULATED = bool(config.ENABLE_CUDASIM)
if SIMULATED:
    from . import simulator
else:
    from numba.cuda.compiler import compile_cuda
    from numba.cuda.dispatcher import CUDADispatcher
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
}


def device(function):
    """Compiles a device function, one that kernels and other device functions call. In the simulator it is called as it is."""
    return function if SIMULATED else _DeviceFunction(function, targetoptions={"device": True})


if not SIMULATED:
    class _DeviceFunction(CUDADispatcher):
        """What cuda.jit(device=True) makes, but without asking a GPU for its compute capability: that of the kernel decides."""

        def compile_device(self, args, return_type=None):
            if args not in self.overloads:
                with self._compiling_counter:
                    compiled = compile_cuda(self.py_func, return_type, args, nvvm_options={"opt": 3}, cc=(8, 0))
                    self.overloads[args] = compiled
                    compiled.target_context.insert_user_function(compiled.entry_point, compiled.fndesc, [compiled.library])
            return self.overloads[args]


def _named(name, n_parameters):
    """Signature by which numba knows how many arguments an intrinsic takes."""
    def rename(function):
        names = "typingctx", *"abcdefgh"[:n_parameters]
        function.__name__, function.__signature__ = name, Signature([Parameter(p, Parameter.POSITIONAL_OR_KEYWORD) for p in names])
        return function
    return rename


def _check(name, operand, actual):
    """Integers of any width are taken as words, since numba widens them; a float must be float32: a float64 comes of a forgotten type."""
    if isinstance(actual, types.IntegerLiteral):
        actual = actual.literal_type
    if actual != types.float32 if operand == "f" else not isinstance(actual, types.Integer):
        raise TypeError(f"ptx.{name}: expected {_REGISTERS[operand].numba}, got {actual}")


def _instruction(name, text, result, operands):
    """The intrinsic of one instruction without side effects. result, operands: letters of _REGISTERS."""
    if SIMULATED:
        return simulator.checked(name, result, operands)
    registers = [_REGISTERS[o] for o in operands]
    out = _REGISTERS[result]
    constraints = ",".join(["=" + out.constraint, *(r.constraint for r in registers)])
    assembly = ir.InlineAsm(ir.FunctionType(out.llvm, [r.llvm for r in registers]), text, constraints, side_effect=False)

    def codegen(context, builder, signature, args):
        return builder.call(assembly, args)

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
f16_to_f32 = _instruction("f16_to_f32", "{.reg .b16 h, z; mov.b32 {h, z}, $1; cvt.f32.f16 $0, h;}", "f", "u")  # of the low 16 bits
f32_to_f16 = _instruction("f32_to_f16", "{.reg .b16 h, z; cvt.rn.f16.f32 h, $1; mov.b16 z, 0; mov.b32 $0, {h, z};}", "u", "f")
dp4a = _instruction("dp4a", "dp4a.s32.s32 $0, $1, $2, $3;", "r", "rrr")  # c + the products of the four signed bytes of a and b
prmt = _instruction("prmt", "prmt.b32 $0, $1, $2, $3;", "u", "uuu")      # byte i is byte s & 7 of the eight bytes a, b, or
                                                                         # its sign eight times where s & 8; s = c >> 4i
shr = _instruction("shr", "shr.u32 $0, $1, $2;", "u", "uu")              # 0 for shifts of 32 and more


# Global memory

_ACCESS = {  # type of the pointer: (suffix of ld and st, register of the value)
    types.float32: ("f32", "f"), types.int32: ("b32", "r"), types.uint32: ("b32", "u"), types.int64: ("b64", "l"),
    types.int8: ("s8", "r"), types.uint8: ("u8", "r"), types.int16: ("s16", "r"), types.uint16: ("u16", "r"),
}


def _pointer(name, pointer, width):
    """(suffix, register) of an access through a pointer type."""
    if not isinstance(pointer, types.CPointer) or pointer.dtype not in _ACCESS:
        raise TypeError(f"ptx.{name}: expected a pointer to one of {', '.join(map(str, _ACCESS))}, got {pointer}")
    if width == 4 and pointer.dtype.bitwidth != 32:
        raise TypeError(f"ptx.{name}: expected a pointer to 32-bit elements, got {pointer}")
    suffix, register = _ACCESS[pointer.dtype]
    return suffix, _REGISTERS[register]


def _address(builder, pointer, index):
    return builder.ptrtoint(builder.gep(pointer, [index]), ir.IntType(64))


def _load(name, width, constant):
    """(pointer, index) -> element, or (pointer, index) -> four elements from there."""
    if SIMULATED:
        return simulator.load(name, width)

    def typed(typingctx, pointer, index):
        suffix, register = _pointer(name, pointer, width)
        _check(name, "l", index)
        result = register.numba if width == 1 else types.UniTuple(register.numba, width)
        space = "global.nc" if constant else "global"
        text = f"ld.{space}.{suffix} $0, [$1];" if width == 1 else f"ld.{space}.v4.{suffix} {{$0, $1, $2, $3}}, [$4];"
        constraints = ",".join([f"={register.constraint}"] * width + ["l"] + ([] if constant else ["~{memory}"]))
        returned = register.llvm if width == 1 else ir.LiteralStructType([register.llvm] * width)

        assembly = ir.InlineAsm(ir.FunctionType(returned, [ir.IntType(64)]), text, constraints, side_effect=not constant)

        def codegen(context, builder, signature, args):
            value = builder.call(assembly, [_address(builder, *args)])
            if width == 1:
                return value
            return context.make_tuple(builder, signature.return_type, [builder.extract_value(value, i) for i in range(width)])
        return result(pointer, types.int64), codegen
    return intrinsic(_named(name, 2)(typed))


def _store(name, width):
    """(pointer, index, value) or (pointer, index, four values)."""
    if SIMULATED:
        return simulator.store(name, width)

    def typed(typingctx, pointer, index, *values):
        suffix, register = _pointer(name, pointer, width)
        _check(name, "l", index)
        for v in values:
            _check(name, "f" if pointer.dtype == types.float32 else "r", v)
        suffix = suffix.replace("s", "b").replace("u", "b") if pointer.dtype.bitwidth < 32 else suffix
        text = f"st.global.{suffix} [$0], $1;" if width == 1 else f"st.global.v4.{suffix} [$0], {{$1, $2, $3, $4}};"
        constraints = ",".join(["l"] + [register.constraint] * width + ["~{memory}"])
        signature = types.void(pointer, types.int64, *[register.numba] * width)

        assembly = ir.InlineAsm(ir.FunctionType(ir.VoidType(), [ir.IntType(64)] + [register.llvm] * width), text, constraints, True)

        def codegen(context, builder, signature, args):
            builder.call(assembly, [_address(builder, *args[:2]), *args[2:]])
            return context.get_dummy_value()
        return signature, codegen
    return intrinsic(_named(name, 2 + width)(typed))


ld, ld4 = _load("ld", 1, False), _load("ld4", 4, False)
ldc, ldc4 = _load("ldc", 1, True), _load("ldc4", 4, True)
st, st4 = _store("st", 1), _store("st4", 4)


# Shared memory: one-dimensional arrays of words, without Python's negative indices, which cost two instructions an access

def _shared(name, width):
    """Parts of an access to a shared array: check(array type, index type), pointer(context, builder, array type, array, index, element)."""
    def check(array, index):
        if not isinstance(array, types.Array) or array.ndim != 1 or array.dtype not in (types.int32, types.uint32, types.float32):
            raise TypeError(f"ptx.{name}: expected a one-dimensional array of int32, uint32 or float32, got {array}")
        _check(name, "l", index)
        return _REGISTERS[_ACCESS[array.dtype][1]]

    def pointer(context, builder, array_type, array, index, element):
        data = context.make_array(array_type)(context, builder, array).data
        if width < 1:  # bytes
            return builder.gep(builder.bitcast(data, ir.PointerType(element)), [index])
        return builder.bitcast(builder.gep(data, [index]), ir.PointerType(element))
    return check, pointer


def _load_shared(name, width):
    """(array, index) -> element, or (array, index) -> four elements, which must lie on 16 bytes."""
    if SIMULATED:
        def get(array, index):
            if not 0 <= index <= len(array) - width or index % width:
                raise IndexError(f"{name}: elements {index}..{index + width - 1} of {len(array)}")
            return array[index] if width == 1 else tuple(array[index:index + 4])
        return get
    check, pointer = _shared(name, width)

    def typed(typingctx, array, index):
        register = check(array, index)

        def codegen(context, builder, signature, args):
            element = register.llvm if width == 1 else ir.VectorType(register.llvm, width)
            value = builder.load(pointer(context, builder, array, *args, element), align=4 * width)
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
            elif (type(value) is f32) != (array.dtype == f32):
                raise TypeError(f"{name}: {type(value).__name__} into {array.dtype}")
            if not 0 <= index < len(array):
                raise IndexError(f"{name}: element {index} of {len(array)}")
            array[index] = value if array.dtype == f32 else simulator._as_int(array.dtype.type)(value)
        return put
    check, pointer = _shared(name, n_bytes // 4)

    def typed(typingctx, array, index, value):
        register = check(array, index)
        _check(name, "f" if array.dtype == types.float32 and n_bytes == 4 else "r", value)
        taken = register.numba if n_bytes == 4 else types.int32

        def codegen(context, builder, signature, args):
            value = args[2] if n_bytes == 4 else builder.trunc(args[2], ir.IntType(8))
            builder.store(value, pointer(context, builder, array, *args[:2], value.type), align=n_bytes)
            return context.get_dummy_value()
        return types.void(array, types.int64, taken), codegen
    return intrinsic(_named(name, 3)(typed))


lds, lds4 = _load_shared("lds", 1), _load_shared("lds4", 4)
sts, sts8 = _store_shared("sts", 4), _store_shared("sts8", 1)


# The functions of arith, for this target

if SIMULATED:
    exp, log, sigmoid, silu, softplus, tanh, gelu = (simulator.checked(name, "f", "f") for name in arith.Functions._fields)
else:
    exp, log, sigmoid, silu, softplus, tanh, gelu = arith.functions(device, arith.Primitives(add, sub, mul, div, fma, i2f, as_i32, as_f32))
