"""Work on items, done while the next items are made."""
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

MOST_THREADS = 8

Item = TypeVar("Item")
Result = TypeVar("Result")


def overlapped(items: Iterable[Item], work: Callable[[Item], Result], most: int, side_by_side: bool = False) -> Iterator[Result]:
    """work(item) of each item, in the order of the items, by another thread; side_by_side: by several.

    At most `most` items wait while the next one is made; with 0 it is made when the work on the one before is done. An exception
    of the work comes out at once, one of making an item behind the results of those before it. Work that has not begun by then
    never does."""
    waiting: deque[Future[Result]] = deque()
    made, failure = iter(items), None
    with ThreadPoolExecutor(min(max(most, 1), MOST_THREADS) if side_by_side else 1, "ggml-py-overlapped") as threads:
        try:
            while True:
                try:
                    item = next(made)
                except StopIteration:
                    break
                except Exception as error:
                    failure = error
                    break
                waiting.append(threads.submit(work, item))
                while waiting and (len(waiting) > most or waiting[0].done()):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for each in waiting:
                each.cancel()
            if hasattr(made, "close"):
                made.close()
    if failure is not None:
        raise failure
