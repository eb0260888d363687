"""How garbage is looked for."""
import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def only_new_garbage():
    """In what was made since a module's tests began. Checks of transfers ask for it hundreds of times, and to look through what
    all tests before have left takes half a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
