"""The order in which the simulator lets threads go on."""
from collections import deque

from ggml_py.kernels.cuda import mbarrier, simulator


class LeastFirst(deque):
    """Threads of a cluster that are ready, those that are not `held` first."""
    held = frozenset()

    def popleft(self):
        first = next((thread for thread in self if thread not in self.held), None)
        if first is None:
            return super().popleft()
        self.remove(first)
        return first


def hold_back(monkeypatch, held):
    """Of each cluster all threads go on before those that held(cluster) names."""
    def begun(cluster, *args):
        begin(cluster, *args)
        cluster.ready = LeastFirst(cluster.ready)
        cluster.ready.held = held(cluster)
    begin = simulator.Cluster.__init__
    monkeypatch.setattr(simulator.Cluster, "__init__", begun)


def hold_back_warp(monkeypatch, warp):
    """The same of a warp of each block, by its number."""
    hold_back(monkeypatch, lambda cluster: {thread for block in cluster.blocks for thread in block.threads
                                            if thread.index.x // 32 == warp})


class Held(set):
    """Threads that are held back now, and all that were."""
    def __init__(self):
        super().__init__()
        self.all = set()


def hold_back_at_leave(monkeypatch, warp) -> Held:
    """Of each cluster all threads go on before a warp of each block, by its number, tells that it is done with a slot
    (`mbarrier.leave`), and again behind that."""
    def leave_late(*args):
        thread = simulator.threads.getcurrent()
        if thread.index.x // 32 != warp:
            leave(*args)
            return
        held.add(thread)
        held.all.add(thread)
        leave(*args)
        simulator.syncwarp()  # where others go on
        held.discard(thread)
    held, leave = Held(), mbarrier.leave
    monkeypatch.setattr(mbarrier, "leave", leave_late)
    hold_back(monkeypatch, lambda cluster: held)
    return held
