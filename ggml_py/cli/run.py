"""ggml-py run: a prompt, continued."""
import sys
import time

from ..base.errors import UserError
from .loading import draft_source, encoded_prompt, load, sampling_of, settings_of, speculation_of
from .options import drafts, one_model, sampling
from .parser import refuse
from .values import all_or_at_least_one


def options(p) -> None:
    one_model(p, "context; prompt and new tokens by default")
    p.add_argument("-p", "--prompt", required=True, metavar="TEXT", help="the text to continue")
    p.add_argument("-n", "--n-predict", type=all_or_at_least_one, default=128, metavar="N",
                   help="new tokens at most; -1: until the model ends or -c is full")
    sampling(p)
    drafts(p)


def run(options, load_model) -> None:
    from ..engine.completion import pieces
    from ..engine.settings import new_context
    refuse(options, ("--date",) * (not options.chat), "is of --chat, which is not given")
    source = draft_source(options)
    rollback = {"n_rollback": options.draft_max + 1} if source else {}
    choice = sampling_of(options)
    with load(options, load_model, **({"nextn": True} if source == "mtp" else {})) as model:
        tokenizer, prompt = model.tokenizer, encoded_prompt(options, model.tokenizer)
        n_ctx = options.n_ctx or (model.n_ctx_train if options.n_predict < 0 else len(prompt) + options.n_predict)
        space, n_least = n_ctx - len(prompt), max(1, options.n_predict)
        if space < n_least:
            raise UserError(f"-c: a prompt of {len(prompt)} tokens and {n_least} new ones do not fit into a context of {n_ctx}")
        n_most = space if options.n_predict < 0 else options.n_predict
        with (new_context(model, settings_of(options, **rollback), n_ctx, 1, sys.stderr) as context,
              speculation_of(options, model, n_ctx, load_model) as speculation):
            times = [time.perf_counter()]  # the beginning, then when each token was there
            for piece in pieces(context, tokenizer, prompt, n_most, choice, speculation):
                times += [time.perf_counter()] * len(piece.ids)
                print(piece.text, end="" if piece.ids else "\n", flush=True)
            end = time.perf_counter()
    full = f"-n {n_most} is reached" if options.n_predict > 0 else f"the context of {n_ctx} tokens is full"
    ended = full if len(times) - 1 == n_most else "the model ended its text"
    print(f"run: {speed_of_run(len(prompt), times, end)}; {ended}", file=sys.stderr)
    if speculation is not None:
        print(f"run: {speculation.report()}", file=sys.stderr)


def speed_of_run(n_prompt: int, times: list[float], end: float) -> str:
    """times: s, the beginning and when each new token was there; end: s, when there were no more, a step later where the model
    ended its text.

    The first token comes with the prompt; the others are steps of one token each."""
    def part(n_tokens: int, seconds: float) -> str:
        return f" in {seconds:.2f} s ({n_tokens / seconds:.1f} tokens/s)" if n_tokens > 0 and seconds > 0 else ""
    n_new, first = len(times) - 1, times[1] if len(times) > 1 else end
    return f"prompt of {n_prompt} tokens{part(n_prompt, first - times[0])}, {n_new} new ones{part(n_new - 1, times[-1] - first)}"
