"""Chat templates: a list of messages to the prompt that a model was trained on, by the Jinja source in its file
(`tokenizer.chat_template`).

The source comes with the model and is not trusted: it runs in Jinja's immutable sandbox, which changes no argument and reaches
neither files nor attributes with underscores. A template may ask for the date: it is told one that is given, never the clock's,
so that a prompt is the same tomorrow.
"""
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn, Self

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..base.defaults import CHAT_DATE
from ..base.errors import ParameterError, UserError
from . import Tokenizer


class ChatTemplateError(UserError):
    """The model has no chat template, its template does not work, or it refuses the messages."""


class ChatTemplate:
    """A compiled template. bos_token, eos_token: texts that it may refer to.   asks_for_date: whether it may depend on the
    date."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = ""):
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        del environment.filters["random"], environment.globals["lipsum"]  # a prompt is no matter of chance
        environment.globals.update(raise_exception=_raise_exception, bos_token=bos_token, eos_token=eos_token)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise ChatTemplateError(f"tokenizer.chat_template: {line}{error}") from None
        self.asks_for_date = "strftime_now" in source

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """The template of a model, with the texts of its BOS and EOS tokens."""
        if tokenizer.chat_template is None:
            raise ChatTemplateError("tokenizer.chat_template: missing; the model has no chat template, give it a prompt as it is")
        texts = ["" if id is None else tokenizer.token_text(id) for id in (tokenizer.bos_id, tokenizer.eos_id)]
        return cls(tokenizer.chat_template, *texts)

    def render(self, messages: Sequence[Mapping], add_generation_prompt: bool = True, date: str = CHAT_DATE) -> str:
        """The prompt. messages: mappings with "role" (system, user, assistant, ...) and "content"; the oldest first.

        add_generation_prompt: end with the header of the assistant's answer.   date: YYYY-MM-DD, the day, at midnight, that a
        template may ask for.
        """
        try:
            now = datetime.strptime(date, "%Y-%m-%d")
        except (TypeError, ValueError):
            raise ParameterError("date", f"must be a day as YYYY-MM-DD, got {date!r}") from None
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt,
                                         strftime_now=now.strftime)
        except ChatTemplateError:
            raise
        except Exception as error:  # a template is a program: it may divide by zero as well as ask for an undefined name
            raise ChatTemplateError(f"tokenizer.chat_template: {type(error).__name__}: {error}") from None


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Mapping], add_generation_prompt: bool = True,
                date: str = CHAT_DATE) -> list[int]:
    """Token ids of a conversation, ready for the answer. BOS comes first where the model wants it, once, whether or not the
    template writes it.

    date: YYYY-MM-DD, what the template is told when it asks for the date."""
    text = ChatTemplate.of(tokenizer).render(messages, add_generation_prompt, date)
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    bos = tokenizer.encode("")[:1] if tokenizer.add_bos else []
    return ids if ids[:1] == bos else bos + ids


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(f"the chat template refuses the messages: {message}")


def _tojson(value, indent=None, **options) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
