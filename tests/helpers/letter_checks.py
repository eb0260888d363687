"""Letters between devices: what a kernel posts and takes, on a machine whose devices share one array of bytes (the simulator)."""
from dataclasses import replace

import numpy as np

from ggml_py.kernels.cuda import letters
from ggml_py.kernels.reference.experts import weighted_sum_arrays
from ggml_py.kernels.cuda.letters import ENDED, FAULT, LETTERS, ROW, SEALED, SEQ, letter, turn

WORDS = SEALED // 4        # of a mailbox's header
N_SEALED = 4096            # words
OF_A_DEVICE = 64 << 10     # bytes


class Devices:
    """Their memory lies in one array: of each a mailbox, a table, and what is asked for."""

    def __init__(self, target, n: int):
        self.target, self.memory = target, np.zeros(n * OF_A_DEVICE + 64, np.uint8)
        self.start = -self.memory.ctypes.data % 64
        self.used = [SEALED + 8 * N_SEALED] * n
        for device in range(n):
            mailbox = self.words(device, 0, WORDS)
            mailbox[SEQ], mailbox[ENDED:] = 7, 6

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

    def sealed(self, device: int) -> np.ndarray:
        """[word, seal] of each."""
        return self.words(device, SEALED, 2 * N_SEALED).reshape(-1, 2)

    def letter(self, device: int, post=None, take=None, name=1, limit_ns=letters.LIMIT_NS, quantize=None, weighted_sum=None):
        """post: (place of the result, of the table, receivers, rows, words of a row); take: (place of the box, words, number of
        the letter); quantize: (place, rows, columns); weighted_sum: (place of the rows, of their weights, n_used). The launch's
        blocks run at one time, as those of a GPU do."""
        if post is not None:
            source, to, *rest = post
            post = (self.address(device, source), self.address(device, to), *rest)
        if take is not None:
            box, *rest = take
            take = (self.address(device, box), self.address(device, SEALED), *rest)
        if quantize is not None:
            act, *rest = quantize
            quantize = (self.address(device, act), *rest)
        if weighted_sum is not None:
            rows, weights, n_used = weighted_sum
            weighted_sum = (self.address(device, rows), self.address(device, weights), n_used)
        launch = letter(self.target, self.address(device, 0), post, take, name, limit_ns, weighted_sum, quantize)
        return replace(launch, kernel=replace(launch.kernel, n_cluster=launch.grid.x * launch.grid.y))

    def turn(self, device: int, others):
        """The device's end of a step, of which it tells the others."""
        to = self.table(device, [[self.number(other, 4 * (ENDED + device))] for other in others])
        return turn(self.target, self.address(device, 0), self.address(device, to), len(others))


def gather(devices: Devices, shares, n_rows: int, seed: int = 0, number: int = 3, acts=None, n_used: int = 0):
    """Each device's columns of rows go to all. Returns the launches, one a device; the place of the whole on each, and the whole.
    shares: words of a row that each has. number: of the letter. acts: where each quantizes the whole, of floats. n_used: each has
    the weighted sum of so many rows, of floats, if not 0."""
    rng, n, n_cols = np.random.default_rng(seed), len(shares), sum(shares)
    parts = [rng.integers(-2**31, 2**31 - 1, (n_rows, share), np.int64).astype(np.int32) for share in shares]
    if acts is not None or n_used:
        parts = [rng.standard_normal(part.shape, np.float32).view(np.int32) for part in parts]
    wholes = [devices.allocate(device, n_rows * n_cols) for device in range(n)]
    launches = []
    for device, part in enumerate(parts):
        source, named = devices.allocate(device, part.size), {}
        if acts is not None:
            named["quantize"] = acts[device], n_rows, n_cols
        if n_used:
            rows = rng.standard_normal((n_rows, n_used, shares[device]), np.float32)
            weights = rng.random((n_rows, n_used), np.float32)
            weighted_sum_arrays(rows, weights, part.view(np.float32))
            places = [devices.allocate(device, each.size) for each in (rows, weights)]
            for place, each in zip(places, (rows, weights)):
                devices.words(device, place, each.size)[:] = each.reshape(-1).view(np.int32)
            named["weighted_sum"] = *places, n_used
        else:
            devices.words(device, source, part.size)[:] = part.reshape(-1)
        at = 8 * sum(shares[:device])
        to = devices.table(device, [(devices.number(other, SEALED + at), n_cols, number, 0 if other == device else ENDED + other)
                                    for other in range(n)])
        launches.append(devices.letter(device, (source, to, n, n_rows, shares[device]), (wholes[device], n_rows * n_cols, number),
                                       **named))
    return launches, wholes, np.concatenate(parts, axis=1)


def seal(step: int, number: int = 3) -> int:
    return step * LETTERS + number


assert ROW == 4 and FAULT == 1
