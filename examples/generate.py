"""Continue a prompt: whole, as it comes, several times.

    python examples/generate.py "Once upon a time" -m smollm2 --temperature 0.8 -n 2
"""
import argparse

from ggml_py import Model


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt")
    parser.add_argument("-m", "--model", default="smollm2", help="a GGUF file, or a name (ggml-py pull)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-n", type=int, default=1, help="texts, of which each draws for itself")
    asked = parser.parse_args(argv)
    with Model.load(asked.model, device=asked.device) as model:
        for piece in model.generate(asked.prompt, max_tokens=asked.max_tokens, n=asked.n, echo=True, draft="ngram", stream=True,
                                    temperature=asked.temperature, seed=asked.seed):
            print(piece.text, end="", flush=True)
            if piece.finish_reason is not None:
                print(f"  [{piece.finish_reason}]")
        # The same text whole, without drafts; with the digest of the logits that its tokens were chosen from
        found = model.generate(asked.prompt, max_tokens=asked.max_tokens, digest=True, temperature=asked.temperature,
                               seed=asked.seed)
        print(f"{len(found.ids)} tokens, digest {found.digest}")


if __name__ == "__main__":
    main()
