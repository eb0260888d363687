"""WIDTH float32 side by side, in vector registers: what the searches run on.

A vector is a number to numba, of the type VECTOR: +, -, *, / of two of them and unary - are elementwise IEEE operations, one
rounding each, none fused. So every lane has the bits that a float32 by itself would have, whatever instructions the CPU has;
where its registers are narrower, LLVM takes several. Sums stay in registers; loops over lanes would write them to memory for
each column.

Arrays are C-contiguous, and indices count their elements as if they had one dimension. No index is checked.
"""
import operator

from llvmlite import ir
from numba import types
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

WIDTH = 16
F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
LANES_F32, LANES_I32, LANES_I64 = (ir.VectorType(element, WIDTH) for element in (F32, I32, I64))


class Vector(types.Type):
    def __init__(self):
        super().__init__(f"Vector(float32, {WIDTH})")


VECTOR = Vector()


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager, type_):
        super().__init__(manager, type_, LANES_F32)


def _operator(symbol, emit, n_operands=2):
    class Typed(ConcreteTemplate):
        cases = [signature(VECTOR, *[VECTOR] * n_operands)]  # noqa: RUF012 (as numba wants it)

    infer_global(symbol)(Typed)
    lower_builtin(symbol, *[VECTOR] * n_operands)(lambda context, builder, signature, args: emit(builder, *args))


_operator(operator.add, lambda builder, a, b: builder.fadd(a, b))
_operator(operator.sub, lambda builder, a, b: builder.fsub(a, b))
_operator(operator.mul, lambda builder, a, b: builder.fmul(a, b))
_operator(operator.truediv, lambda builder, a, b: builder.fdiv(a, b))
_operator(operator.neg, lambda builder, a: builder.fneg(a), 1)


def _call(builder, name, result, *args):
    """Of one of LLVM's own functions."""
    function = ir.FunctionType(result, [a.type for a in args])
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, function, name), args)


def _splat(builder, x, type_):
    one = builder.insert_element(ir.Constant(type_, ir.Undefined), x, I32(0))
    return builder.shuffle_vector(one, ir.Constant(type_, ir.Undefined), ir.Constant(LANES_I32, [0] * WIDTH))


@intrinsic
def repeated(typingctx, x):
    """(float32) -> it in every lane."""
    return VECTOR(types.float32), lambda context, builder, _, args: _splat(builder, args[0], LANES_F32)


def _place(context, builder, array, data, i):
    data = context.make_array(array)(context, builder, data).data
    return builder.bitcast(builder.gep(data, [i]), LANES_F32.as_pointer())


def _is_array(array):
    return isinstance(array, types.Array) and array.layout == "C" and array.dtype == types.float32


@intrinsic
def at(typingctx, array, i):
    """The elements i .. i + WIDTH of a float32 array."""
    if not _is_array(array):
        return None

    def codegen(context, builder, signature, args):
        return builder.load(_place(context, builder, array, *args), align=4)
    return VECTOR(array, types.int64), codegen


@intrinsic
def put(typingctx, array, i, x):
    """Writes the vector there."""
    if not _is_array(array) or x != VECTOR:
        return None

    def codegen(context, builder, signature, args):
        builder.store(args[2], _place(context, builder, array, *args[:2]), align=4)
        return context.get_dummy_value()
    return types.none(array, types.int64, VECTOR), codegen


@intrinsic
def where_less(typingctx, a, b, x, y):
    """Of each lane x where a < b, else y."""
    def codegen(context, builder, signature, args):
        a, b, x, y = args
        return builder.select(builder.fcmp_ordered("<", a, b), x, y)
    return VECTOR(VECTOR, VECTOR, VECTOR, VECTOR), codegen


@intrinsic
def magnitude(typingctx, x):
    return VECTOR(VECTOR), lambda context, builder, _, args: _call(builder, f"llvm.fabs.v{WIDTH}f32", LANES_F32, args[0])


@intrinsic
def largest_lane(typingctx, x):
    """float32: the largest of numbers that are none of them NaN."""
    def codegen(context, builder, signature, args):
        return _call(builder, f"llvm.vector.reduce.fmax.v{WIDTH}f32", F32, args[0])
    return types.float32(VECTOR), codegen


@intrinsic
def looked_up(typingctx, table, x):
    """table[x], x rounded to zero: float32 numbers of elements of a float32 array."""
    if not _is_array(table) or x != VECTOR:
        return None

    def codegen(context, builder, signature, args):
        data = builder.ptrtoint(context.make_array(table)(context, builder, args[0]).data, I64)
        bytes_ = builder.shl(builder.zext(builder.fptosi(args[1], LANES_I32), LANES_I64), ir.Constant(LANES_I64, [2] * WIDTH))
        places = builder.inttoptr(builder.add(_splat(builder, data, LANES_I64), bytes_),
                                  ir.VectorType(F32.as_pointer(), WIDTH))
        every = ir.Constant(ir.VectorType(ir.IntType(1), WIDTH), [1] * WIDTH)
        return _call(builder, f"llvm.masked.gather.v{WIDTH}f32.v{WIDTH}p0", LANES_F32, places, I32(4), every,
                     ir.Constant(LANES_F32, ir.Undefined))
    return VECTOR(table, VECTOR), codegen
