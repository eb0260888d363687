"""What comes to shared memory by itself: copies, messages of other blocks of a cluster, and the barriers that wait for them."""
import numpy as np
from greenlet import getcurrent

from .instructions import as_int, i32, u32
from .memory import check_elements, unwritten


class _Phases:
    """A barrier of `mbarrier`: one phase after the other, each of n arrivals and of the bytes that are expected."""

    def __init__(self, n):
        self.n, self.n_arrived, self.phase, self.waiting, self.copies = n, 0, 0, [], []
        self.n_bytes = 0  # that bulk copies, or other blocks, have still to bring


def barrier_begin(array, index, n):
    check_elements("mbarrier", array, index, 2)
    barriers = getcurrent().block.barriers
    if int(index) in barriers:
        raise RuntimeError(f"mbarrier: word {index} holds one that has not ended")
    barriers[int(index)] = _Phases(int(n))


def barrier_end(array, index):
    barrier = getcurrent().block.barriers.pop(int(index))
    if barrier.n_arrived or barrier.n_bytes:
        raise RuntimeError(f"mbarrier: word {index} ends with {barrier.n_arrived} arrivals of {barrier.n}, {barrier.n_bytes} "
                           "bytes to come")


def barrier_arrive(array, index):
    _arrive(getcurrent().block.barriers[int(index)])


def _arrive(barrier):
    """By chance others, who may have waited for that, go on before the thread does."""
    barrier.n_arrived += 1
    _end_phase(barrier)
    thread = getcurrent()
    if thread.block.random.getrandbits(1):
        thread.block.ready.append(thread)
        thread.parent.switch()


def barrier_expect(array, index, n_bytes):
    getcurrent().block.barriers[int(index)].n_bytes += int(n_bytes)
    barrier_arrive(array, index)


def barrier_bring(array, index, pointer, first, n_words, barrier_index):
    """A bulk copy is done at once, or when the phase ends."""
    block = getcurrent().block
    _receive(block, block.barriers[int(barrier_index)], *_brought(array, index, pointer, first, int(n_words)))


def barrier_bring_to_both(array, index, pointer, first, n_words, barrier_index):
    to, value = _brought(array, index, pointer, first, int(n_words))
    for number in range(2):
        block, barrier = _far_barrier(cluster_address(array, barrier_index, number))
        _receive(block, barrier, block.dynamic.view(array.dtype)[index:index + len(to)], value)


def _brought(array, index, pointer, first, n):
    """(place, what it takes) of a bulk copy."""
    if index % 4 or n % 4 or not 0 <= index <= len(array) - n:
        raise IndexError(f"bring: elements {index}..{index + n - 1} of {len(array)}")
    pointer.slice("bring", first, 4)
    to, value = array[index:index + n], pointer.elements[int(first):int(first) + n].view(array.dtype)
    if len(value) != n:
        raise IndexError(f"bring: elements {first}..{first + n - 1} of {len(pointer.elements)}")
    return to, value


def _receive(block, barrier, to, value):
    """What comes by itself: at once, or when the phase ends."""
    if block.random.getrandbits(1):
        to[:] = value
    else:
        to[:] = unwritten(len(to), to.dtype)
        barrier.copies.append((to, value))
    barrier.n_bytes -= to.nbytes
    _end_phase(barrier)


def _end_phase(barrier):
    """Where all have arrived and all bytes are there."""
    block = getcurrent().block
    if barrier.n_arrived == barrier.n and not barrier.n_bytes:
        _done(barrier.copies)
        barrier.phase, barrier.n_arrived = barrier.phase + 1, 0
        block.ready.extend(barrier.waiting)
        barrier.waiting.clear()


def barrier_arrive_behind_copies(array, index):
    """The phase ends with the thread's copies, which are done then."""
    copies_commit()
    thread = getcurrent()
    for group in thread.groups:
        thread.block.barriers[int(index)].copies += group
    thread.groups = []
    barrier_arrive(array, index)


def barrier_wait(array, index, parity):
    thread = getcurrent()
    barrier = thread.block.barriers[int(index)]
    while barrier.phase & 1 == parity:
        barrier.waiting.append(thread)
        thread.parent.switch()


# Clusters

def cluster_rank():
    block = getcurrent().block
    return i32(block.cluster.blocks.index(block))


def cluster_arrive():
    thread = getcurrent()
    cluster = thread.block.cluster
    if thread.phases > thread.waited:
        raise RuntimeError("the cluster's barrier: a thread arrives that has not waited")
    thread.phases += 1
    cluster.end_phase()


def cluster_wait():
    thread = getcurrent()
    cluster = thread.block.cluster
    if thread.phases == thread.waited:
        raise RuntimeError("the cluster's barrier: a thread waits that has not arrived")
    while cluster.phase < thread.phases:
        cluster.waiting.append(thread)
        thread.parent.switch()
    thread.waited = thread.phases


def cluster_address(array, index, number):
    """array: all of the dynamic shared memory, as words. Of an address the upper byte is the block, the others a byte there."""
    dynamic = getcurrent().block.dynamic
    if array.base is None or array.nbytes != dynamic.nbytes:
        raise TypeError("address: the array must be the dynamic shared memory")
    return i32(int(number) << 24 | 4 * int(index))


def _far(address):
    """(block, word) of an address."""
    return getcurrent().block.cluster.blocks[int(address) >> 24], (int(address) & 0xffffff) // 4


def _far_barrier(address):
    """(block, barrier) of an address."""
    (block, at), number = _far(address), int(address) >> 24
    if not block.begun or not block.n_live:
        raise RuntimeError(f"block {number} of the cluster has {'ended' if block.begun else 'not begun'}")
    if at not in block.barriers:
        raise RuntimeError(f"block {number} of the cluster has no mbarrier at word {at}")
    return block, block.barriers[at]


def _send(n):
    def send(address, barrier, *words):
        (block, word), (same, barrier) = _far(address), _far_barrier(barrier)
        if same is not block:
            raise RuntimeError("send: the mbarrier is in another block")
        array = block.dynamic.view(u32)
        check_elements("send", array, word, n)
        _receive(block, barrier, array[word:word + n], np.array([as_int(u32)(w) for w in words], u32))
    return send


cluster_send1, cluster_send2, cluster_send4 = map(_send, (1, 2, 4))


def cluster_send(array, index, number, word, barrier):
    cluster_send1(cluster_address(array, index, number), cluster_address(array, barrier, number), word)


def cluster_arrive_at(barrier):
    _arrive(_far_barrier(barrier)[1])


# Copies that run on while the thread does: done at once, or when it waits for them, by chance

def copy(name, width, n, step, stride=128):
    def put(array, index, pointer, first):
        thread = getcurrent()
        for i in range(n):
            at = index + stride * i
            check_elements(name, array, at, width)
            to, value = array[at:at + width], pointer.elements[pointer.slice(name, first + step * i, width)]
            if thread.block.random.getrandbits(1):
                thread.copies.append((to, value))
            else:
                to[:] = value
    return put


def _done(copies):
    for to, value in copies:
        to[:] = value
    copies.clear()


def copies_commit():
    thread = getcurrent()
    thread.groups.append(thread.copies)
    thread.copies = []


def copies_wait_but(n):
    def wait():
        groups = getcurrent().groups
        while len(groups) > n:
            _done(groups.pop(0))
    return wait


def copies_wait():
    copies_commit()
    copies_wait_but(0)()
