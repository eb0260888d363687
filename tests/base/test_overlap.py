"""Work that is done while the next items are made."""
import threading
import time

import pytest

from ggml_py.base.overlap import MOST_THREADS, overlapped


class Made(list):
    """Items, and a note of each that was made."""

    def items(self, n: int):
        for i in range(n):
            self.append(i)
            yield i


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("most", [0, 1, 4, 99])
def test_results_come_in_order(most, side_by_side):
    assert list(overlapped(range(20), lambda i: i * i, most, side_by_side)) == [i * i for i in range(20)]
    assert list(overlapped([], str, most, side_by_side)) == []


@pytest.mark.parametrize("most", [0, 2, 5])
def test_so_many_wait_while_the_next_is_made(most):
    """Work that does not end: no item but these is made before somebody would have to wait for it."""
    made, go_on = Made(), threading.Event()
    results = overlapped(made.items(9), lambda i: go_on.wait(60) and i, most)
    taken = threading.Thread(target=lambda: next(results))
    taken.start()
    while len(made) <= most:
        pass
    taken.join(0.05)
    assert taken.is_alive() and made == list(range(most + 1))
    go_on.set()
    taken.join()
    assert list(results) == list(range(1, 9))


def test_work_goes_on_side_by_side():
    """Each of three waits until all three have begun."""
    begun = threading.Barrier(3, timeout=60)
    assert len(list(overlapped(range(3), lambda i: begun.wait(), 3, True))) == 3


def test_threads_are_not_as_many_as_items_wait():
    at_work = []

    def work(i):
        at_work.append(threading.active_count())
        time.sleep(0.001)
    before = threading.active_count()
    assert len(list(overlapped(range(200), work, 100, True))) == 200 and max(at_work) <= before + MOST_THREADS


def failing(i: int) -> int:
    if i == 3:
        raise ValueError("three")
    return i


@pytest.mark.parametrize("most", [0, 2])
def test_exceptions_come_out(most):
    made, done = Made(), []
    with pytest.raises(ValueError, match="^three$"):
        for each in overlapped(made.items(20), failing, most):
            done.append(each)
    assert done == [0, 1, 2] and len(made) <= 4 + most


@pytest.mark.parametrize("n_steps", [1, 2, 3])
@pytest.mark.parametrize("most", [0, 2, 99])
def test_results_come_before_the_exception_of_the_next_item(most, n_steps):
    """Through several steps, too: nothing that was done is lost."""
    results, done = map(failing, range(20)), []
    for _ in range(n_steps):
        results = overlapped(results, lambda i: i, most)
    with pytest.raises(ValueError, match="^three$"):
        for each in results:
            done.append(each)
    assert done == [0, 1, 2]


def test_the_step_before_ends_with_the_one_behind_it():
    """Its work does not go on, its items are closed, and no thread stays while the exception is known."""
    begun, closed = [], []

    def items():
        try:
            yield from range(20)
        finally:
            closed.append(True)

    def slowly(i):
        begun.append(i)
        time.sleep(0.02)
        return i + 3
    with pytest.raises(ValueError, match="^three$") as caught:
        list(overlapped(overlapped(items(), slowly, 4), failing, 0))
    n, threads = len(begun), [each.name for each in threading.enumerate() if each.name.startswith("ggml-py-overlapped")]
    time.sleep(0.1)
    assert closed and not threads and len(begun) == n and caught.value is not None


def test_what_is_left_never_begins():
    """Who takes no more of the results gets no more work done, and no thread stays."""
    begun, go_on = [], threading.Event()

    def work(i):
        begun.append(i)
        go_on.wait(60)
    results = overlapped(range(9), lambda i: i if i == 0 else work(i), 4)
    assert next(results) == 0
    threading.Timer(0.05, go_on.set).start()
    results.close()
    assert begun in ([], [1]) and not [each for each in threading.enumerate() if each.name.startswith("ggml-py-overlapped")]
