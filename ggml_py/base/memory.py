"""Memory of this process that the system must keep in RAM."""
import ctypes
import os

CURRENT, ON_FAULT = 1, 4  # MCL_CURRENT, MCL_ONFAULT of Linux: what is mapped now, each page from when it is used


def lock() -> str | None:
    """The system moves none of it to disk from now on, what is allocated later aside; else why it cannot: one line."""
    system = ctypes.CDLL(None, use_errno=True)
    if not hasattr(system, "mlockall"):
        return "this system has no mlockall; weights may be moved to disk"
    if system.mlockall(CURRENT | ON_FAULT):
        return f"memory is not locked, and weights may be moved to disk: {os.strerror(ctypes.get_errno())} (RLIMIT_MEMLOCK)"
    return None
