"""`ggml-py sweep-bench`: how speed falls as the context grows, in the manner of ik_llama.cpp's sweep-bench.

For N_KV = 0, PP, 2 PP, ... tokens in the cache of one sequence: first TG tokens are generated greedily from a random one, then
the cache is cut back to N_KV and PP tokens are decoded as one prompt with logits of the last alone, which stay. Each part is
awaited; cutting back counts. A prompt and a token come before, as often as `benchmark.WARM_UPS` says, so that no row loads
kernels or captures graphs.
"""
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass

from ..base.errors import ParameterError
from ..engine.settings import Settings, new_context
from .benchmark import WARM_UPS, decode_one_by_one, decode_prompt, random_tokens

# and how their values are written
COLUMNS = {"PP": "6", "TG": "6", "N_KV": "6", "T_PP s": "8.3f", "S_PP t/s": "8.2f", "T_TG s": "8.3f", "S_TG t/s": "8.2f"}


@dataclass(frozen=True)
class Row:
    """Tokens, seconds and tokens/s of a prompt part and a generation part, both behind n_kv tokens."""
    pp: int
    tg: int
    n_kv: int
    t_pp: float
    speed_pp: float
    t_tg: float
    speed_tg: float


def sweep(model, settings: Settings, n_gen: int, seed: int, warm_up: bool, log) -> Iterator[Row]:
    """A row for each N_KV behind which both parts fit into n_ctx positions. PP is n_ubatch; n_gen: TG."""
    n_prompt, n_ctx = settings.n_ubatch, settings.n_ctx
    if n_prompt > settings.n_batch:
        raise ParameterError("n_ubatch", f"prompts of {n_prompt} tokens are decoded as one batch, must be at most n_batch, "
                                         f"{settings.n_batch}")
    if max(n_prompt, n_gen) > n_ctx:
        raise ParameterError("n_ctx", f"{n_ctx} positions do not hold a prompt part (n_ubatch) of {n_prompt} tokens or a "
                                      f"generation part (n_gen) of {n_gen}")
    tokens = random_tokens(model, n_ctx, seed)
    with new_context(model, settings, n_ctx, 1, log) as context:

        def part(decode, first: int, n: int, *args) -> float:
            start = time.perf_counter()
            context.seq_rm(0, first)
            decode(context, tokens[first:first + n], *args)
            return time.perf_counter() - start
        for _ in range(WARM_UPS if warm_up else 0):
            part(decode_prompt, 0, n_prompt, n_prompt)
            part(decode_one_by_one, 0, 1)
        context.clear()
        for n_kv in range(0, n_ctx - max(n_prompt, n_gen) + 1, n_prompt):
            context.drop_checkpoints()
            context.checkpoint()
            t_tg = part(decode_one_by_one, n_kv, n_gen)
            t_pp = part(decode_prompt, n_kv, n_prompt, n_prompt)
            yield Row(n_prompt, n_gen, n_kv, t_pp, n_prompt / t_pp, t_tg, n_gen / t_tg)


def print_sweep(rows: Iterator[Row], about: dict, out, style: str) -> list[Row]:
    """style: "md", a table, or "jsonl", a line a row that also holds what `about` says. Returns the rows."""
    printed = []
    if style == "md":
        print("|" + " | ".join(f"{name:>{format_[0]}}" for name, format_ in COLUMNS.items()) + " |", file=out)
        print("|" + "-|-".join("-" * int(format_[0]) for format_ in COLUMNS.values()) + "-|", file=out, flush=True)
    for row in rows:
        if style == "md":
            line = "|" + " | ".join(map(format, astuple(row), COLUMNS.values())) + " |"
        else:
            line = json.dumps({**about, **asdict(row)})
        print(line, file=out, flush=True)
        printed.append(row)
    return printed
