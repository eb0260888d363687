"""The real model, where it is to be had: tests that need it skip with the reason when it cannot be pulled."""
import io
from functools import lru_cache

import pytest


@lru_cache(None)
def path():
    from ggml_py.base.errors import UserError
    from ggml_py.files.pull import pull
    try:
        return pull("smollm2", io.StringIO())
    except UserError as error:
        return error


def require():
    found = path()
    if isinstance(found, Exception):
        pytest.skip(f"needs SmolLM2-135M, which cannot be pulled: {found}")
    return found
