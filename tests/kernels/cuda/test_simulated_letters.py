"""Letters in the simulator: posts, takes and turns of devices, one of which runs while another waits for it."""
import numpy as np
import pytest

from cuda_simulator import SimulatedMachine, run_in_simulator
from ggml_py.base.storage import LIMBS, bytes_of
from ggml_py.kernels.cuda import letters, simulator
from ggml_py.kernels.cuda.letters import ENDED, FAULT, SEQ
from ggml_py.quant.activation import quantize_activations
from letter_checks import Devices, gather, seal


def test_in_the_simulator():
    run_in_simulator(__file__)


@pytest.fixture
def target(monkeypatch):
    monkeypatch.setattr(letters, "THREADS", 32)
    letters.letter_kernel.cache_clear(), letters.letter_weighted_sum_kernel.cache_clear()
    yield SimulatedMachine().target
    letters.letter_kernel.cache_clear(), letters.letter_weighted_sum_kernel.cache_clear()


@pytest.mark.parametrize("shares, n_rows, most_blocks", [((8, 8), 1, 4), ((32, 96), 3, 128), ((5, 7), 2, 4), ((4, 8, 4), 2, 4),
                                                         ((300, 211), 1, 128), ((300, 211), 1, 4), ((70, 31), 3, 2)])
def simulate_a_gather(target, monkeypatch, shares, n_rows, most_blocks):
    """Devices take turns where they wait. Then all have the whole, and nothing beyond it is touched. A thread takes one word, or
    four at a time where there are too many for all threads."""
    monkeypatch.setattr(letters, "MOST_BLOCKS", most_blocks)
    devices = Devices(target, len(shares))
    launches, wholes, expected = gather(devices, shares, n_rows)
    before = [devices.words(device, wholes[device] + 4 * expected.size, 16).copy() for device in range(len(shares))]
    simulator.together(launches)
    for device, whole in enumerate(wholes):
        assert np.array_equal(devices.words(device, whole, expected.size), expected.reshape(-1)), device
        if -4 * expected.size % 64:
            assert np.array_equal(devices.words(device, whole + 4 * expected.size, 16)[:1], before[device][:1])
        assert not devices.mailbox(device)[FAULT:FAULT + 3].any()


@pytest.mark.parametrize("shares, n_rows", [((64, 192), 2), ((128, 384), 3), ((261, 100), 1), ((64, 32, 96), 2)])
def simulate_a_gather_that_is_quantized(target, shares, n_rows):
    """As `quantize` of the whole, which is in the box too."""
    devices, k = Devices(target, len(shares)), sum(shares)
    acts = [devices.allocate(device, bytes_of("act", (n_rows, k)) // 4) for device in range(len(shares))]
    launches, wholes, expected = gather(devices, shares, n_rows, acts=acts)
    simulator.together(launches)
    whole = expected.reshape(-1)
    expected = LIMBS.write(quantize_activations(expected.view(np.float32)), n_rows, k)
    for device, act in enumerate(acts):
        assert np.array_equal(devices.words(device, act, expected.size // 4).view(np.uint8), expected), device
        assert np.array_equal(devices.words(device, wholes[device], whole.size), whole), device
        assert not devices.mailbox(device)[FAULT:FAULT + 3].any()


@pytest.mark.parametrize("shares, n_rows, n_used, most_blocks", [((40, 24), 2, 3, 128), ((64, 64), 1, 8, 2),
                                                                 ((7, 9, 5), 3, 11, 128)])
def simulate_a_gather_of_weighted_sums(target, monkeypatch, shares, n_rows, n_used, most_blocks):
    """As `weighted_sum` on each device, whose result is there too."""
    monkeypatch.setattr(letters, "MOST_BLOCKS", most_blocks)
    devices = Devices(target, len(shares))
    launches, wholes, expected = gather(devices, shares, n_rows, n_used=n_used)
    simulator.together(launches)
    for device, whole in enumerate(wholes):
        assert np.array_equal(devices.words(device, whole, expected.size), expected.reshape(-1)), device
        assert not devices.mailbox(device)[FAULT:FAULT + 3].any()


def simulate_a_step_and_the_next(target):
    """What was sealed in the step before is not taken in this one; the ends of steps are told."""
    devices = Devices(target, 2)
    for step in range(7, 10):
        launches, wholes, expected = gather(devices, (4, 12), 2, step)
        assert np.all(devices.sealed(0)[:32, 1] == (seal(step - 1) if step > 7 else 0))
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
        seen.append(devices.words(1, wholes[1], 8).any() or devices.sealed(1).any())
        devices.mailbox(0)[ENDED + 1] = 6
    simulator.together([launches[0], end, launches[1]])
    assert seen == [False] and np.array_equal(devices.words(0, wholes[0], 16), expected.reshape(-1))


@pytest.mark.parametrize("found", [0, seal(6, 5), seal(7, 4)], ids=["never", "old", "another one"])
def simulate_a_letter_that_does_not_come(target, found):
    """It is named, with what stood in its place, and nobody waits again."""
    devices = Devices(target, 2)
    devices.sealed(0)[:8, 1] = seal(7, 5)
    devices.sealed(0)[6, 1] = found
    devices.letter(0, None, (devices.allocate(0, 8), 8, 5), name=3, limit_ns=2_000_000)()
    assert devices.mailbox(0)[FAULT:FAULT + 3].tolist() == [3, 6, found]
    devices.letter(0, None, (devices.allocate(0, 8), 8, 6), name=4, limit_ns=10**15)()
    assert devices.mailbox(0)[FAULT] == 3


def simulate_letters_that_share_memory(target):
    """Two of one step, one behind the other: the second one is awaited, though the first lies there with the step's number."""
    devices = Devices(target, 2)
    for number in 3, 4:
        launches, wholes, expected = gather(devices, (8, 8), 1, number, number)
        simulator.together(launches)
        for device, whole in enumerate(wholes):
            assert np.array_equal(devices.words(device, whole, 16), expected.reshape(-1)), (device, number)


def simulate_a_payload_cut_short(target):
    """The checks see it: a post of less than its receiver expects leaves the rest as it was."""
    devices = Devices(target, 2)
    launches, wholes, expected = gather(devices, (8, 8), 2)
    for i, launch in enumerate(launches):
        args = [*launch.args]
        args[6] = 1 if i else 2  # rows that are posted
        args[11] = 500_000_000   # ns
        launches[i] = type(launch)(launch.kernel, launch.grid, launch.block, tuple(args), launch.shared)
    simulator.together(launches)
    assert not np.array_equal(devices.words(0, wholes[0], expected.size), expected.reshape(-1))
    name, word, found = devices.mailbox(0)[FAULT:FAULT + 3].tolist()
    assert (name, found) == (1, 0) and 24 <= word < 32

