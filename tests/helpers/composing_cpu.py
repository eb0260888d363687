"""A CPU device that takes the fused ops that a GPU would: it runs a fused node as one, by its parts,
whose results it keeps to itself."""
from ggml_py.backends.base import KernelBackend
from ggml_py.backends.cpu import CPUBackend
from ggml_py.base.storage import n_bytes
from ggml_py.kernels.together import steps


class H200:
    """As much of `launch.Target` as kernels ask when they decide."""
    cc, warpgroups, halves, n_multiprocessors, shared_limit = (9, 0), True, True, 132, 227 << 10


class ComposingCPU(CPUBackend):
    """target: of the GPU whose kernel modules decide what is taken."""

    def __init__(self, device: str = "cpu", target=H200):
        super().__init__(device=device)
        self.cuda = KernelBackend("cuda")
        self.cuda.target, self.cuda.device = target, device
        self.declined: list[str] = []

    def has_kernel(self, op: str) -> bool:
        return self.cuda.has_kernel(op)

    def accepts(self, node) -> bool:
        accepted = self.cuda.accepts(node)
        if not accepted:
            self.declined.append(node.op)
        return accepted

    def prepare(self, node) -> None:
        for each in node.primitives():
            super().prepare(each)

    def bind(self, node):
        if not node.parts:
            return super().bind(node)
        for part in node.primitives():
            for tensor in (*part.results, *[part.scratch] * (part.scratch is not None)):
                if tensor.root.buffer is None:
                    tensor.root.buffer, tensor.root.device = self.empty(n_bytes(tensor.root)), self.device
        return steps(*[self.bind_part(part) for part in node.primitives()])

    def bind_part(self, part):
        """The step of a part of a fused node."""
        return super().bind(part)
