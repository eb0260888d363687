"""`ggml-py verify`: the same logits by every setting of the axes, one digest each. There must be one digest.

A setting's digest is the Merkle root of its windows' digests (`LogitsDigest` of all rows). A setting that is computed on the
first tokens of the first window alone, since a CPU would take long, is compared with the digest of these rows of the default
setting.
"""
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from .. import NUMERICS_VERSION
from ..base.errors import ParameterError
from ..base.overlap import overlapped
from ..engine.windows import is_elsewhere
from .axes import Setting, play
from .bisection import FirstDifference, first_difference
from .digest import LogitsDigest
from .merkle import merkle_root


HASHED_BESIDE = 2  # parts of a setting that may wait to be hashed while the next one is decoded
SHORTENED = "* of the first window only, compared with the default setting's rows for them"


@dataclass
class Result:
    setting: Setting
    digest: str = ""
    expected: str = ""  # of the default setting, for the same tokens
    seconds: float = 0.0
    windows: tuple[str, ...] = ()
    elsewhere: str = ""  # what ran on another device than the setting's: no result of that device, whatever its bits

    @property
    def status(self) -> str:
        if self.setting.reason or not self.digest:
            return "not run" if self.setting.reason else "running"
        return "elsewhere" if self.elsewhere else "same" if self.digest == self.expected else "different"


    def described(self, windows: np.ndarray) -> tuple[str, str]:
        """How many tokens were computed, and what came of it, as tables have it."""
        s = self.setting
        verdict = {"same": "pass", "different": "FAIL", "elsewhere": f"FAIL: {self.elsewhere}", "not run": f"not run: {s.reason}",
                   "running": ""}[self.status]
        return "" if s.reason else f"{s.n_computed(windows)}{' *' * bool(s.n_tokens)}", verdict


class WindowDigests:
    """Digests of windows, and of the first rows of the first one."""

    def __init__(self, n_windows: int, lengths=()):
        self.windows = [LogitsDigest() for _ in range(n_windows)]
        self.heads = {n: LogitsDigest() for n in lengths}
        self.elsewhere = ""

    def update(self, window: int, first: int, logits: np.ndarray) -> None:
        self.windows[window].update(logits)
        if window == 0:
            for n, head in self.heads.items():
                head.update(logits[:max(0, n - first)])

    def hexdigests(self) -> tuple[str, ...]:
        return tuple(window.hexdigest() for window in self.windows)


def compute(model, windows: np.ndarray, setting: Setting, lengths=()) -> WindowDigests:
    """The digests of a setting.   windows: int32 [n, c], all of them."""
    whole, windows = windows, setting.windows(windows)
    digests = WindowDigests(len(windows), lengths)
    # Positions for whole windows: angles of some models depend on the length of the context
    with setting.conditions(), model.new_context(**setting.context_settings(whole)) as context:
        played = play(context, windows, setting)
        for _ in overlapped(played, lambda part: digests.update(*part), HASHED_BESIDE if is_elsewhere(model) else 0):
            pass
        if not model.fitted:  # else nodes are where there was room
            digests.elsewhere = ran_elsewhere(context, setting.placement.needed if setting.placement else [setting.device])
    return digests


def ran_elsewhere(context, devices: list[str]) -> str:
    """The first node of a context's programs on another device, and how many there are; or a device that has none, and from which
    nothing is brought; "" if all is as it should be."""
    nodes = [node for program in context.programs.values() for node in program.nodes]
    if found := [node for node in nodes if node.device not in devices]:
        return f"{found[0].name} and {len(found) - 1} more nodes ran on {found[0].device}"
    used = {node.device for node in nodes} | {source.root.device for node in nodes for source in node.src}
    idle = [device for device in devices if device not in used]
    return f"no node ran on {idle[0]}" if nodes and idle else ""


