"""ggml-py run: a prompt, continued; or a chat."""
import sys

from ..base.errors import UserError
from ..base.progress import working_time
from .ids import checked_tokens, given_prompt, json_option, prompt_tokens_option, write_json
from .loading import FITTED_CONTEXT, choice_of, draft_source, load, matcher_of, settings_of, speculation_of
from .options import chats, drafts, further_sampling, grammars, one_model, prompts, sampling
from .parser import refuse
from .prompts import encoder_of, prompt_of, prompt_source, system_of
from .values import all_or_at_least_one

OF_A_CHAT = "--date", "--chat-template", "--chat-template-file", "--chat-template-kwargs", "-rea", "--reasoning-effort"


def options(p) -> None:
    one_model(p, f"context; prompt and new tokens by default, in a chat {FITTED_CONTEXT}")
    prompts(p)
    prompt_tokens_option(p)
    json_option(p, "the ids of the prompt and of what continues it, its text and the digest of the logits, for machines")
    p.add_argument("-n", "--n-predict", "--predict", dest="n_predict", metavar="N",
                   type=lambda text: all_or_at_least_one("-1" if text == "-2" else text),
                   help="new tokens at most, 128 by default, in a chat -1: until the model ends or -c is full")
    sampling(p)
    further_sampling(p)
    grammars(p)
    chats(p)
    drafts(p)


def run(options, load_model) -> None:
    from ..engine.settings import new_context
    source, ids, system = draft_source(options), given_prompt(options), system_of(options)
    text = prompt_of(options) if ids is None else ""
    is_chat = options.conversation or (options.conversation is None and text is None)
    if text is None and not is_chat:
        raise UserError("-p: it is missing, and so is -f")
    refuse(options, ("--json",) * is_chat, "is of a prompt that is continued, not of a chat")
    has_template = is_chat or options.chat or system is not None
    refuse(options, OF_A_CHAT * (not has_template), "is of --chat or -cnv, which are not given")
    rollback = {"n_rollback": options.draft_max + 1} if source else {}
    with load(options, load_model, **({"nextn": True} if source == "mtp" else {})) as model:
        tokenizer, choice = model.tokenizer, choice_of(options, model.tokenizer)
        matcher = matcher_of(options, tokenizer)
        messages = [] if system is None else [{"role": "system", "content": system}]
        n_most = options.n_predict or (-1 if is_chat else 128)
        if is_chat:
            encode = encoder_of(options, tokenizer)
            n_ctx = options.n_ctx or min(model.n_ctx_train, FITTED_CONTEXT)
        elif ids is not None:
            prompt = checked_tokens(ids, options.prompt_tokens, model.n_vocab)
        else:
            prompt = encoder_of(options, tokenizer)([*messages, {"role": "user", "content": text}]) if has_template else (
                tokenizer.encode(text))
        if not is_chat:
            n_ctx, n_most = room_of(options, model, prompt, n_most)
        with (new_context(model, settings_of(options, **rollback), n_ctx, 1, sys.stderr) as context,
              speculation_of(options, model, n_ctx, load_model) as speculation):
            if is_chat:
                from ..engine.conversation import Conversation
                from .chat import chat
                conversation = Conversation(context, tokenizer, encode, None if n_most < 0 else n_most, speculation,
                                            options.stop, matcher)
                conversation.messages = messages
                chat(conversation, choice, text, options.chat, lambda *answer: tell_speed(options, *answer))
            else:
                if options.echo:
                    print(text, end="")
                said = continue_prompt(options, context, tokenizer, prompt, n_most, choice, speculation, matcher)
    if options.timings and not is_chat:
        print(f"run: {said}", file=sys.stderr)
    if speculation is not None:
        print(f"run: {speculation.report()}", file=sys.stderr)


def continue_prompt(options, context, tokenizer, prompt: list[int], n_most: int, choice, speculation, matcher) -> str:
    """Prints what continues it; returns the speed, and why it ended. matcher: of `pieces`."""
    from ..engine.completion import Wanted, pieces
    times = [working_time()]  # the beginning, then when each token was there
    new: list[int] = []
    text, reason = "", None
    wanted = Wanted(tuple(options.stop), digest=options.json is not None)
    for piece in pieces(context, tokenizer, prompt, n_most, choice, speculation, wanted, matcher=matcher):
        times += [working_time()] * len(piece.ids)
        text, reason = text + piece.text, piece.finish_reason
        new += piece.ids
        print(piece.text, end="" if piece.ids else "\n", flush=True)
    end = working_time()
    if options.json:
        write_json(options.json, context.model, tokens=[*prompt, *new], n_prompt=len(prompt), text=text, finish_reason=reason,
                   digest=piece.digest)
    full = f"-n {n_most} is reached" if (options.n_predict or 1) > 0 else f"the context of {context.n_ctx} tokens is full"
    the_end = "the grammar is at its end" if matcher.is_complete else "the model ended its text"
    ended = {"length": full, "stop": "-r has come"}.get(reason or "", the_end)
    return f"{speed_of_run(len(prompt), times, end)}; {ended}"


def room_of(options, model, prompt: list[int], n_most: int) -> tuple[int, int]:
    """Positions of the context, and new tokens at most."""
    if not len(prompt):
        raise UserError(f"{prompt_source(options)}: the prompt has no tokens")
    n_ctx = options.n_ctx or (model.n_ctx_train if n_most < 0 else len(prompt) + n_most)
    space, n_least = n_ctx - len(prompt), max(1, n_most)
    if space < n_least:
        raise UserError(f"-c: a prompt of {len(prompt)} tokens and {n_least} new ones do not fit into a context of {n_ctx}")
    return n_ctx, space if n_most < 0 else n_most


def tell_speed(options, conversation, times: list[float]) -> None:
    """Of an answer in a chat."""
    if options.timings:
        n_new = conversation.n_prompt - conversation.n_held
        print(f"run: {speed_of_run(n_new, times, working_time())}", file=sys.stderr)


def speed_of_run(n_prompt: int, times: list[float], end: float) -> str:
    """times: s, the beginning and when each new token was there; end: s, when there were no more, a step later where the model
    ended its text.

    The first token comes with the prompt; the others are steps of one token each."""
    def part(n_tokens: int, seconds: float) -> str:
        return f" in {seconds:.2f} s ({n_tokens / seconds:.1f} tokens/s)" if n_tokens > 0 and seconds > 0 else ""
    n_new, first = len(times) - 1, times[1] if len(times) > 1 else end
    return f"prompt of {n_prompt} tokens{part(n_prompt, first - times[0])}, {n_new} new ones{part(n_new - 1, times[-1] - first)}"
