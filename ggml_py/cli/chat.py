"""The chat loop of ggml-py run: lines of stdin are messages, answers go to stdout."""
import io
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from ..base.errors import UserError
from ..base.progress import working_time
from ..engine.conversation import Conversation, NoRoom
from ..engine.sampling import Sampling
from .values import at_least

PROMPT = "\n> "
HELP = """\
/regen [SEED]  answer the last message again: with the same seed the same text
/clear         begin anew, with the system prompt alone
/read FILE     put a UTF-8 text before the next message
/exit          end, as Ctrl-D and Ctrl-C do
A line that ends in \\ goes on in the next one. Ctrl-C stops an answer, a second one the program."""


def chat(conversation: Conversation, sampling: Sampling, first: str | None, is_single: bool,
         told: Callable[[Conversation, list[float]], None]) -> None:
    """Until stdin ends. first: the first message, before any is read. is_single: one answer is all. told: is given the times, s,
    of an answer's beginning and of each of its tokens."""
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        with suppress(ImportError):  # where lines cannot be edited
            import readline
            readline.parse_and_bind("set enable-bracketed-paste on")  # pasted ones are one message; Python leaves it off
        print("/help lists what a line may be beside a message", file=sys.stderr)
    elif isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    attached = ""
    for line in lines(first, on_terminal):
        command, _, rest = line.strip().partition(" ")
        try:
            match command:
                case "/exit" | "/quit" if not rest:
                    return
                case "/help" if not rest:
                    print(HELP, file=sys.stderr)
                case "/clear" if not rest:
                    conversation.clear()
                    attached = ""
                case "/read":
                    attached += f"{read(rest.strip())}\n\n"
                case "/regen" if conversation.messages and conversation.messages[-1]["role"] == "assistant":
                    drawn = replace(sampling, seed=seed(rest)) if rest else sampling
                    conversation.take_back()
                    say(conversation, drawn, told)
                case "/regen":
                    print("/regen: there is no answer yet", file=sys.stderr)
                case _ if line.strip():
                    conversation.add("user", attached + line)
                    attached = ""
                    say(conversation, sampling, told)
                    if is_single:
                        return
        except UserError as error:  # the conversation goes on
            print(f"{command if command.startswith('/') else 'chat'}: {error}", file=sys.stderr)


def seed(text: str) -> int:
    try:
        return at_least(0)(text)
    except ValueError as error:
        raise UserError(str(error)) from None


def say(conversation: Conversation, sampling: Sampling, told) -> None:
    """Prints an answer. A message that cannot be answered is forgotten."""
    times = [working_time()]
    with stoppable() as stop:
        try:
            with closing(conversation.answer(sampling)) as answer:  # type: ignore[type-var]
                for piece in answer:
                    times += [working_time()] * len(piece.ids)
                    print(piece.text, end="", flush=True)
                    if stop():
                        break
        except KeyboardInterrupt:
            if not stop():
                raise
        except NoRoom as error:
            raise UserError(f"{error}; /clear begins anew, and a larger -c has more room") from None
        finally:
            if conversation.messages[-1]["role"] == "user":
                conversation.messages.pop()
    print(flush=True)
    told(conversation, times)


def lines(first: str | None, on_terminal: bool) -> Iterator[str]:
    """Messages and commands; a line that ends in a backslash goes on."""
    if first is not None:
        yield first
    held = ""
    while True:
        try:
            line = asked("" if not on_terminal else PROMPT if not held else ". ")
        except EOFError:
            break
        if line.endswith("\\"):
            held += line[:-1] + "\n"
            continue
        yield held + line
        held = ""
    if held:
        yield held
    if on_terminal:
        print(file=sys.stderr)


def asked(prompt: str) -> str:
    """A line of stdin. The prompt goes to the terminal, whatever stdout is."""
    sys.stdout.flush()
    if prompt and not sys.stdout.isatty():
        print(prompt, end="", file=sys.stderr, flush=True)
        prompt = ""
    return input(prompt)


def read(name: str) -> str:
    from ..engine.windows import read_text
    from .loading import existing
    return read_text(existing(Path(name)))


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """In the block the first Ctrl-C raises KeyboardInterrupt, which is that of the block: the value tells whether it came. A
    second one is the program's, as all are outside."""
    before, came = signal.getsignal(signal.SIGINT), False

    def on_interrupt(signum, frame):
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, before)
        raise KeyboardInterrupt

    if callable(before):  # not ignored
        signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)
