"""A CPU device whose greedy steps run ahead."""
from ggml_py.backends.cpu import CPUBackend


class QueueingBackend(CPUBackend):
    """Steps are queued ahead as on a GPU, fed by a copy of the id before, but run at once: the ids are real."""
    asynchronous = True
