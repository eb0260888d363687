"""Hosts whose memory is in several parts (nodes), each nearer to some of the CPUs: where memory lies and which CPU a thread has.
Linux alone; a process has one policy for what it allocates from then on."""
import ctypes
import os
import platform
from pathlib import Path

from . import threads

KINDS = {"distribute": "memory in turns on all nodes, threads pinned to CPUs of all in turns",
         "isolate": "threads pinned to the CPUs of the node that the process runs on",
         "numactl": "as the process was started, such as by numactl"}
NODES = Path("/sys/devices/system/node")
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
INTERLEAVE = 3


def nodes(root: Path = NODES) -> dict[int, list[int]]:
    """Node -> its CPUs, of those that this process may use."""
    mine = os.sched_getaffinity(0)
    found = {int(path.name[4:]): [cpu for cpu in numbers((path / "cpulist").read_text()) if cpu in mine]
             for path in root.glob("node[0-9]*")}
    return {node: cpus for node, cpus in sorted(found.items()) if cpus}


def numbers(text: str) -> list[int]:
    """Those of a list such as 0-3,8,10-11."""
    pairs = [part.split("-") for part in text.strip().split(",") if part]
    return [i for first, *last in pairs for i in range(int(first), int(*last or [first]) + 1)]


def in_turns(of_nodes: dict[int, list[int]]) -> list[int]:
    """The CPUs: the first of each node, then the second of each, and so on."""
    most = max(map(len, of_nodes.values()))
    return [cpus[i] for i in range(most) for cpus in of_nodes.values() if i < len(cpus)]


def use(kind: str, root: Path = NODES) -> None:
    """kind: of KINDS. Before weights are loaded. RuntimeError where the system has no such thing, ValueError for another kind."""
    if kind not in KINDS:
        raise ValueError(f"numa: must be {', '.join(KINDS)}, got {kind!r}")
    if kind == "numactl":
        return
    if not hasattr(os, "sched_setaffinity") or not (found := nodes(root)):
        raise RuntimeError(f"numa: {kind} needs Linux, and its folder {root}")
    if kind == "distribute":
        interleave(list(found))
        threads.pin(in_turns(found))
        return
    here = ctypes.CDLL(None).sched_getcpu()
    cpus = next(cpus for cpus in found.values() if here in cpus)
    threads.set_num_threads(min(threads.get_num_threads(), len(cpus)))
    threads.pin(cpus)


def interleave(of_nodes: list[int]) -> None:
    """Pages that the process touches first from now on lie on these nodes in turns."""
    number = SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise RuntimeError(f"numa: distribute is for {', '.join(SET_MEMPOLICY)}, this machine is {platform.machine()}")
    mask = (ctypes.c_ulong * 16)()
    for node in of_nodes:
        mask[node // 64] |= 1 << node % 64
    system = ctypes.CDLL(None, use_errno=True)
    if system.syscall(number, INTERLEAVE, mask, 64 * len(mask)):
        raise RuntimeError(f"numa: the system refused to distribute memory: {os.strerror(ctypes.get_errno())}")