class Verification:
    """Runs settings; the first is the default one. load: device -> model, opened at most once each and closed at the end of the
    block; (device, placement) -> model, opened for one setting."""

    def __init__(self, load: Callable[..., Any], windows: np.ndarray, settings: list[Setting],
                 on_change: Callable[[list[Result]], None] = lambda results: None):
        self.load, self.windows, self.on_change = load, windows, on_change
        self.results = [Result(setting) for setting in settings]
        self.models: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception) -> None:
        self._stack.close()

    @contextmanager
    def model(self, setting: Setting) -> Iterator[Any]:
        if setting.placement:
            with self.load(setting.device, setting.placement) as model:
                yield model
            return
        if setting.device not in self.models:
            self.models[setting.device] = self._stack.enter_context(self.load(setting.device))
        yield self.models[setting.device]

    def run(self) -> None:
        lengths = sorted({result.setting.n_tokens for result in self.results} - {0})
        expected: dict[int, str] = {}  # by n_tokens of a setting
        for result in self.results:
            self.on_change(self.results)
            if result.setting.reason:
                continue
            try:
                with self.model(result.setting) as model:
                    start = time.perf_counter()
                    found = compute(model, self.windows, result.setting, () if expected else lengths)
                    result.seconds, result.windows = time.perf_counter() - start, found.hexdigests()
            except ParameterError as error:
                if error.parameter not in ("split_mode", "overrides", "hot_experts"):  # the model has nothing to place so
                    raise
                result.setting = replace(result.setting, reason=error.message)
                continue
            result.digest, result.elsewhere = merkle_root(result.windows), found.elsewhere
            expected = expected or {0: result.digest, **{n: merkle_root([head.hexdigest()]) for n, head in found.heads.items()}}
            result.expected = expected[result.setting.n_tokens]
        self.on_change(self.results)

    @property
    def confirmed(self) -> bool:
        return all(result.status in ("same", "not run") for result in self.results)

    def first_mismatch(self) -> Result | None:
        return next((result for result in self.results if result.status == "different"), None)

    def bisect(self, result: Result) -> FirstDifference | None:
        """The first node that differs between the default setting and a result that is different."""
        default = self.results[0]
        window = (0 if result.setting.n_tokens
                  else next(i for i, (a, b) in enumerate(zip(default.windows, result.windows)) if a != b))
        with self.model(default.setting) as model_a, self.model(result.setting) as model_b:
            return first_difference(model_a, model_b, self.windows, default.setting, result.setting, window)

    def verdict(self) -> str:
        """One line."""
        count = Counter(result.status for result in self.results)
        not_run = f"; not run: {count['not run']}" if count["not run"] else ""
        n_run = len(self.results) - count["not run"]
        if count["elsewhere"]:
            return f"not confirmed: {count['elsewhere']} of {n_run} settings ran on another device than theirs{not_run}"
        if count["different"]:
            return f"different bits: {count['different']} of {n_run} settings differ from the default one{not_run}"
        return f"one digest: {count['same']} settings gave {self.results[0].digest}{not_run}"

    def report(self, model: str, difference: FirstDifference | None = None) -> str:
        """JSON."""
        rows = [{"axis": r.setting.axis, "setting": r.setting.name, "device": r.setting.device, "status": r.status,
                 "n_tokens": r.setting.n_computed(self.windows), "digest": r.digest, "expected": r.expected,
                 "seconds": round(r.seconds, 3), "reason": r.setting.reason or r.elsewhere} for r in self.results]
        about = {"numerics": NUMERICS_VERSION, "model": model, "n_windows": len(self.windows),
                 "n_ctx": int(self.windows.shape[1])}
        return json.dumps({**about, "confirmed": self.confirmed, "settings": rows,
                           "first_difference": difference.as_dict() if difference else None}, indent=1) + "\n"


class LiveTable:
    """The results as a table that grows on a terminal; elsewhere a terminal at stderr hears of each setting that
    begins, and `print` prints the table once. Context manager around the growth; call it with the results."""

    def __init__(self, out, windows: np.ndarray):
        from rich.console import Console
        from rich.live import Live
        self.out, self.windows = out, windows
        self.console = Console(file=out, width=None if out.isatty() else 160, highlight=False, markup=False)
        self.live = Live(console=self.console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self.results: list[Result] = []
        self.told: Setting | None = None  # on stderr

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __call__(self, results: list[Result]) -> None:
        self.results = results
        if self.live.is_started:
            self.live.update(self.table(), refresh=True)
        elif sys.stderr.isatty():
            self.tell()

    def tell(self) -> None:
        wanted = [result for result in self.results if not result.setting.reason]
        n_done = sum(bool(result.digest) for result in wanted)
        if n_done < len(wanted) and (setting := wanted[n_done].setting) != self.told:
            self.told = setting
            print(f"verify: {n_done + 1} of {len(wanted)}: {setting.axis}, {setting.name}, {setting.device} ..", file=sys.stderr)

    def __exit__(self, *exception) -> None:
        self.live.stop()

    def print(self) -> None:
        """What a terminal shows already, for others."""
        if not self.console.is_terminal:
            with self.console.capture() as capture:  # rich itself would end the process with 1 where the reader of `out` has gone
                self.console.print(self.table())
            self.out.write(capture.get())

    def table(self):
        from rich.table import Column, Table
        table = Table("axis", "setting", "device", Column("tokens", justify="right"), Column("s", justify="right"), "digest", "",
                      box=None, pad_edge=False)
        for r in self.results:
            s, done = r.setting, bool(r.digest)
            tokens, verdict = r.described(self.windows)
            table.add_row(s.axis, s.name, s.device, tokens, f"{r.seconds:.1f}" if done else "", r.digest[:16], verdict)
        if any(r.setting.n_tokens for r in self.results):
            table.caption_justify = "left"
            table.caption = SHORTENED
        return table
