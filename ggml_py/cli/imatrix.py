"""ggml-py imatrix: how much each column of a model's matrices counts on a text."""
import sys
import time

from ..files.writing import check_file
from .loading import existing, load, settings_of
from .options import chunks, one_model, seed, text
from .tables import size
from .values import at_least, one_of, output


def options(p) -> None:
    one_model(p, "tokens of a window; 512 by default")
    text(p)
    chunks(p)
    seed(p)
    p.add_argument("-o", "--output", "--output-file", type=output(check_file), required=True, metavar="FILE",
                   help="where the importance matrix goes, a GGUF file as of llama-imatrix")
    p.add_argument("--output-format", type=one_of("gguf"), default="gguf", metavar="gguf", help="the one there is")
    p.add_argument("--chunk", "--from-chunk", dest="first_chunk", type=at_least(0), default=0, metavar="N",
                   help="windows that are left out at the beginning")
    p.add_argument("--parse-special", action="store_true", help="texts of control tokens become these tokens")
    p.add_argument("--process-output", action="store_true", help="also of the output head, if the model has one")


def run(options, load_model) -> None:
    from ..conversion.collect import collect
    from ..engine.windows import read_text
    content = read_text(existing(options.text))
    settings = settings_of(options, n_ctx=options.n_ctx or 512, n_chunks=options.n_chunks)
    with load(options, load_model) as model:
        tokens = model.tokenizer.encode(content, parse_special=options.parse_special)[settings.n_ctx * options.first_chunk:]
        start = time.perf_counter()
        found = collect(model, tokens, settings, str(options.text), options.output, sys.stderr, options.process_output)
    n_tokens, seconds = found.chunk_count * found.chunk_size, time.perf_counter() - start
    print(f"imatrix: {n_tokens} tokens in {seconds:.2f} s, {n_tokens / seconds:.1f} tokens/s", file=sys.stderr)
    found.write(options.output)
    seen = [name for name, (_, counts) in found.entries.items() if not counts.all()]
    for name in seen:
        n, unseen = len(found.entries[name].counts), int((found.entries[name].counts == 0).sum())
        print(f"imatrix: {name}: {unseen} of {n} experts have seen no token", file=sys.stderr)
    print(f"{options.output}: {len(found.entries)} matrices, {found.chunk_count} windows of {found.chunk_size} tokens, "
          f"{size(options.output.stat().st_size)}")
