"""One op by its definition and by the kernels of a machine (`cuda_simulator`), with guards behind everything that is written.

An operand is a `Value`, or an array, which stands for a plain operand of the name that the op table has for it."""
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from ggml_py.backends.base import KernelBackend
from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.storage import CACHE_TYPES, LIMBS, Arrays, as_arrays, as_bytes, n_bytes
from ggml_py.check.evaluate import Value, contents, evaluate, make_node
from ggml_py.ops.table import OPS
from ggml_py.quant import tile
from ggml_py.quant.activation import quantize_activations
from ggml_py.quant.formats import format_of
from ggml_py.testing import assert_bitwise_equal

GUARD_BYTES = 256
POISON = 0xA5


def plain(name: str, array: np.ndarray) -> Value:
    """A float32, float64, int32, int64 or uint8 array as an operand."""
    array = np.ascontiguousarray(array)
    dtype = {"f4": "f32", "f8": "f64", "i4": "i32", "i8": "i64", "u1": "u8"}[array.dtype.str[1:]]
    return Value(name, dtype, array.shape, (array,))


def weight(name: str, type_: str, blocks: np.ndarray, n_cols: int) -> Value:
    """A matrix, or a stack of them, as an operand.   blocks: uint8 [..., n_rows, bytes of a row], as files have them."""
    *stack, n_rows, _ = blocks.shape
    words = tile.pack(blocks, format_of(type_), n_rows, n_cols, prod(stack))
    return Value(name, type_, (*stack, n_rows, n_cols), (words.reshape(-1).view(np.uint32),))


def product_input(type_: str, x: np.ndarray) -> Value:
    """Rows of float32 as a product with a weight of the type takes them: activation blocks, or the floats for a float weight."""
    return Value("x", "act", x.shape, quantize_activations(x)) if format_of(type_).is_quantized else plain("x", x)


