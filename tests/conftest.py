"""The order of all tests."""


def pytest_collection_modifyitems(items):
    """Simulated kernels first: they take longest, up to two minutes, and behind all others would leave one of two cores idle."""
    items.sort(key=lambda item: not item.name.endswith("in_the_simulator"))
