"""The perplexity of a text by workers on many machines, the same bits as by one.

Ray (extra `ray`) gives the windows to workers, and starts lost ones again. What a window gave, its digest and its sums, is a line
of a log on disk as soon as it is known: whoever starts again with that log computes what it does not hold. Sums are taken in the
order of the windows, so perplexity, root and attestation do not depend on who computed what, when, or how often.
"""
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import NUMERICS_VERSION
from ..base.errors import ParameterError, UserError
from ..check.attestation import files_sha256, made_by, own_sha256, tokens_sha256
from ..engine.settings import Settings, new_context
from ..engine.windows import decode_from, n_sequences, split_windows, with_bos
from .perplexity import Score, WindowScore, window_score

MOST_RESTARTS = 100  # of one worker
OF = "ggml-py windows"  # what the first line of a log says
Opener = Callable[[], AbstractContextManager[Any]]  # of the model, on whichever machine it is called


class Cluster(NamedTuple):
    """address: of a Ray cluster; "local": Ray is started on this machine, for this run. n_workers: each with a model of its own;
    0: as many as there is room for. n_cpus, n_gpus: that Ray sets aside for each; None: one GPU, if the cluster has any."""
    address: str
    n_workers: int = 0
    n_cpus: int = 1
    n_gpus: int | None = 0


