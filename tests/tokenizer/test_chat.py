"""Chat templates: what a template sees, what it may not do, and the token ids of a conversation."""
import pytest

from ggml_py.tokenizer.chat import ChatTemplate, ChatTemplateError, encode_chat
from ggml_py.base.errors import ParameterError, UserError
from ggml_py.tokenizer import Tokenizer
from ggml_py.tokenizer.bpe import BYTE_OF_LETTER

HELLO = [{"role": "user", "content": "Hello"}]
CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
Be brief.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""


def tokenizer(template: str | None, named: dict | None = None, **keys) -> Tokenizer:
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.merges": [],
                "tokenizer.ggml.tokens": [*BYTE_OF_LETTER, *special], "tokenizer.ggml.token_type": [1] * 256 + [3] * 4,
                "tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.eos_token_id": 257,
                **{f"tokenizer.ggml.{key}": value for key, value in keys.items()}}
    return Tokenizer(metadata | (named or {}) | ({} if template is None else {"tokenizer.chat_template": template}))


def test_chatml():
    template = ChatTemplate(CHATML)
    assert template.render(
        HELLO) == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert template.render([{"role": "system", "content": "S"}, *HELLO], add_generation_prompt=False) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n")


@pytest.mark.parametrize("source, text", [
    ("{{ bos_token }}a{{ eos_token }}", "<s>a</s>"),
    ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),                                # lstrip_blocks and trim_blocks
    ("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "user"),
    ("{{ messages | tojson }}", '[{"role": "user", "content": "é<b>"}, {"role": "assistant", "content": "x"}]'),
    ("{{ strftime_now('%Y-%m-%d') }}", "2025-03-01"),
    ("{% if tools %}tools{% else %}none{% endif %}", "none"),
    ("{{ tools is none }} {{ documents is none }}", "True True"),
    ("{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}", "x"),
    ("{{ messages[1] | tojson(indent=1) }}", '{\n "role": "assistant",\n "content": "x"\n}'),
    ("{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}", '{"a":"\\u00e9","b":1}'),
    ("{% generation %}{{ messages[1].content }}{% set n = 2 %}{% endgeneration %} {{ n is defined }}", "x False"),
    ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | tojson }}", '["é<b>"]'),
    ("{% macro tag(t) %}<{{ t }}>{% endmacro %}{{ tag(messages[0].role) }}", "<user>"),
    ("{%- set ns = namespace(last=-1) %}\n{%- for m in messages[::-1] %}\n{%- set ns.last = loop.index0 %}\n{%- endfor %}\n"
     "{{- ns.last }}", "1"),
    ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
])
def test_what_a_template_sees(source, text):
    messages = [{"role": "user", "content": "é<b>"}, {"role": "assistant", "content": "x"}]
    assert ChatTemplate(source, "<s>", "</s>").render(messages, date="2025-03-01") == text


def test_no_clock_and_no_chance():
    """Two renderings a second, or a year, apart are the same; a template that would draw lots is refused."""
    asks = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M:%S') }}")
    assert asks.asks_for_date and asks.render(HELLO) == "01 Jan 2026 00:00:00" and not ChatTemplate("a").asks_for_date
    for source in "{{ [1, 2] | random }}", "{{ lipsum() }}":
        with pytest.raises(ChatTemplateError):
            ChatTemplate(source).render(HELLO)
    for date in "2026-02-30", "tomorrow", None, "2026-01-01 10:00":
        with pytest.raises(ParameterError, match="^date: must be a day as YYYY-MM-DD, got "):
            asks.render(HELLO, date=date)


def test_token_ids_on_a_date():
    model = tokenizer("{{ strftime_now('%Y-%m-%d') }}")
    assert model.decode(encode_chat(model, HELLO, date="2025-03-01")) == "2025-03-01"
    assert model.decode(encode_chat(model, HELLO)) == "2026-01-01"


@pytest.mark.parametrize("source, message", [
    ("a\n{{ raise_exception('roles must\n alternate') }}",
     r"tokenizer.chat_template: line 2: refuses the messages: roles must\n alternate"),
    ("a\n{% if %}", "tokenizer.chat_template: line 2: Expected an expression"),
    ("{% generation %}", "tokenizer.chat_template: line 1: Unexpected end of template"),
    ("a\n\n{{ messages.nothing.more }}", "tokenizer.chat_template: line 3: UndefinedError: "),
    ("{% macro f() %}\n{{ 1 // 0 }}{% endmacro %}\n\n{{ f() }}", "tokenizer.chat_template: line 2: ZeroDivisionError: "),
    ("{{ ''.__class__.__mro__ }}", "tokenizer.chat_template: line 1: SecurityError: "),
    ("{{ messages.append(1) }}", "tokenizer.chat_template: line 1: SecurityError: "),
    ("{{ messages[0].update(role='system') }}", "tokenizer.chat_template: line 1: SecurityError: "),
    ("{% for i in range(1000000000) %}{% endfor %}", "tokenizer.chat_template: line 1: OverflowError: "),
])
def test_errors_and_the_sandbox(source, message):
    with pytest.raises(ChatTemplateError) as error:
        ChatTemplate(source).render(HELLO)
    assert str(error.value).startswith(message) and isinstance(error.value, UserError) and "\n" not in str(error.value)


@pytest.mark.parametrize("messages", ["hello", ["hello"], None])
def test_messages_that_are_none(messages):
    with pytest.raises(ParameterError, match=r'^messages: must be a list of \{"role": \.\.\., "content": \.\.\.\}, got '):
        ChatTemplate("").render(messages)


