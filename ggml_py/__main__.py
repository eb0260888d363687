"""`ggml-py` and `python -m ggml_py`: the command line inside a guard that makes Ctrl-C, from here on and imports included, exit
code 130."""
import os
import signal
import sys


def main(argv=None, load_model=None) -> int:
    """Run one command and return its exit code. argv: the arguments, sys.argv[1:] by default; load_model: stands in for
    Model.load."""
    interrupted = dropped = False
    again = None  # the timer of an interrupt that was dropped

    def on_interrupt(signum, frame):
        nonlocal interrupted, dropped
        if interrupted and not dropped:  # the second one: something catches everything, or cleaning up takes too long
            os._exit(130)
        interrupted, dropped = True, False
        raise KeyboardInterrupt

    def comes_again(error):
        """Whether `error`, which C code has dropped, is the interrupt: it comes again a moment later."""
        nonlocal dropped, again
        if not (interrupted and isinstance(error, KeyboardInterrupt)):
            return False
        import threading
        dropped = True
        if again:  # of an interrupt before
            again.cancel()
        again = threading.Timer(0.02, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        again.daemon = True
        again.start()
        return True

    def on_unraisable(unraisable):
        """Python drops what is raised in a finalizer or a callback of C code, and would print it."""
        if not comes_again(unraisable.exc_value):
            unraisable_before(unraisable)

    def on_printed(kind, error, traceback):
        """C code that cannot raise what it got has Python print it: every extension that uses numpy does, when it imports it."""
        if not comes_again(error):
            printed_before(kind, error, traceback)

    unraisable_before, printed_before = sys.unraisablehook, sys.excepthook
    guard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell may have asked for SIGINT to be ignored
    try:
        if guard:
            signal.signal(signal.SIGINT, on_interrupt)
            sys.unraisablehook, sys.excepthook = on_unraisable, on_printed
        if argv is None:  # a process of its own
            from .base.collection import put_off
            put_off()
        from .cli import execute
        code = execute(argv, load_model)
        return 130 if interrupted else code
    except BaseException:
        if not interrupted:
            raise
        return 130  # whatever the interrupt became on its way: a C extension may turn it into an ImportError
    finally:
        if again:
            again.cancel()
        if guard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook, sys.excepthook = unraisable_before, printed_before


def program() -> None:
    """`main` as a process. A bug shows its traceback and ends with exit code 3, as 1 is that of `verify`; Ctrl-C ends a process
    that is about to end."""
    try:
        code = main()
    except Exception:
        import traceback
        traceback.print_exc()
        code = 3
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


if __name__ == "__main__":
    program()
