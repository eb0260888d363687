"""What a device offers to graphs: the `Backend` protocol, and what all backends do alike with nodes and kernel modules
(`KernelBackend`)."""
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np

from ..base.errors import UserError
from ..base.storage import LEVELS, ActivationLayout
from ..kernels.call import Call, Operand, Unsupported, left_out
from ..ops.node import GraphError, Node, Tensor
from ..ops.table import OPS

Step = Callable[..., None]
MOST_DECISIONS = 4096  # that a backend remembers; a program of a large model needs some twenty


class Pending(Protocol):
    """Bytes on their way to the host."""
    def result(self) -> np.ndarray: ...  # waits for them; uint8


@runtime_checkable
class Backend(Protocol):
    """A device: its memory, copies, and kernels. All backends give the same bits."""
    device: str                    # "cpu", "cpu:1", "cuda:0", ...
    activations: ActivationLayout  # how its kernels hold activation blocks
    asynchronous: bool             # whether `run` returns before its steps have run
    reader: "Backend | None"       # which copies from and to memory of this one directly, and locks its pages for that

    @property
    def name(self) -> str: ...  # of the hardware
    def versions(self) -> dict[str, str]: ...  # by name, of what compiles and runs its kernels beside Python's packages
    def report(self) -> str: ...  # lines about its copies, for --verbose

    def memory_bytes(self) -> int: ...  # about what it could hold in all
    def free_bytes(self) -> int: ...    # of that, what nobody has now
    def empty(self, n_bytes: int) -> Any: ...  # a buffer, zeroed
    def upload(self, array: np.ndarray) -> Any: ...
    def free(self, buffer: Any) -> None: ...
    def write(self, buffer: Any, offset: int, data: np.ndarray) -> None: ...
    def read(self, buffer: Any, offset: int, n_bytes: int) -> Pending: ...
    def copy(self, buffer: Any, offset: int, source: Self, source_buffer: Any, source_offset: int, n_bytes: int) -> None: ...
    # of (to, *the operands of its copy), between backends of one kind: none waits for another
    def copy_together(self, copies: Sequence[tuple]) -> None: ...
    # begins to bring bytes that nobody changes; what is queued here behind a call of the function finds them
    def fetch(self, buffer: Any, offset: int, source: Self, source_buffer: Any, source_offset: int,
              n_bytes: int) -> Callable[[], None]: ...
    def settle(self) -> None: ...  # waits for what `fetch` began
    # of a buffer of the host, so that copies name it directly, where the system allows it: `fetch` brings it beside other work,
    # `write_locked` and `read_locked` of `Transfers` take it
    def lock_pages(self, buffer: np.ndarray) -> None: ...
    def unlock_pages(self, buffer: np.ndarray) -> None: ...
    def has_locked(self, buffer: Any) -> bool: ...
    def address(self, tensor: Tensor) -> int: ...
    def reaches(self, other: "Backend") -> bool: ...  # whether its kernels write to memory of the other one

    def has_kernel(self, op: str) -> bool: ...
    # has a kernel for a fused node that takes it, and would rather run that than the parts
    def accepts(self, node: Node) -> bool: ...
    # UserError where no kernel takes it; else sets node.plan and node.scratch, a tensor without memory
    def prepare(self, node: Node) -> None: ...
    def bind(self, node: Node) -> Step: ...  # of a prepared node whose operands, results and scratch have memory
    def bind_all(self, nodes: Sequence[Node]) -> list[Step]: ...  # of nodes that run one after the other, again and again perhaps
    def run(self, steps: Sequence[Step]) -> None: ...
    def kernel_name(self, node: Node) -> str: ...
    def new_graphs(self) -> Any: ...  # what replays steps (`cuda_graphs.GraphCache`), or None

    def expect(self) -> None: ...  # a model is about to be read: its kernels will be wanted
    def leaves_errors(self, node: Node) -> bool: ...  # whether its step cannot raise an error when it runs
    def forget_error(self) -> None: ...  # queues forgetting what steps left so far
    # queues reading what they left since; the function waits for it, and raises it
    def read_error(self) -> Callable[[], None]: ...
    def close(self) -> None: ...


class _Module(NamedTuple):
    """The functions of a kernel module for one op (`kernels.call`); None where it has none."""
    op: Callable[[Call], Step]
    plan: Callable[[Call], Any] | None
    scratch: Callable[[Call], tuple[str, tuple[int, ...]] | None] | None
    declines: Callable[[Call], bool] | None
    check: Callable[[Call], None] | None
    late_error: Callable[[Call, int, int], str] | None

    @classmethod
    def of(cls, module: ModuleType, op: str) -> "_Module":
        return cls(getattr(module, op), *(getattr(module, name, None) for name in cls._fields[1:]))

    @property
    def asks(self) -> bool:
        """Whether it wants to see a call before there is memory."""
        return any(function is not None for function in self[1:5])

    def decide(self, call: Call) -> "_Decision":
        try:
            if self.check is not None:
                self.check(call)
            if self.plan is not None:
                call.plan = self.plan(call)
        except Unsupported as error:
            return _Decision(refusal=str(error))
        return _Decision(call.plan, self.scratch(call) if self.scratch is not None else None,
                         self.declines is not None and self.declines(call))


