"""What a model is given to continue: prompts of options, of files and of stdin, and their tokens."""
import re
import sys

from ..base.errors import UserError
from .loading import existing

ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "'": "'", '"': '"', "\\": "\\"}


def prompt_of(options) -> str | None:
    """-p, or the text of -f or of stdin without a newline at its end; None where stdin is a terminal, or has the messages of a
    chat."""
    if options.prompt is not None:
        if options.text is not None:
            raise UserError("-f: got -p too, one is enough")
        return unescaped(options.prompt) if options.escape else options.prompt
    if options.text is None and (options.conversation or sys.stdin is None or sys.stdin.isatty()):
        return None
    from ..engine.windows import as_text, read_text
    if options.text is not None and str(options.text) != "-":
        return read_text(existing(options.text))
    return as_text(sys.stdin.buffer.read())


def prompt_source(options) -> str:
    """Where `prompt_of` has it from, for errors."""
    return "-p" if options.prompt is not None else "stdin" if options.text is None or str(options.text) == "-" else "-f"


def system_of(options) -> str | None:
    if options.system is not None:
        return unescaped(options.system) if options.escape else options.system
    if options.system_file is None:
        return None
    from ..engine.windows import read_text
    return read_text(existing(options.system_file))


def unescaped(text: str) -> str:
    r"""With what \n, \r, \t, \', \", \\ and \xHH stand for; another backslash is one."""
    return re.sub(r"""\\(?:([nrt'"\\])|x([0-9a-fA-F]{2}))""",
                  lambda found: ESCAPES[found[1]] if found[1] else chr(int(found[2], 16)), text)


def encoder_of(options, tokenizer):
    """messages -> ids, by the chat template that is asked for."""
    from ..tokenizer.chat import ChatTemplate, encode_chat
    source, arguments = options.template, {**options.template_arguments}
    if options.template_file is not None:
        from ..engine.windows import read_text
        source = read_text(existing(options.template_file))
    template = ChatTemplate.of(tokenizer, source) if source in (None, *tokenizer.chat_templates) else (
        ChatTemplate.of_source(tokenizer, source, "--chat-template"))
    if options.reasoning is not None:
        arguments["enable_thinking"] = options.reasoning
    if options.effort is not None:
        arguments["reasoning_effort"] = options.effort
    if template.asks_for_date:
        print(f"run: the chat template asks for the date and is told {options.date} (--date)", file=sys.stderr)
    return lambda messages: encode_chat(tokenizer, messages, date=options.date, template=template, **arguments)


def chat_of(options) -> dict | None:
    """What --chat puts into the template, as attestations hold it; None without --chat."""
    if not options.chat:
        return None
    return {"messages": [{"role": "user", "content": options.prompt}], "date": options.date}


def encoded_prompt(options, tokenizer) -> list[int]:
    """The ids of -p, at least one."""
    chat = chat_of(options)
    if chat is None:
        prompt = tokenizer.encode(options.prompt)
    else:
        from ..tokenizer.chat import ChatTemplate, encode_chat
        prompt = encode_chat(tokenizer, **chat)
        if ChatTemplate.of(tokenizer).asks_for_date:
            print(f"{options.command}: the chat template asks for the date and is told {options.date} (--date)", file=sys.stderr)
    if not len(prompt):
        raise UserError("-p: the prompt has no tokens")
    return prompt

