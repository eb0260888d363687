"""Random sequences of transfers on two devices, with delays, side streams, early deletion and interrupts, against plain arrays
(hypothesis).

The order of calls is the order of effects: each call is done at once to the arrays, and whatever comes out of a device, however
late, must be what the array held at the time of the call.
"""
import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule

from ggml_py.backends.transfers import Transfers
from transfer_checks import FaultyDriver, FaultyStream, Interrupt

RING = 1024
SIZES = st.sampled_from([1, 63, 64, 100, 256, 257, 700, 1024, 2500])
SEEDS = st.integers(0, 2**32 - 1)
DEVICES = st.integers(0, 1)


class Place:
    """A buffer of device i and what it must hold; `known` is False where an interrupted call has left anything."""

    def __init__(self, i: int, buffer, n: int):
        self.i, self.buffer = i, buffer
        self.values, self.known = np.zeros(n, np.uint8), np.ones(n, bool)


class Interleavings(RuleBasedStateMachine):
    places, pendings, pinneds = Bundle("places"), Bundle("pendings"), Bundle("pinneds")
    machine_class = None  # given by subclasses: what makes a machine of late_machines

    def __init__(self):
        super().__init__()
        self.machine = self.machine_class()
        self.used = [self.machine.used_bytes(i) for i in range(2)]
        self.faulty = [FaultyDriver(driver) for driver in self.machine.drivers]
        self.transfers = [Transfers(driver, FaultyStream(self.machine.stream(i), driver), RING)
                          for i, driver in enumerate(self.faulty)]
        self.sides = [FaultyStream(self.machine.stream(i), driver) for i, driver in enumerate(self.faulty)]
        self.open_places, self.open_pendings = [], []

    def interruptible(self, i: int, at: int | None, call) -> bool:
        """Makes a call, which is interrupted at moment `at` of the driver; True if it was not."""
        driver = self.faulty[i]
        driver.moments, driver.at = iter(range(10**9)), -1 if at is None else at
        try:
            call()
            return True
        except Interrupt:
            return False
        finally:
            driver.at = -1

    @rule(target=places, i=DEVICES, n=SIZES)
    def allocate(self, i, n):
        place = Place(i, self.transfers[i].allocate(n, zeroed=True), n)
        self.open_places.append(place)
        return place

    @rule(place=consumes(places), close=st.booleans())
    def free(self, place, close):
        """By a call, or by dropping it."""
        if close:
            self.transfers[place.i].free(place.buffer)
        self.open_places.remove(place)
        place.buffer = None

    @rule(target=pinneds, i=DEVICES, n=SIZES, seed=SEEDS)
    def pinned(self, i, n, seed):
        """In a list, since bundles keep what they held."""
        held = [self.transfers[i].pinned(n)]
        self.refill(held, seed)
        return held

    @rule(held=pinneds, seed=SEEDS)
    def refill(self, held, seed):
        array = held[0].writable()
        array[:] = np.random.default_rng(seed).integers(0, 256, array.size, np.uint8)

    @rule(held=consumes(pinneds))
    def drop_pinned(self, held):
        held.clear()

    def written(self, place, first, values, done):
        place.values[first:first + values.size] = values
        place.known[first:first + values.size] = done

    @rule(place=places, seed=SEEDS, at=st.none() | st.integers(0, 12))
    def write(self, place, seed, at):
        rng = np.random.default_rng(seed)
        first, last = sorted(rng.integers(0, place.values.size + 1, 2))
        source = rng.integers(0, 256, last - first, np.uint8)
        values = source.copy()
        done = self.interruptible(place.i, at, lambda: self.transfers[place.i].write(place.buffer, first, source))
        source[:] = ~values
        self.written(place, first, values, done)

    @rule(place=places, held=pinneds, at=st.none() | st.integers(0, 6), seed=st.none() | SEEDS)
    def write_pinned(self, place, held, at, seed):
        """The place grows to what it must hold. Refilled at once with a seed."""
        values = held[0].view().copy()
        if values.size > place.values.size:
            self.transfers[place.i].free(place.buffer)
            place.buffer = self.transfers[place.i].allocate(values.size, zeroed=True)
            place.values, place.known = np.zeros(values.size, np.uint8), np.ones(values.size, bool)
        first = place.values.size - values.size
        done = self.interruptible(place.i, at, lambda: self.transfers[place.i].write(place.buffer, first, held[0]))
        self.written(place, first, values, done)
        if seed is not None:
            self.refill(held, seed)

    @rule(target=pendings, place=places, seed=SEEDS)
    def read(self, place, seed):
        first, last = sorted(np.random.default_rng(seed).integers(0, place.values.size + 1, 2))
        pending = (self.transfers[place.i].read(place.buffer, first, last - first), place.values[first:last].copy(),
                   place.known[first:last].copy())
        self.open_pendings.append(pending)
        return pending

    @rule(place=places, at=st.integers(0, 12))
    def interrupted_read(self, place, at):
        self.interruptible(place.i, at, lambda: self.transfers[place.i].read(place.buffer, 0, place.values.size))

    @rule(pending=consumes(pendings), wanted=st.booleans())
    def result(self, pending, wanted):
        self.open_pendings = [p for p in self.open_pendings if p is not pending]
        if wanted:
            self.check(pending)

    def check(self, pending):
        value, values, known = pending
        assert (value.result()[known] == values[known]).all()

    @rule(place=places, source=places, seed=SEEDS, at=st.none() | st.integers(0, 12), side=st.booleans())
    def copy(self, place, source, seed, at, side):
        """Within a device, also on a side stream, or between devices. Interrupts come from the driver of either."""
        if place is source:
            return
        rng = np.random.default_rng(seed)
        n = int(rng.integers(0, min(place.values.size, source.values.size) + 1))
        first, begin = int(rng.integers(0, place.values.size - n + 1)), int(rng.integers(0, source.values.size - n + 1))
        here, there = self.transfers[place.i], self.transfers[source.i]

        def beside():
            stream, driver = self.sides[place.i], self.faulty[place.i]
            with here.fork(stream):
                if n:
                    driver.copy(int(place.buffer.handle) + first, int(source.buffer.handle) + begin, n, stream)
        if side and place.i == source.i:
            done = self.interruptible(place.i, at, beside)
        else:
            done = self.interruptible((place.i, source.i)[seed % 2], at,
                                      lambda: here.copy(place.buffer, first, there, source.buffer, begin, n))
        place.values[first:first + n] = source.values[begin:begin + n]
        place.known[first:first + n] = source.known[begin:begin + n] & done

    @rule(i=DEVICES, side=st.booleans())
    def delay(self, i, side):
        self.machine.delay((self.sides if side else [t.stream for t in self.transfers])[i].stream)

    @rule(i=DEVICES)
    def reopen(self, i):
        """Closes the transfers of a device, whatever is in flight, and goes on with others on the same streams."""
        self.transfers[i].close()
        self.transfers[i] = Transfers(self.faulty[i], self.transfers[i].stream, RING)

    def teardown(self):
        for place in self.open_places:
            self.open_pendings.append((self.transfers[place.i].read(place.buffer, 0, place.values.size), place.values,
                                       place.known))
        for pending in self.open_pendings[::2]:
            self.check(pending)
        for place in self.open_places:
            self.transfers[place.i].free(place.buffer)
        for transfers in self.transfers:
            transfers.close()
        for pending in self.open_pendings:
            self.check(pending)
        self.machine.check()
        assert [self.machine.used_bytes(i) for i in range(2)] == self.used
