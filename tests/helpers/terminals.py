"""Programs on a terminal of their own: what is typed, and what they write."""
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

from places import environment

PASTE = "\x1b[200~{}\x1b[201~"  # as terminals send what is pasted, where a program asks for that


class Program:
    """A Python program on a pseudo-terminal; stderr apart. Use as a context manager."""

    def __init__(self, code: str, *argv: str, columns: int = 80):
        self.master, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

        def own_terminal():
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.process = subprocess.Popen([sys.executable, "-c", code, *argv], stdin=terminal, stdout=terminal,
                                        stderr=subprocess.PIPE,
                                        env=environment(TERM="xterm"), preexec_fn=own_terminal, text=True)
        os.close(terminal)
        self.said = ""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()
        os.close(self.master)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def idle(self, seconds: float = 20) -> None:
        """Waits until it has slept for a tenth of a second. A signal that comes while readline handles a key is seen by Python
        only when the next key is typed."""
        end = time.monotonic() + seconds
        before = None
        while time.monotonic() < end:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            state, used = fields[0], fields[11:13]  # the ticks of its own and of the system
            if state == "S" and used == before:
                return
            before = used
            time.sleep(0.1)
        raise AssertionError(f"it does not wait: {self.said!r}")

    def until(self, pattern: str, seconds: float = 20) -> str:
        """What it says until the pattern, with it, since the last call; without what only terminals obey."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.said)):
            if not select.select([self.master], [], [], max(0, end - time.monotonic()))[0]:
                raise AssertionError(f"no {pattern!r} in {self.said!r}")
            try:
                more = os.read(self.master, 65536).decode("utf-8", "replace")
            except OSError:  # it has ended
                raise AssertionError(f"no {pattern!r} in {self.said!r}, {self.process.communicate()[1]}") from None
            self.said = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]|\r", "", self.said + more)
        text, self.said = self.said[:found.end()], self.said[found.end():]
        return text

    def end(self, seconds: float = 60) -> tuple[int, str]:
        """Exit code and stderr, when it ends by itself."""
        _, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, err
