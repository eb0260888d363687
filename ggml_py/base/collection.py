"""Python's garbage collection in a process of our own: a start makes some 220,000 objects that stay, and looking through them
again and again takes a sixth of its time."""
import gc

AT_START = 300_000  # objects that are made before the first collection
USUAL = gc.get_threshold()


def put_off() -> None:
    """A process starts: no collection until `settle`, or until there are many objects."""
    gc.set_threshold(AT_START)


def settle() -> None:
    """What there is now stays, and is not looked at again; what comes is collected as usual. Nothing where it was not put off."""
    if gc.get_threshold()[0] == AT_START:
        gc.freeze()
        gc.set_threshold(*USUAL)
