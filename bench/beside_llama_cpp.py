"""Speed on a CPU beside llama.cpp, in turns: python bench/beside_llama_cpp.py --llama-bench build/bin/llama-bench -m smollm2 -t 2
--out bench/results/NAME.json

A turn is `llama-bench` and then `ggml-py bench`, each on the same file, cores and tests. A machine's speed changes from minute to
minute, so a row has the medians over the turns, and the quotients of the turns.
"""
import argparse
import sys
from pathlib import Path
from statistics import median

import checkout
from records import conditions, dump, json_of

from ggml_py.backends import open_backend
from ggml_py.base.errors import UserError
from ggml_py.files.pull import resolve


def run(command: list[str]) -> list[dict]:
    """The tests that a command in the manner of `llama-bench -o json` has timed. RuntimeError with its messages if it fails."""
    return json_of(command, cwd=checkout.ROOT)


def rows(turns: list[tuple[list[dict], list[dict]]]) -> list[dict]:
    """A row a test: tokens a second of llama.cpp and of this project, and how many times the former the latter is, least and most
    too."""
    found = []
    for tests in zip(*(test for turn in turns for test in turn)):  # the same test of all runs, theirs and ours by turns
        speeds = [test["avg_ts"] for test in tests]
        times = [ours / theirs for theirs, ours in zip(speeds[::2], speeds[1::2])]
        found.append({**{key: tests[0][key] for key in ("n_prompt", "n_gen")},
                      "llama_cpp_ts": round(median(speeds[::2]), 1), "ggml_py_ts": round(median(speeds[1::2]), 1),
                      **{name: round(of(times), 2) for name, of in (("times", median), ("least", min), ("most", max))}})
    return found


def main(argv=None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--llama-bench", type=Path, required=True, help="the program, built for this CPU")
    p.add_argument("-m", "--model", required=True, help="a GGUF file, or smollm2")
    p.add_argument("-t", "--threads", type=int, required=True)
    p.add_argument("-p", "--n-prompt", type=int, default=512)
    p.add_argument("-n", "--n-gen", type=int, default=64)
    p.add_argument("-r", "--repetitions", type=int, default=3, help="of a test in a turn")
    p.add_argument("--turns", type=int, default=5)
    p.add_argument("--out", type=Path, required=True)
    options = p.parse_args(argv)
    try:
        path, backend = resolve(options.model, sys.stderr).resolve(strict=True), open_backend("cpu")
    except (UserError, OSError) as error:
        p.error(str(error))
    settings = f"-t {options.threads} -p {options.n_prompt} -n {options.n_gen} -r {options.repetitions}"
    given = [*settings.split(), "-m", str(path), "-o", "json"]
    turns = [(run([str(options.llama_bench.resolve()), *given]),
              run([sys.executable, "-m", "ggml_py", "bench", "--device", "cpu", *given])) for _ in range(options.turns)]
    record = {"command": f"bench/beside_llama_cpp.py --llama-bench llama-bench -m {options.model} {settings} "
                         f"--turns {options.turns} --out {options.out}",
              **conditions(backend), "cpu": turns[0][0][0]["cpu_info"], "llama.cpp": turns[0][0][0]["build_commit"],
              "model": path.name}
    backend.close()
    text = dump(record, "tests", rows(turns))
    options.out.write_text(text)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
