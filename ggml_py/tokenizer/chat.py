"""Chat templates: a list of messages to the prompt that a model was trained on, by the Jinja source in its file
(`tokenizer.chat_template`, and `tokenizer.chat_template.NAME` of each of `tokenizer.chat_templates`).

A template sees what Hugging Face's `apply_chat_template` shows it: the same functions, filters, tags and arguments. The source
comes with the model and is not trusted: it runs in Jinja's immutable sandbox, which changes no argument and reaches neither
files nor attributes with underscores. A template may ask for the date: it is told one that is given, never the clock's, so that
a prompt is the same tomorrow.
"""
import functools
import json
import traceback
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn, Self

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..base.defaults import CHAT_DATE
from ..base.errors import ParameterError, UserError, printable
from . import Tokenizer

NEEDLE = "needle"  # what a probe looks for in its prompt
PROBED_TOOL = {"type": "function",
               "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}}


class ChatTemplateError(UserError):
    """The model has no chat template, its template does not work, or it refuses the messages."""


class _Refusal(Exception):
    """What a template says through `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks, for training, what the model wrote; it is shown as it is."""
    tags = {"generation"}  # noqa: RUF012  as Jinja has it

    def parse(self, parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("show"), [], [], body).set_lineno(line)

    def show(self, caller) -> str:
        return caller()


class ChatTemplate:
    """A compiled template. bos_token, eos_token: texts that it may refer to.   key: where the source stands, for errors.
    asks_for_date: whether it may depend on the date."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = "", key: str = "tokenizer.chat_template"):
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        environment.filters["tojson"] = _tojson
        del environment.filters["random"], environment.globals["lipsum"]  # a prompt is no matter of chance
        environment.globals.update(raise_exception=_raise_exception, bos_token=bos_token, eos_token=eos_token)
        self.key, self.asks_for_date = key, "strftime_now" in source
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            line = error.lineno if isinstance(error, TemplateSyntaxError) else None
            raise self._error(line, printable(str(error))) from None

    @classmethod
    def of(cls, tokenizer: Tokenizer, name: str | None = None) -> Self:
        """The template of a model, with the texts of its BOS and EOS tokens. name: one of `tokenizer.chat_templates`."""
        sources, key = tokenizer.chat_templates, "tokenizer.chat_template"
        if name is not None:
            key += f".{name}"
            if name not in sources:
                raise ParameterError("template", f"must be one of the model's, {', '.join(sources) or 'none'}, got {name!r}")
        source = tokenizer.chat_template if name is None else sources[name]
        if source is None:
            raise ChatTemplateError(f"{key}: missing; the model has no chat template, give it a prompt as it is")
        return cls.of_source(tokenizer, source, key)

    @classmethod
    def of_source(cls, tokenizer: Tokenizer, source: str, key: str) -> Self:
        """A template of one's own, with the texts of a model's BOS and EOS tokens. key: what errors call it."""
        bos, eos = ("" if id is None else tokenizer.token_text(id) for id in (tokenizer.bos_id, tokenizer.eos_id))
        return cls(source, bos, eos, key)

    def render(self, messages: Sequence[Mapping], add_generation_prompt: bool = True, date: str = CHAT_DATE,
               tools: Sequence[Mapping] | None = None, documents: Sequence[Mapping] | None = None, **arguments: Any) -> str:
        """The prompt. messages: mappings with "role" (system, user, assistant, tool, ...) and "content"; the oldest first.

        Content is a text or a list of {"type": "text", "text": ...}. An assistant's message may have "tool_calls", whose
        arguments are a mapping or its JSON. The template is given either in the form that it takes.
        add_generation_prompt: end with the header of the assistant's answer.   date: YYYY-MM-DD, the day, at midnight, that a
        template may ask for.   tools: JSON schemas of functions.   documents: {"title": ..., "text": ...} to answer from.
        arguments: what else the template knows, such as enable_thinking=False.
        """
        if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
            raise ParameterError("messages", 'must be a list of {"role": ..., "content": ...}, got ' f"{messages!r:.60}")
        try:
            now = datetime.strptime(date, "%Y-%m-%d")
        except (TypeError, ValueError):
            raise ParameterError("date", f"must be a day as YYYY-MM-DD, got {date!r}") from None
        return self._render([self._adapted(i, message) for i, message in enumerate(messages)], tools=tools, documents=documents,
                            add_generation_prompt=add_generation_prompt, strftime_now=now.strftime, **arguments)

    def _render(self, messages: list, **arguments) -> str:
        try:
            return self._template.render(messages=messages, **arguments)
        except Exception as error:  # a template is a program: it may divide by zero as well as ask for an undefined name
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
            said = "refuses the messages" if isinstance(error, _Refusal) else type(error).__name__
            raise self._error(lines[-1] if lines else None, f"{said}: {printable(str(error))}") from None

    def _error(self, line: int | None, said: str) -> ChatTemplateError:
        return ChatTemplateError(f"{self.key}: {'' if line is None else f'line {line}: '}{said}")

    def _adapted(self, i: int, message: Mapping) -> Mapping:
        """Content and arguments of tool calls in a form that the template takes; where it takes neither, as they are."""
        content, calls = message.get("content"), message.get("tool_calls")
        if not isinstance(content, str) and isinstance(content, Sequence):
            text = "".join(_text(f"messages[{i}].content[{j}]", part) for j, part in enumerate(content))
            message = {**message, "content": content if self._content_forms[1] else text}
        elif isinstance(content, str) and self._content_forms == (False, True):
            message = {**message, "content": [{"type": "text", "text": content}]}
        if calls:
            message = {**message, "tool_calls": [self._adapted_call(call) for call in calls]}
        return message

    def _adapted_call(self, call: Mapping) -> Mapping:
        if "function" in call:
            return {**call, "function": self._adapted_call(call["function"])}
        given, (mappings, texts) = call.get("arguments"), self._argument_forms
        if isinstance(given, str) and mappings and not texts:
            try:
                return {**call, "arguments": json.loads(given)}
            except ValueError as error:
                raise ChatTemplateError(f"tool_calls: arguments of {call.get('name')!r:.60} are not JSON: {error}") from None
        if isinstance(given, Mapping) and texts and not mappings:
            return {**call, "arguments": _tojson(given)}
        return call

    @functools.cached_property
    def _content_forms(self) -> tuple[bool, bool]:
        """Whether the template takes content as a text, and as a list of parts. Found by trying both: the list counts where it
        gives the same prompt."""
        text, parts = (self._probe([{"role": "user", "content": content}])
                       for content in (NEEDLE, [{"type": "text", "text": NEEDLE}]))
        return NEEDLE in text, NEEDLE in parts and (parts == text or NEEDLE not in text)

    @functools.cached_property
    def _argument_forms(self) -> tuple[bool, bool]:
        """Whether the template takes a call's arguments as a mapping, and as JSON, likewise: not as Python's or escaped text, and
        the JSON counts where it gives the same prompt."""
        def conversation(arguments) -> list[Mapping]:
            call = {"id": "call12345", "type": "function", "function": {"name": "f", "arguments": arguments}}
            return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "call12345", "name": "f", "content": "!"}]

        mapping, text = (self._probe(conversation(arguments)) for arguments in ({NEEDLE: 1}, f'{{"{NEEDLE}": 1}}'))
        takes_mapping = NEEDLE in mapping and f"{{'{NEEDLE}'" not in mapping
        return takes_mapping, NEEDLE in text and f'\\"{NEEDLE}' not in text and (text == mapping or not takes_mapping)

    def _probe(self, messages: list[Mapping]) -> str:
        """The prompt of messages, with a tool or without one; empty where the template refuses them."""
        for tools in None, [PROBED_TOOL]:
            try:
                return self._render(messages, tools=tools, documents=None, add_generation_prompt=False,
                                    strftime_now=datetime.strptime(CHAT_DATE, "%Y-%m-%d").strftime)
            except ChatTemplateError:
                pass
        return ""


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Mapping], add_generation_prompt: bool = True, date: str = CHAT_DATE,
                tools: Sequence[Mapping] | None = None, documents: Sequence[Mapping] | None = None,
                template: str | ChatTemplate | None = None, **arguments: Any) -> list[int]:
    """Token ids of a conversation, ready for the answer. BOS comes first where the model wants it, once, whether or not the
    template writes it.

    date: YYYY-MM-DD, what the template is told when it asks for the date.   template: the name of one of the model's templates,
    or one of one's own; None: with tools that of the name tool_use, where the model has it, else the unnamed one. The rest:
    `ChatTemplate.render`."""
    if template is None and tools and "tool_use" in tokenizer.chat_templates:
        template = "tool_use"
    if not isinstance(template, ChatTemplate):
        template = ChatTemplate.of(tokenizer, template)
    text = template.render(messages, add_generation_prompt, date, tools, documents, **arguments)
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    bos = tokenizer.encode("")[:1] if tokenizer.add_bos else []
    return ids if ids[:1] == bos else bos + ids


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Hugging Face's filter. Jinja's own escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _text(where: str, part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ChatTemplateError(f'{where}: got {part!r:.60}, allowed is {{"type": "text", "text": ...}}')
    return part["text"]
