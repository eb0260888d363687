"""Random interleavings of transfers with the operations of the fake driver's streams,
each of which runs when hypothesis says so."""
from hypothesis import settings, strategies as st
from hypothesis.stateful import invariant, rule
from late_machines import FakeMachine
from transfer_interleavings import Interleavings

from ggml_py.backends import transfers


class FakeInterleavings(Interleavings):
    machine_class = FakeMachine

    @rule(choices=st.lists(st.integers(0, 5), min_size=1, max_size=30))
    def run_some(self, choices):
        for index in choices:
            self.machine.world.step(index)

    @invariant()
    def nothing_was_gone(self):
        self.machine.check()


class InterleavingsWithKeptMemory(FakeInterleavings):
    """Each read lands in memory that others had."""

    def __init__(self):
        super().__init__()
        self.least, transfers.LEAST_KEPT = transfers.LEAST_KEPT, 1

    def teardown(self):
        transfers.LEAST_KEPT = self.least
        super().teardown()


TestInterleavings, TestInterleavingsWithKeptMemory = FakeInterleavings.TestCase, InterleavingsWithKeptMemory.TestCase
TestInterleavings.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestInterleavingsWithKeptMemory.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
