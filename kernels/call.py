"""What a kernel is told of one node of a graph: a `Call`, for every op and on every device alike.

A kernel module of kernels/reference, kernels/cpu or kernels/cuda has, for each of its ops, a function of the op's name:
`op(call)` returns a step, which runs the op as often as it is called (on a CPU without arguments, on a GPU with a stream). Beside
it may stand, for all ops of the module:

    check(call)     raises `Unsupported` where the kernel does not take these operands
    plan(call)      what the launch is decided by (a shape of blocks, a choice of kernels), computed once, then `call.plan`
    declines(call)  whether the device computes a fused op faster as its parts
    scratch(call)   (dtype, shape) of the memory that the kernel needs beside its results, or None; then `call.scratch`
    late_error(call, i, found)   the message of an error that steps leave in memory as two numbers (`call.fault`), since they
                    cannot raise it when they run

All but the last are asked in this order, before any memory is there: `data` of every operand is None until `op` is called.
"""
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

HALVES = "products of mmq_half"
_left_out: ContextVar[frozenset[str]] = ContextVar("left out of plans", default=frozenset())


@contextmanager
def planned_without(what: str) -> Iterator[None]:
    """What this thread plans meanwhile does without it: HALVES. No bit depends on it, and `verify` sees to that."""
    token = _left_out.set(left_out() | {what})
    try:
        yield
    finally:
        _left_out.reset(token)


def left_out() -> frozenset[str]:
    return _left_out.get()


class Unsupported(ValueError):
    """Operands or parameters that a kernel does not take. The message says what was found and what is allowed."""


class Operand(NamedTuple):
    """A tensor as kernels see it. data: on a CPU an array (of activation blocks three: q, d and sums), on a GPU an address."""
    dtype: str
    shape: tuple[int, ...]
    data: Any = None

    @property
    def n_rows(self) -> int:
        """The product of all dimensions but the last."""
        n = 1
        for size in self.shape[:-1]:
            n *= size
        return n

    @property
    def n_cols(self) -> int:
        return self.shape[-1]

    # Of a CPU, whose data is arrays

    @property
    def rows(self) -> Any:
        """The array as [n_rows, n_cols]."""
        return self.data.reshape(-1, self.n_cols)

    def heads(self, n_head: int) -> Any:
        """The array as [n_rows, n_head, channels]."""
        return self.data.reshape(len(self.data), n_head, self.n_cols // n_head)

    @property
    def factors(self) -> tuple:
        """The arrays as a tuple: of activation blocks q, d and sums, of anything else one."""
        return self.data if isinstance(self.data, tuple) else (self.data,)

    # Of a GPU, whose data is an address

    def behind(self, n_bytes: int, dtype: str, shape: tuple[int, ...]) -> "Operand":
        """Another tensor, n_bytes behind this one's address."""
        return Operand(dtype, shape, None if self.data is None else self.data + n_bytes)


class Call:
    """Operands, results and parameters of a node are attributes by the names of the op table: call.x, call.out, call.eps; None
    where an optional one is absent.

    op: the op's name. name: the node's, for messages. device: what the kernel runs on (`kernels.cuda.launch.Target` of a GPU,
    None of a CPU). scratch: Operand; plan: what `plan` returned; fault: (address, number of the node) where errors are left;
    settled: names of operands that a launch may read before it waits (`kernels.cuda.launch`)."""

    settled: frozenset[str] = frozenset()

    def __init__(self, op: str, name: str, device: Any, values: dict[str, Any], scratch: Operand | None = None, plan: Any = None,
                 fault=None):
        self.__dict__.update(values)  # so that each is found at once, not by __getattr__
        self.op, self.name, self.device, self.scratch, self.plan, self.fault = op, name, device, scratch, plan, fault
        self.values = values

    def __getattr__(self, name: str) -> Any:
        there = self.__dict__
        raise AttributeError(f"{there.get('op')}: no operand, result or parameter {name}; there are: "
                             f"{', '.join(there.get('values', ()))}")

    def part(self, op: str, **values: Any) -> "Call":
        """A call of another op with these operands, results and parameters, on the same device: one step of this one."""
        return Call(op, self.name, self.device, values)

    def __repr__(self) -> str:
        return f"{self.op}({', '.join(f'{name}={value}' for name, value in self.values.items())})"
