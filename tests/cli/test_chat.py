"""The chat loop: on a terminal, and by lines of a pipe. The model says letters, of which each depends on all before it."""
import re
import subprocess
import sys

import pytest
from places import environment
from terminals import PASTE, Program

CHAT = """
import re, sys, time
import numpy as np
from fake_model import EOS, N_VOCAB, FakeModel, prefix_logits
from ggml_py.__main__ main
LENGTH, SECONDS = 30, 0
def letters(tokens):
    text = bytes(min(id, 255) for id in tokens)
    if b"<assistant>" not in text:
        return prefix_logits(tokens)
    if len(tokens) - text.rindex(b"<assistant>") - len("<assistant>") == LENGTH:
        return 100 * np.eye(N_VOCAB, dtype=np.float32)[[EOS] * len(tokens)]
    time.sleep(SECONDS)
    print("MESSAGES", text.count(b"<user>"), repr(text[text.rindex(b"<user>"):]), file=sys.stderr)
    rows = np.full((len(tokens), N_VOCAB), -np.inf, np.float32)
    rows[-1:, 97:123] = prefix_logits(tokens)[-1:, 97:123]
    return rows
model = FakeModel(logits=letters)
model.tokenizer.chat_template = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>")
model.tokenizer.token_text = lambda id: f"<{id}>"
code = main(sys.argv[1:], lambda path, device: model)
assert model.open_contexts == 0
sys.exit(code)
""".replace("__main__ main", "__main__ import main")
WORD = "[a-z]{30}"


@pytest.fixture
def argv(tmp_path):
    (tmp_path / "m.gguf").touch()
    return ["run", "-m", str(tmp_path / "m.gguf"), "--no-show-timings"]


def answer(program: Program, message: str) -> str:
    """What the message gets."""
    program.type(message + "\r")
    return re.search(rf"\n({WORD})\n", program.until(rf"\n{WORD}\n\n> "))[1]


def test_a_conversation(argv, tmp_path):
    (tmp_path / "file").write_text("of a file\n")
    with Program(CHAT, *argv, "--temp", "1", "--seed", "3") as program:
        program.until("\n> ")
        first = answer(program, "hello")
        second = answer(program, "and more")
        assert answer(program, "/regen") == second != answer(program, "/regen 8")
        assert answer(program, "/regen 3") == second != first
        program.type("/clear\r")
        assert answer(program, "hello") == first  # as at the beginning
        program.type(f"/read {tmp_path / 'file'}\r")
        program.type(f"/read {tmp_path / 'none'}\r")
        answer(program, "what is it?")
        program.type("/regen tea\r")
        answer(program, "/regen")  # it is still there
        answer(program, "/etc/passwd, what is that?")
        answer(program, "/clear the table")  # not a command
        answer(program, "one \\\rtwo")
        answer(program, PASTE.format("three\nfour"))
        program.type("/exit\r")
        code, err = program.end()
        assert code == 0 and "b'<user>of a file\\n\\nwhat is it?<assistant>" in err
        assert f"/read: {tmp_path / 'none'}: no such file\n" in err
        assert "/regen: must be an integer, got 'tea'\n" in err and "b'<user>/etc/passwd, what is that?<assistant>" in err
        assert "b'<user>one \\ntwo<assistant>" in err and "b'<user>three\\nfour<assistant>" in err


def test_ctrl_c_stops_an_answer_and_then_the_program(argv):
    slow = CHAT.replace("LENGTH, SECONDS = 30, 0", "LENGTH, SECONDS = 2000, 0.02")
    with Program(slow, *argv) as program:
        program.until("\n> ")
        program.type("hello\r")
        program.until("\n[a-z]{5}")
        program.type("\x03")
        program.until("\n\n> ")
        program.type("and?\r")
        program.until("\n[a-z]{5}")
        program.type("\x03")
        program.until("\n\n> ")
        program.type("half a line")
        program.until("half a line")
        program.idle()
        program.type("\x03")
        code, err = program.end()
        assert code == 130 and "Traceback" not in err
        assert re.search(r"MESSAGES 2 b'<user>and\?<assistant>[a-z]{3}", err)  # the first one stays, with its half an answer


def test_a_narrow_window_and_the_end_of_input(argv):
    with Program(CHAT, *argv, "-cnv", "-sys", "Be brief.", "-p", "first", columns=20) as program:
        program.until(f"^{WORD}\n\n> ")  # an answer has no line breaks of its own
        program.type("a message that is much wider than the window is\r")
        program.until(f"\n{WORD}\n\n> ")
        program.type("\x04")
        code, err = program.end()
        assert code == 0 and "b'<user>a message that is much wider than the window is<assistant>" in err


def test_lines_of_a_pipe(argv):
    """Without prompts; the end of the input is the end."""
    done = subprocess.run([sys.executable, "-c", CHAT, *argv, "-cnv"], input="hello\n\n/regen\n/clear\nhello\nlast", text=True,
                          capture_output=True, env=environment())
    first, again, cleared, last, end = done.stdout.split("\n")
    assert done.returncode == 0 and first == again == cleared != last and end == "" and len(last) == 30


def test_what_has_no_room_is_forgotten(argv):
    """The conversation goes on; so it does where a template refuses."""
    done = subprocess.run([sys.executable, "-c", CHAT, *argv, "-cnv", "-c", "60"], text=True, capture_output=True,
                          input=f"{'x' * 50}\nhello\nmore\n", env=environment())
    assert done.returncode == 0 and re.fullmatch(f"{WORD}\n", done.stdout)
    assert done.stderr.count("the context holds 60; /clear begins anew, and a larger -c has more room\n") == 2
    template = "{% if messages[-1].content == 'no' %}{{ raise_exception('not that') }}{% endif %}<user><assistant>"
    done = subprocess.run([sys.executable, "-c", CHAT, *argv, "-cnv", "--chat-template", template], text=True,
                          capture_output=True, input="no\nyes\n", env=environment())
    assert re.fullmatch(f"{WORD}\n", done.stdout)
    assert "chat: --chat-template: line 1: refuses the messages: not that\n" in done.stderr


def test_where_there_is_no_template(argv):
    """On a terminal that would be a chat."""
    with Program(CHAT.replace("model.tokenizer.chat_template =", "unused ="), *argv) as program:
        code, err = program.end()
        assert code == 2 and "the model has no chat template, give it a prompt as it is" in err
    with Program(CHAT, *argv, "-no-cnv") as program:
        assert program.end() == (2, "ggml-py: error: -p: it is missing, and so is -f\n")