def empty_cache(name: str, type_: str, n_cells: int, n_cols: int, byte: int = 0) -> Value:
    """A cache whose every byte is the same one."""
    block, size, dtype = CACHE_TYPES[type_]
    return Value(name, type_, (n_cells, n_cols), (np.full((n_cells, n_cols // block * size), byte, np.uint8).view(dtype),))


def cache(name: str, type_: str, x: np.ndarray) -> Value:
    """A cache that holds the rows x.   x: float32 [cells, columns]."""
    empty = empty_cache(name, type_, *x.shape)
    return replace(empty, arrays=define("set_rows", empty, x, np.arange(len(x)))[0])


def values(op: str, operands) -> list[Value]:
    """Operands of an op, arrays among them as plain operands."""
    return [each if isinstance(each, Value) else plain(name, each) for name, each in zip(OPS[op].operands, operands)]


def define(op: str, *operands: Value | np.ndarray, **params: Any) -> tuple[Arrays, ...]:
    """The results, in the op table's order, by kernels/reference."""
    return evaluate(CPUBackend("reference"), op, values(op, operands), params)


class MachineBackend(KernelBackend):
    """The CUDA kernels on a machine's memory. plan: of the launch, in the place of the one that the kernel's module would
    choose."""
    activations, device = LIMBS, "cuda:0"

    def __init__(self, machine, plan: Any = None):
        super().__init__("cuda")
        self.machine, self.target, self.fixed_plan = machine, machine.target, plan

    def data(self, tensor):
        address, offset = tensor.memory
        return address + offset

    def module(self, op):
        found = super().module(op)
        return found if found is None or self.fixed_plan is None else found._replace(plan=lambda call: self.fixed_plan)


def launch_op(machine, op: str, *operands: Value | np.ndarray, plan: Any = None, fault=None, settled: Iterable[str] = (),
              over: str = "", **params: Any) -> tuple[Arrays, ...]:
    """The results by the op's CUDA kernel. AssertionError where anything behind a result, the scratch memory or an operand was
    written.   over: the operand whose memory the first result takes."""
    backend = MachineBackend(machine, plan)
    node, leaves = make_node(backend, op, values(op, operands), params)
    backend.prepare(node)
    before: dict = {}

    def give_memory(tensor, data: np.ndarray) -> None:
        guarded = np.full(-(-data.size // GUARD_BYTES) * GUARD_BYTES + GUARD_BYTES, POISON, np.uint8)
        guarded[:data.size] = data
        tensor.buffer = machine.upload(guarded)
        before[tensor] = guarded

    try:
        for leaf, data in contents(node, leaves, lambda state: machine.number(state.buffer)):
            give_memory(leaf, data)
        scratch = [node.scratch] if node.scratch is not None else []
        if over:
            node.results[0].buffer = node.operands[over].buffer
        for tensor in (*node.results, *scratch):
            if tensor.root.buffer is None:
                give_memory(tensor.root, np.full(n_bytes(tensor.root), POISON, np.uint8))
        call = backend.call(node, bound=True)
        call.fault, call.settled = fault, frozenset(settled)
        machine.run(backend.step(call))
        written = {tensor.root for tensor in (*node.results, *scratch, *([node.operands[over]] if over else []))}
        for tensor, guarded in before.items():
            found = machine.download(tensor.buffer, np.uint8, guarded.size)
            size = n_bytes(tensor) if tensor in written else 0
            assert_bitwise_equal(found[size:], guarded[size:],
                                 f"{node!r}: {tensor!r}, bytes {size} and on, which must stay as they are")
        return tuple(result_arrays(machine.download(each.root.buffer, np.uint8, n_bytes(each.root)), each.dtype, each.shape)
                     for each in node.results)
    finally:
        machine.free()


def result_arrays(data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> Arrays:
    """What a kernel left in memory as arrays. AssertionError where activation blocks do not lie there as the layout has them: two
    limbs a level, and those of the sums. data: uint8."""
    layout = LIMBS.name if dtype == "act" else ""
    arrays = as_arrays(data, dtype, shape, layout)
    if dtype == "act":
        expected, at, n_scales = as_bytes(arrays, dtype, shape, layout), LIMBS.planes(*shape), arrays[1].size
        expected[at["d"] + 4 * n_scales:at["sums"]] = data[at["d"] + 4 * n_scales:at["sums"]]  # behind the scales lies anything
        assert_bitwise_equal(data, expected, f"activations {shape} as limbs")
    return arrays


def comparable(dtype: str, array: np.ndarray) -> np.ndarray:
    """Rows of a cache as floats, whose NaNs are equal whatever their bits: of q8_0 the scales and levels as float32."""
    if dtype == "q8_0":
        blocks = array.reshape(len(array), -1, 34)
        return np.concatenate([blocks[..., :2].copy().view(np.float16), blocks[..., 2:].view(np.int8)], axis=2, dtype=np.float32)
    return array.view(np.float16) if dtype == "f16" else array


def check_op(machine, name: str, op: str, *operands: Value | np.ndarray, plan: Any = None, fault=None, in_place: str = "",
             **params: Any) -> tuple[Arrays, ...]:
    """The kernel's results must have the bits of the definition's, which are returned.

    in_place: an operand over which the first result is written, in a second run."""
    operands = values(op, operands)
    expected, dtypes = define(op, *operands, **params), {name: value.dtype for name, value in zip(OPS[op].operands, operands)}
    for over in ("", in_place) if in_place else ("",):
        found = launch_op(machine, op, *operands, plan=plan, fault=fault, over=over, **params)
        for result, a, b in zip(OPS[op].results, found, expected, strict=True):
            for part, (x, y) in enumerate(zip(a, b, strict=True)):
                x, y = (comparable(dtypes.get(result, ""), array) for array in (x, y))
                assert_bitwise_equal(x, y, f"{name}, {result}{f', part {part}' * (len(a) > 1)}{f', over {over}' * bool(over)}")
    return expected
