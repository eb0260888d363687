"""Which answer does a model hold for the likeliest?

    python examples/score.py "The capital of France is" " Paris" " London" " a fish"
"""
import argparse

from ggml_py import Model


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("context")
    parser.add_argument("continuations", nargs="+")
    parser.add_argument("-m", "--model", default="smollm2", help="a GGUF file, or a name (ggml-py pull)")
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args(argv)
    with Model.load(asked.model, device=asked.device) as model:
        # Side by side; the context, which all have, is computed once
        found = model.score_many([(asked.context, text) for text in asked.continuations])
        for likelihood, text in sorted(zip(found, asked.continuations), key=lambda each: -each[0].logprob):
            a_token = likelihood.logprob / len(likelihood.ids)
            print(f"{likelihood.logprob:10.4f}  {a_token:9.4f} a token  {'greedy' if likelihood.is_greedy else '':6}  {text!r}")


if __name__ == "__main__":
    main()
