"""The order of all tests, and how often garbage is collected."""
import gc


def pytest_configure():
    """What compiling leaves behind is much and in use: to look through it as often as Python does takes a fifth of all time."""
    gc.set_threshold(50_000, 20, 100)


def pytest_collection_modifyitems(items):
    """Simulated kernels first: they take longest, up to two minutes, and behind all others would leave one of two cores idle."""
    items.sort(key=lambda item: not item.name.endswith("in_the_simulator"))
