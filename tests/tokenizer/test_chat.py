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


def tokenizer(template: str | None, **keys) -> Tokenizer:
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.merges": [],
                "tokenizer.ggml.tokens": [*BYTE_OF_LETTER, *special], "tokenizer.ggml.token_type": [1] * 256 + [3] * 4,
                "tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.eos_token_id": 257,
                **{f"tokenizer.ggml.{key}": value for key, value in keys.items()}}
    return Tokenizer(metadata if template is None else {**metadata, "tokenizer.chat_template": template})


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
    ("{{ raise_exception('roles must alternate') }}", "the chat template refuses the messages: roles must alternate"),
    ("a\n{% if %}", "tokenizer.chat_template: line 2: Expected an expression"),
    ("{{ messages.nothing.more }}", "tokenizer.chat_template: UndefinedError: "),
    ("{{ 1 // 0 }}", "tokenizer.chat_template: ZeroDivisionError: "),
    ("{{ ''.__class__.__mro__ }}", "tokenizer.chat_template: SecurityError: "),
    ("{{ messages.append(1) }}", "tokenizer.chat_template: SecurityError: "),
    ("{{ messages[0].update(role='system') }}", "tokenizer.chat_template: SecurityError: "),
    ("{% for i in range(1000000000) %}{% endfor %}", "tokenizer.chat_template: OverflowError: "),
])
def test_errors_and_the_sandbox(source, message):
    with pytest.raises(ChatTemplateError) as error:
        ChatTemplate(source).render(HELLO)
    assert str(error.value).startswith(message) and isinstance(error.value, UserError)


def test_model_without_template():
    with pytest.raises(ChatTemplateError, match="the model has no chat template"):
        encode_chat(tokenizer(None), HELLO)


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
