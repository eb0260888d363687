"""Letters in the simulator: posts, takes and turns of devices, one of which runs while another waits for it."""
import numpy as np
import pytest

from cuda_simulator import SimulatedMachine, run_in_simulator
from ggml_py.kernels.cuda import letters, simulator
from ggml_py.kernels.cuda.letters import ENDED, FAULT, FLAGS, SEQ
from letter_checks import Devices, gather


def test_in_the_simulator():
    run_in_simulator(__file__)


@pytest.fixture
def target(monkeypatch):
    monkeypatch.setattr(letters, "THREADS", 32)
    letters.letter_kernel.cache_clear()
    yield SimulatedMachine().target
    letters.letter_kernel.cache_clear()


@pytest.mark.parametrize("shares, n_rows", [((8, 8), 1), ((32, 96), 3), ((5, 7), 2), ((4, 8, 4), 2), ((300, 212), 1)])
def simulate_a_gather(target, shares, n_rows):
    """Devices take turns where they wait. Then all have the whole, and nothing beyond it is touched."""
    devices = Devices(target, len(shares))
    launches, wholes, expected = gather(devices, shares, n_rows)
    before = [devices.words(device, wholes[device] + 4 * expected.size, 16).copy() for device in range(len(shares))]
    simulator.together(launches)
    for device, whole in enumerate(wholes):
        assert np.array_equal(devices.words(device, whole, expected.size), expected.reshape(-1)), device
        if -4 * expected.size % 64:
            assert np.array_equal(devices.words(device, whole + 4 * expected.size, 16)[:1], before[device][:1])
        assert not devices.mailbox(device)[FAULT:FAULT + 3].any()


def simulate_a_step_and_the_next(target):
    """The flags of the step before are none of this step; the ends of steps are told."""
    devices = Devices(target, 2)
    for step in range(7, 10):
        launches, wholes, expected = gather(devices, (8, 24), 2, step)
        flags = devices.mailbox(0)[FLAGS:FLAGS + 1].copy()
        assert flags == (step - 1 if step > 7 else 0)
        turns = [devices.turn(1, [0]), devices.turn(0, [1])]
        simulator.together([launches[0], lambda: (launches[1](), turns[0]())])
        turns[1]()
        for device in range(2):
            assert np.array_equal(devices.words(device, wholes[device], expected.size), expected.reshape(-1))
            assert devices.mailbox(device)[SEQ] == step + 1 and devices.mailbox(device)[ENDED + 1 - device] == step


def simulate_a_receiver_that_has_not_ended(target):
    """Nothing is posted before it has."""
    devices = Devices(target, 2)
    launches, wholes, expected = gather(devices, (8, 8), 1)
    devices.mailbox(0)[ENDED + 1] = 5
    seen = []

    def end():
        seen.append(devices.words(1, wholes[1], 8).any() or devices.mailbox(1)[FLAGS:].any())
        devices.mailbox(0)[ENDED + 1] = 6
    simulator.together([launches[0], end, launches[1]])
    assert seen == [False] and np.array_equal(devices.words(0, wholes[0], 16), expected.reshape(-1))


@pytest.mark.parametrize("what", ["never", "old"])
def simulate_a_letter_that_does_not_come(target, what):
    """It is named, with what stood in its place, and nobody waits again."""
    devices = Devices(target, 2)
    if what == "old":
        devices.mailbox(0)[FLAGS] = 6
    devices.letter(0, None, (FLAGS, 1), name=3, limit_ns=2_000_000)()
    assert devices.mailbox(0)[FAULT:FAULT + 3].tolist() == [3, FLAGS, 6 if what == "old" else 0]
    devices.letter(0, None, (FLAGS, 1), name=4, limit_ns=10**15)()
    assert devices.mailbox(0)[FAULT] == 3


def simulate_a_payload_cut_short(target):
    """The checks see it: a post of less than its receiver expects leaves the rest as it was."""
    devices = Devices(target, 2)
    launches, wholes, expected = gather(devices, (8, 8), 2)
    post = launches[1]
    args = [*post.args]
    args[4] = 1  # rows
    launches[1] = type(post)(post.kernel, post.grid, post.block, tuple(args), post.shared)
    simulator.together(launches)
    assert not np.array_equal(devices.words(0, wholes[0], expected.size), expected.reshape(-1))

