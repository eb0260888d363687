"""Garbage collection of a process that starts."""
import gc

from ggml_py.base.collection import AT_START, USUAL, put_off, settle


def test_put_off_and_settled():
    """Once; a process that put nothing off, one that uses the library, is left as it is."""
    settle()
    assert gc.get_threshold() == USUAL and not gc.get_freeze_count()
    put_off()
    assert gc.get_threshold()[0] == AT_START
    settle()
    try:
        assert gc.get_threshold() == USUAL and gc.get_freeze_count()
    finally:
        gc.unfreeze()
    settle()
    assert not gc.get_freeze_count()