class Worker:
    """A model on one machine and a context, which are kept."""

    def __init__(self, open_model: Opener, settings: Settings):
        self.open_model, self.settings = open_model, settings
        self.stack = ExitStack()

    @cached_property
    def model(self):
        return self.stack.enter_context(self.open_model())

    @cached_property
    def context(self):
        n = n_sequences(self.settings)
        return self.stack.enter_context(new_context(self.model, self.settings, self.settings.n_ctx, n, StringIO()))

    def made(self) -> dict:
        return made_by(self.model)

    def scores(self, numbers: list[int], windows: np.ndarray) -> tuple[list[int], list[WindowScore]]:
        """numbers: of windows, which are as many as are decoded together at most.   windows: int32 [n, c]."""
        c = self.settings.n_ctx
        rows = decode_from(self.context, with_bos(self.model, windows)[:, :c - 1], c // 2, self.settings.n_batch)
        return numbers, [window_score(logits, window[c // 2 + 1:]) for logits, window in zip(rows, windows)]


class Log:
    """Scores of windows, a line of JSON each, behind a line that says of what they are. Context manager."""

    def __init__(self, path: Path, of: dict, n_windows: int):
        self.path, self.of, self.n_windows = path, of, n_windows
        self.found: dict[int, WindowScore] = {}
        self.makers: list[dict] = []  # what `made_by` said of the workers

    def __enter__(self) -> "Log":
        self.file = open(self.path, "a+b")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            self.file.close()
            raise UserError(f"{self.path}: another process writes to it") from None
        except BaseException:
            self.file.close()
            raise
        return self

    def _read(self) -> None:
        """What was written when a process ended may be half a line, the last one: it goes."""
        self.file.seek(0)
        content = self.file.read()
        whole = content[:content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            self.file.truncate(len(whole))
        lines = whole.splitlines()
        if not lines:
            self._write({OF: self.of})
            return
        try:
            first, *others = map(json.loads, lines)
            of = first[OF]
            for line in others if of == self.of else ():
                if "made" in line:
                    self.makers.append(line["made"])
                else:
                    i, total, squares = line["window"], float.fromhex(line["total"]), float.fromhex(line["squares"])
                    if type(i) is not int or not 0 <= i < self.n_windows:
                        raise ValueError(i)
                    self.found[i] = WindowScore(line["digest"], total, squares, line["n"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{self.path}: is not a log of windows, or damaged; another file name begins anew") from None
        if of != self.of:
            other = next(name for name in self.of if not isinstance(of, dict) or of.get(name) != self.of[name])
            raise UserError(f"{self.path}: is of another {other}; another file name begins anew")

    def add_maker(self, made: dict) -> None:
        if made not in self.makers:
            self._write({"made": made})
            self.makers.append(made)

    def add(self, i: int, score: WindowScore) -> None:
        self._write({"window": i, "digest": score.digest, "total": score.total.hex(), "squares": score.squares.hex(),
                     "n": score.n})
        self.found[i] = score

    def _write(self, line: dict) -> None:
        self.file.write(json.dumps(line).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())

    def __exit__(self, *exception) -> None:
        self.file.close()


def corpus_perplexity(open_model: Opener, file, tokens, settings: Settings, cluster: Cluster, log_path: Path | None,
                      out, log) -> tuple[float, list[str], list[dict]]:
    """(perplexity, digest of each window, `made_by` of the workers). The list `[i]ppl,`, the final estimate and the root go to
    `out`, the rest to `log`.

    open_model: called by each worker on its machine. file: of the model, which is not loaded here. tokens: int [n]. log_path:
    JSON lines, which are continued where they are of the same model, tokens and settings; None: a name that is of these.
    UserError in one line where Ray is missing or not reached, where a worker cannot open the model or has another one, and for a
    log of something else."""
    windows, n = split_windows(tokens, settings), n_sequences(settings)
    of = {"model": files_sha256(file), "tokens": tokens_sha256(tokens), "n_ctx": settings.n_ctx, "type_k": settings.type_k,
          "type_v": settings.type_v, "numerics": NUMERICS_VERSION, "number of windows": len(windows)}
    log_path = log_path or Path(f"windows-{own_sha256(of)[:16]}.jsonl")
    with Log(log_path, of, len(windows)) as kept, Score(out, log, len(windows), root=True) as score:
        def add_known() -> None:
            while score.n_windows in kept.found:
                window = kept.found[score.n_windows]
                score.digest.add(window.digest)
                score.add(window.total, window.squares, window.n)
        missing = [i for i in range(len(windows)) if i not in kept.found]
        print(f"perplexity: {len(windows)} chunks, n_ctx={settings.n_ctx}, {len(kept.found)} of them in {log_path}", file=log)
        add_known()
        tasks = [(numbers, windows[numbers]) for numbers in (missing[i:i + n] for i in range(0, len(missing), n))]
        if tasks:
            with workers(cluster, open_model, settings) as pool:
                for made in pool.all(Worker.made.__name__):
                    if made["model"]["sha256"] != of["model"]:
                        device, found = made["environment"]["device_name"], made["model"]["sha256"]
                        raise ParameterError("ray", f"a worker on {device} has another model: sha256 is {found}, must be "
                                                    f"{of['model']}")
                    kept.add_maker(made)
                for numbers, scores in pool.map(Worker.scores.__name__, tasks):
                    for i, each in zip(numbers, scores):
                        kept.add(i, each)
                    add_known()
    score.print_estimate()
    score.print_digest()
    return score.ppl, score.digest.windows, kept.makers


class Pool:
    """Actors of Ray. Calls of one that was lost are made again."""

    def __init__(self, ray, actors: list):
        self.ray, self.actors = ray, actors

    def all(self, method: str) -> list:
        """What each of them returns."""
        return self._got([getattr(actor, method).remote() for actor in self.actors])

    def map(self, method: str, tasks: list[tuple]) -> Iterator[Any]:
        """Results for the arguments, as they come."""
        left, running = iter(tasks), {}

        def give(actor) -> None:
            for task in islice(left, 1):
                running[getattr(actor, method).remote(*task)] = actor
        for actor in self.actors:
            give(actor)
        while running:
            done, _ = self.ray.wait([*running])
            actor = running.pop(done[0])
            result = self._got(done[0])
            give(actor)
            yield result

    def _got(self, references):
        try:
            return self.ray.get(references)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise ParameterError("ray", f"a worker: {error.cause}") from None
            raise
        except self.ray.exceptions.RayActorError as error:
            raise ParameterError("ray", f"a worker was lost {MOST_RESTARTS} times: {str(error).splitlines()[0]}") from None


@contextmanager
def workers(cluster: Cluster, open_model: Opener, settings: Settings) -> Iterator[Pool]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
    try:
        import ray
    except ImportError:
        raise ParameterError("ray", "needs Ray: pip install 'ggml-bitwise[ray]'") from None
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if cluster.address == "local":
        n_cpus = max(len(os.sched_getaffinity(0)), cluster.n_workers * cluster.n_cpus)
        quiet |= {"num_cpus": n_cpus, "include_dashboard": False}
    try:
        ray.init(address=cluster.address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ParameterError("ray", f"{cluster.address} is not reached: {str(error).splitlines()[0]}") from None
    try:
        there = ray.cluster_resources()
        all_cpus, all_gpus = there["CPU"], there.get("GPU", 0)
        n_gpus = int(all_gpus > 0) if cluster.n_gpus is None else cluster.n_gpus
        n = cluster.n_workers or int(all_gpus // n_gpus if n_gpus else all_cpus // cluster.n_cpus)
        if n < 1 or n * n_gpus > all_gpus or n * cluster.n_cpus > all_cpus:
            raise ParameterError("n_workers", f"{max(n, 1)} workers of {cluster.n_cpus} CPUs and {n_gpus} GPUs, there are "
                                              f"{all_cpus:g} CPUs and {all_gpus:g} GPUs")
        actor = ray.remote(num_cpus=cluster.n_cpus, num_gpus=n_gpus, max_restarts=MOST_RESTARTS,
                           max_task_retries=-1)(Worker)
        yield Pool(ray, [actor.remote(open_model, settings) for _ in range(n)])
    finally:
        ray.shutdown()
