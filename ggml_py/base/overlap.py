"""Work on items, done while the next items are made."""
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def overlapped(items: Iterable[Item], work: Callable[[Item], Result], most: int, n_threads: int = 1) -> Iterator[Result]:
    """work(item) of each item, in their order, by n_threads others, at least one, which then works in that order, too. At most
    `most` items wait for that while the next one is made; with 0 it is made when the one before is done. An exception of either
    comes out; what has not begun then never does."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(max(n_threads, 1), "ggml-py-overlapped") as threads:
        try:
            for item in items:
                waiting.append(threads.submit(work, item))
                while waiting and (len(waiting) > most or waiting[0].done()):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for each in waiting:
                each.cancel()
