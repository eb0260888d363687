"""A conversation. A line is a turn; it ends with the end of the input. With --schema each answer is JSON that fits a schema.

    python examples/chat.py -m smollm2
    echo "Describe a person." | python examples/chat.py --schema '{"type": "object", "properties": {"name": {"type": "string"}}}'
"""
import argparse
import sys

from ggml_py import Grammar, Model


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2", help="a GGUF file, or a name (ggml-py pull)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--system", help="what the conversation begins with")
    parser.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--schema", type=Grammar.json_schema, metavar="JSON")
    asked = parser.parse_args(argv)
    messages = [{"role": "system", "content": asked.system}] if asked.system else []
    with Model.load(asked.model, device=asked.device) as model:
        for line in sys.stdin:
            messages.append({"role": "user", "content": line.strip()})
            answer = ""
            # The conversation so far is not computed again: the model keeps it (docs/python.md)
            for piece in model.chat(messages, max_tokens=asked.max_tokens, grammar=asked.schema, stream=True):
                answer += piece.text
                print(piece.text, end="", flush=True)
            print()
            messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
