"""`ggml-py` and `python -m ggml_py`: the command line inside a guard that makes Ctrl-C, from here on and imports included, exit code 130."""
import os
import signal
import sys


def main(argv=None, load_model=None) -> int:
    """Run one command and return its exit code. argv: the arguments, sys.argv[1:] by default; load_model: stands in for Model.load."""
    interrupted = False

    def on_interrupt(signum, frame):
        nonlocal interrupted
        if interrupted:  # the first one was lost where Python drops exceptions (a finalizer, a C callback), or cleaning up takes too long
            os._exit(130)
        interrupted = True
        raise KeyboardInterrupt

    guard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell may have asked for SIGINT to be ignored
    if guard:
        signal.signal(signal.SIGINT, on_interrupt)
    try:
        from .cli import execute
        return execute(argv, load_model)
    except BaseException:
        if not interrupted:
            raise
        return 130  # whatever the interrupt became on its way: a C extension may turn it into an ImportError
    finally:
        if guard:
            signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    sys.exit(main())