def test_model_without_template():
    with pytest.raises(ChatTemplateError, match="the model has no chat template"):
        encode_chat(tokenizer(None), HELLO)


# Arguments, parts and calls

def test_arguments_are_passed_on():
    template = ChatTemplate("{{ enable_thinking is defined and not enable_thinking }} {{ tools[0].function.name }} "
                            "{{ documents[0].title }} {{ add_generation_prompt }}")
    assert template.render(HELLO, tools=TOOLS, documents=[{"title": "D"}], enable_thinking=False) == "True weather D True"
    assert template.render(HELLO, False, tools=TOOLS, documents=[{}]) == "False weather  False"


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
TEXT = "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"
PARTS = ("{% for m in messages %}{{ m.role }}:{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
         "{% endfor %}{% endfor %}")
BOTH = ("{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p['text'] }}{% endfor %}{% endif %}{% endfor %}")


@pytest.mark.parametrize("source", [TEXT, PARTS, BOTH, TEXT.replace("+ m.content", "~ m.content")])
def test_content_is_a_text_or_parts_whatever_the_template_takes(source):
    template = ChatTemplate(source)
    assert template.render(HELLO) == "user:Hello"
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert template.render([{"role": "user", "content": parts}]) == "user:Hello"
    assert template.render([{"role": "user", "content": []}]) == "user:"


@pytest.mark.parametrize("part", [{"type": "image"}, {"type": "text"}, "Hello", {"type": "text", "text": 3}])
def test_parts_that_are_no_text_are_refused(part):
    with pytest.raises(ChatTemplateError, match=r'^messages\[1\].content\[0\]: got .*, allowed is {"type": "text", "text": '):
        ChatTemplate(TEXT).render([*HELLO, {"role": "user", "content": [part]}])


CALL = "{% for m in messages %}{% for c in m.tool_calls %}{% set a = c.function.arguments %}%s{% endfor %}{% endfor %}"


@pytest.mark.parametrize("shown, expected", [
    ("{{ a | tojson }}", '{"city": "Zürich"}'),                                         # takes mappings
    ("{% for k, v in a.items() %}{{ k }}={{ v }}{% endfor %}", "city=Zürich"),
    ("{{ 'call ' + a }}", 'call {"city": "Zürich"}'),                                     # takes JSON
    ("{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}", '{"city": "Zürich"}'),
    ("{% if a is mapping %}{% for k in a %}{{ k }}{% endfor %}{% else %}{{ a }}{% endif %}", "city"),  # it does not write JSON
    ("-", "-"),                                                                          # shows neither
])
def test_arguments_of_calls_are_a_mapping_or_json_whatever_the_template_takes(shown, expected):
    template = ChatTemplate(CALL.replace("%s", shown))
    for arguments in {"city": "Zürich"}, '{"city": "Zürich"}':
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
        assert template.render(messages, tools=TOOLS) == expected
        assert call["function"]["arguments"] == arguments  # what was given is left as it was


def test_calls_that_are_no_json():
    messages = [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": "{city"}}]}]
    with pytest.raises(ChatTemplateError, match="^tool_calls: arguments of 'weather' are not JSON: "):
        ChatTemplate(CALL.replace("%s", "{{ a | tojson }}")).render(messages)


def test_templates_that_need_tools_are_probed_with_one():
    source = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}" + PARTS
    assert ChatTemplate(source).render(HELLO, tools=TOOLS) == "weather user:Hello"
    with pytest.raises(ChatTemplateError, match="^tokenizer.chat_template: line 1: TypeError: 'NoneType' object is not iterable"):
        ChatTemplate(source).render(HELLO)


def test_named_templates():
    named = {"tokenizer.chat_templates": ["tool_use", "rag", "missing"], "tokenizer.chat_template.tool_use": "tools",
             "tokenizer.chat_template.rag": "{{ documents[0].text }}\n{{ raise_exception('no') }}"}
    model = tokenizer("plain", named)
    assert model.chat_templates.keys() == {"tool_use", "rag"}

    def text(**options):
        return model.decode(encode_chat(model, HELLO, **options))

    assert (text(), text(tools=TOOLS), text(template="tool_use")) == ("plain", "tools", "tools")
    with pytest.raises(ChatTemplateError, match="^tokenizer.chat_template.rag: line 2: refuses the messages: no"):
        text(template="rag", documents=[{"text": "D"}])
    with pytest.raises(ParameterError, match="^template: must be one of the model's, tool_use, rag, got 'missing'"):
        text(template="missing")
    with pytest.raises(ParameterError, match="must be one of the model's, none, got 'rag'"):
        encode_chat(tokenizer("plain"), HELLO, template="rag")


def test_token_ids_of_a_conversation():
    chat = tokenizer(CHATML)
    ids = encode_chat(chat, HELLO)
    assert ids[:2] == [258, chat.encode("s")[0]] and ids.count(258) == 3 and ids.count(259) == 2
    assert chat.decode(ids, skip_special=False) == ChatTemplate.of(chat).render(HELLO)


@pytest.mark.parametrize("template, add_bos, n_bos", [
    ("a", False, 0), ("a", True, 1), ("{{ bos_token }}a", False, 1), ("{{ bos_token }}a", True, 1), ("", True, 1)])
def test_bos_comes_once(template, add_bos, n_bos):
    ids = encode_chat(tokenizer(template, add_bos_token=add_bos, add_eos_token=True), HELLO)
    assert ids.count(256) == n_bos and ids[:n_bos] == [256] * n_bos
    assert 257 not in ids  # the answer is yet to come
