"""Letters between devices: what a kernel posts and takes, on a machine whose devices share one array of bytes (the simulator)."""
import numpy as np

from ggml_py.kernels.cuda import letters
from ggml_py.kernels.cuda.letters import ENDED, FAULT, FLAGS, ROW, SEQ, letter, n_parts, turn

WORDS = 256                # of a mailbox
OF_A_DEVICE = 64 << 10     # bytes


class Devices:
    """Their memory lies in one array: of each a mailbox, a table, and what is asked for."""

    def __init__(self, target, n: int):
        self.target, self.memory = target, np.zeros(n * OF_A_DEVICE + 64, np.uint8)
        self.start = -self.memory.ctypes.data % 64
        self.used = [4 * WORDS + 1024] * n
        for device in range(n):
            mailbox = self.words(device, 0, WORDS)
            mailbox[SEQ], mailbox[ENDED:FLAGS] = 7, 6

    def place(self, device: int, offset: int) -> int:
        return self.start + device * OF_A_DEVICE + offset

    def address(self, device: int, offset: int):
        return self.target.address(self.memory) + self.place(device, offset)

    def number(self, device: int, offset: int) -> int:
        """The address as a kernel reads it in a table."""
        return self.memory.ctypes.data + self.place(device, offset)

    def words(self, device: int, offset: int, n: int) -> np.ndarray:
        return self.memory[self.place(device, offset):self.place(device, offset) + 4 * n].view(np.int32)

    def allocate(self, device: int, n_words: int) -> int:
        offset, self.used[device] = self.used[device], self.used[device] + -(-4 * n_words // 64) * 64
        return offset

    def mailbox(self, device: int) -> np.ndarray:
        return self.words(device, 0, WORDS)

    def table(self, device: int, rows) -> int:
        """Where a table of int64 lies that a kernel reads; each post has its own."""
        table = np.array(rows, np.int64)
        offset = self.allocate(device, 2 * table.size)
        self.words(device, offset, 2 * table.size).view(np.int64)[:] = table.reshape(-1)
        return offset

    def letter(self, device: int, post=None, take=(0, 0), name=1, limit_ns=letters.LIMIT_NS):
        if post is not None:
            source, to, *rest = post
            post = (self.address(device, source), self.address(device, to), *rest)
        return letter(self.target, self.address(device, 0), post, take, name, limit_ns)

    def turn(self, device: int, others):
        """The device's end of a step, of which it tells the others."""
        to = self.table(device, [[self.number(other, 4 * (ENDED + device))] for other in others])
        return turn(self.target, self.address(device, 0), self.address(device, to), len(others))


def gather(devices: Devices, shares, n_rows: int, seed: int = 0):
    """Each device's columns of rows go to all. Returns the launches, one a device where each is a block of each receiver, else
    all posts and then all takes, since the simulator runs block after block; the place of the whole on each, and the whole.
    shares: words of a row that each has."""
    rng, n, n_cols = np.random.default_rng(seed), len(shares), sum(shares)
    parts = [rng.integers(-2**31, 2**31 - 1, (n_rows, share), np.int64).astype(np.int32) for share in shares]
    wholes = [devices.allocate(device, n_rows * n_cols) for device in range(n)]
    first = lambda to, of: FLAGS + sum(n_parts(4 * n_rows * shares[j]) for j in range(n) if j != to and j < of)
    launches, takes = [], []
    joined = all(n_parts(4 * n_rows * share) == 1 for share in shares)
    for device, part in enumerate(parts):
        source = devices.allocate(device, part.size)
        devices.words(device, source, part.size)[:] = part.reshape(-1)
        at = 4 * sum(shares[:device])
        to = devices.table(device, [
            (devices.number(other, wholes[other] + at), n_cols,
             0 if other == device else devices.number(other, 4 * first(other, device)), 0 if other == device else ENDED + other)
            for other in range(n)])
        n_awaited = first(device, n) - FLAGS
        awaited = FLAGS, n_awaited
        launches.append(devices.letter(device, (source, to, n, n_rows, 4 * shares[device]), awaited if joined else (0, 0)))
        takes.append(devices.letter(device, None, awaited))
    return launches if joined else launches + takes, wholes, np.concatenate(parts, axis=1)


assert ROW == 4 and FAULT == 1