class _Decision(NamedTuple):
    """What a kernel module says of a node before there is memory. scratch: dtype and shape. refusal: why the kernel does not take
    it, or None."""
    plan: Any = None
    scratch: tuple[str, tuple[int, ...]] | None = None
    declined: bool = False
    refusal: str | None = None


class KernelBackend:
    """What backends do alike: they find kernels by the names of the op table, and tell them what they need as a `Call`.

    room: the folder of kernels/. target: what calls have as their device."""
    activations = LEVELS
    target: Any = None
    device: str
    reader: Any = None

    def __init__(self, room: str):
        self.room = room
        self._modules: dict[str, _Module | None] = {}
        self._decisions: dict[tuple, _Decision] = {}

    def module(self, op: str) -> "_Module | None":
        """What the kernel module of an op has for it, or None where the op has no kernel here."""
        if op not in self._modules:
            name = f"..kernels.{self.room}.{OPS[op].module}"
            try:
                found = import_module(name, __package__)
            except ModuleNotFoundError as error:
                if not (error.name or "").endswith(OPS[op].module):
                    raise
                found = None
            self._modules[op] = _Module.of(found, op) if found is not None and hasattr(found, op) else None
        return self._modules[op]

    def data(self, tensor: Tensor) -> Any:
        """Where a tensor is, as kernels take it."""
        raise NotImplementedError

    def call(self, node: Node, bound: bool) -> Call:
        """bound: with memory."""
        def operand(tensor):
            return Operand(tensor.dtype, tensor.shape, self.data(tensor) if bound else None)
        op = node.declared
        values = dict.fromkeys(op.operands)
        for name, tensor in zip(op.operands, node.src):
            values[name] = operand(tensor)
        for name, tensor in zip(op.results, node.results):
            if name not in values:
                values[name] = operand(tensor)
        values.update(node.params)
        return Call(node.op, node.name, self.target, values, None if node.scratch is None else operand(node.scratch), node.plan)

    def has_kernel(self, op: str) -> bool:
        return self.module(op) is not None

    def _decide(self, node: Node) -> _Decision | None:
        """None without a kernel. Asked once for all nodes of the same op, dtypes, shapes and parameters: those of a model's
        layers; and once more where plans leave something out."""
        module = self.module(node.op)
        if module is None or not module.asks:
            return module and _Decision()
        key = (node.op, *[(tensor.dtype, tensor.shape) for tensor in (*node.src, *node.results)], *node.params.values(),
               left_out())
        if key not in self._decisions:
            if len(self._decisions) == MOST_DECISIONS:
                self._decisions.clear()
            self._decisions[key] = module.decide(self.call(node, bound=False))
        return self._decisions[key]

    def accepts(self, node: Node) -> bool:
        decision = self._decide(node)
        return decision is not None and decision.refusal is None and not decision.declined

    def prepare(self, node: Node) -> None:
        decision = self._decide(node)
        if decision is None:
            raise UserError(f"{node.name}: {self.device} has no kernel for the op {node.op}; the device cpu has one")
        if decision.refusal is not None:
            raise UserError(f"{node.name}: {self.device}: {node.op}: {decision.refusal}; the device cpu takes more")
        node.plan = decision.plan
        if decision.scratch is not None:
            node.scratch = Tensor(f"{node.name}-scratch", *decision.scratch, self.device)

    def bind(self, node: Node, settled: frozenset[str] = frozenset()) -> Step:
        """settled: as of `Call`."""
        for tensor in (*node.src, *node.results, node.scratch):
            if tensor is not None and tensor.root.device != self.device:
                raise GraphError(f"{node.name}: {node.op} on {self.device} has {tensor.name}, which lies on {tensor.root.device}")
        call = self.call(node, bound=True)
        call.settled = settled
        return self.step(call)

    def bind_all(self, nodes: Sequence[Node]) -> list[Step]:
        return [self.bind(node) for node in nodes]

    def step(self, call: Call) -> Step:
        module = self.module(call.op)
        assert module is not None, call.op
        return module.op(call)

    def kernel_name(self, node: Node) -> str:
        """The module of a node's kernel, and the types of weights and caches that it is made for."""
        types = ", ".join(source.dtype for name, source in zip(node.declared.operands, node.src)
                          if node.declared.roles[name] in ("weight", "state")
                          and source.dtype not in ("f32", "i32"))
        return f"kernels/{self.room}/{node.declared.module}.py: {node.op}{f'[{types}]' if types else ''}"

    def expect(self) -> None:
        pass

    def leaves_errors(self, node: Node) -> bool:
        return False

    def forget_error(self) -> None:
        pass

    def read_error(self) -> Callable[[], None]:
        return lambda: None
