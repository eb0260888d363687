"""ggml-py perplexity: of a text, KL divergence files, and tasks."""
import sys
import time
from pathlib import Path

from ..base.errors import UserError
from ..files.writing import check_file, write
from . import corpus, tasks
from .ids import encoded, finite, json_option, text_or_tokens, tokens_option, write_json
from .loading import existing, load, settings_of
from .options import chunks, one_model, seed, text
from .parser import refuse
from .values import at_least, one_of, output


def options(p) -> None:
    one_model(p, "tokens of a window; 512, or as in the base file that is compared with")
    text(p)
    tokens_option(p, "in the place of a text, ")
    chunks(p)
    seed(p)
    p.add_argument("--ppl-stride", dest="stride", type=at_least(0), default=0, metavar="N",
                   help="distance of overlapping windows; 0: windows side by side")
    p.add_argument("--ppl-output-type", dest="output_type", type=one_of("0", "1"), default="0", metavar="0|1",
                   help="1: a line for each window, of its first token and the perplexity so far; of windows side by side also "
                        "the mean negative log-likelihood and its error")
    p.add_argument("--kl-divergence-base", "--save-all-logits", type=Path, metavar="FILE",
                   help="the base file, written unless --kl-divergence is given")
    p.add_argument("--root", action="store_true",
                   help="the Merkle root of the windows' digests, as attestations have it, in the place of the digest of all "
                        "logits: threads make them side by side, and a GPU need not wait for them")
    json_option(p, "the perplexity, or the shares of right tasks, with what they are made of, for machines")
    corpus.options(p)
    p.add_argument("--kl-divergence", action="store_true", help="compare with the base file, on its tokens")
    tasks.options(p)
    p.add_argument("--out", type=output(check_file), metavar="FILE.jsonl",
                   help="of tasks, a line each: what was chosen, and the likelihood of every token that was scored")


def run(options, load_model) -> None:
    from ..check.attestation import tokens_sha256
    from ..measure import kl_divergence
    from ..measure.perplexity import perplexity, strided_perplexity
    if asked := tasks.asked(options):
        score(options, load_model, asked)
        return
    refuse(options, ("--out",), "is of tasks, such as --tasks; none are given")
    base_path = options.kl_divergence_base
    if options.kl_divergence and base_path is None:
        raise UserError("--kl-divergence: needs --kl-divergence-base FILE to compare with")
    if options.stride and base_path is not None:
        raise UserError("--ppl-stride: base files hold windows side by side, not strided ones")
    if base_path is not None and not options.kl_divergence:
        check_file(base_path)
    base = kl_divergence.BaseFile(existing(base_path)) if options.kl_divergence else None
    if base and options.n_ctx not in (None, base.n_ctx):
        raise UserError(f"-c: {base_path} was made with -c {base.n_ctx}, got {options.n_ctx}")
    rows = options.output_type == "1"
    refuse(options, ("--tokens", "--json") * (base is not None), "is of a perplexity; --kl-divergence takes the base's tokens")
    content = "" if base else text_or_tokens(options)
    settings = settings_of(options, n_ctx=base.n_ctx if base else options.n_ctx or 512, n_chunks=options.n_chunks,
                           stride=options.stride)
    if options.ray:
        refuse(options, ("--ppl-output-type",), "is of windows that are computed here, not of --ray")
        if base_path is not None or options.stride:
            raise UserError("--ray: is of windows side by side, without a base file and --ppl-stride")
        refuse(options, ("--json",), "is of one machine; with --ray, attest writes JSON")
        corpus.computed(options, content, settings)
        return
    corpus.refuse_without(options)
    with load(options, load_model) as model:
        if base:
            kl_divergence.compare(model, base, settings, sys.stdout, sys.stderr, root=options.root)
            return
        if isinstance(content, str):
            print("perplexity: tokenizing the input ..", file=sys.stderr)
        start = time.perf_counter()
        tokens = encoded(content, options, model.tokenizer, model.n_vocab)
        if isinstance(content, str):
            print(f"perplexity: tokenization took {1e3 * (time.perf_counter() - start):g} ms", file=sys.stderr)
        writer = None
        if base_path is not None:
            print(f"perplexity: saving all logits to {base_path}", file=sys.stderr)
            writer = lambda windows: kl_divergence.base_writer(base_path, model.n_vocab, windows)
        if settings.stride:
            found = strided_perplexity(model, tokens, settings, sys.stdout, sys.stderr, rows=rows, root=options.root)
        else:
            found = perplexity(model, tokens, settings, sys.stdout, sys.stderr, writer, rows=rows, root=options.root)
        if options.json:
            write_json(options.json, model, ppl=finite(found.ppl), error=finite(found.error),
                       **{found.digest.name: found.digest.hexdigest()}, n_ctx=settings.n_ctx, stride=settings.stride,
                       type_k=settings.type_k, type_v=settings.type_v, n_tokens=len(tokens), tokens_sha256=tokens_sha256(tokens),
                       windows=[{"nll": finite(total), "n": n} for total, n in found.windows])


def score(options, load_model, asked: tasks.Asked) -> None:
    from ..measure.tasks import as_json_lines, score_tasks, summary
    read = asked.read(sys.stderr)
    with load(options, load_model) as model:
        settings = settings_of(options, n_ctx=options.n_ctx or model.n_ctx_train)
        found = score_tasks(model, asked.name, read, str(asked.path), settings, sys.stdout, sys.stderr)
        if options.json:
            write_json(options.json, model, format=asked.name, type_k=settings.type_k, type_v=settings.type_v, **summary(found))
    if options.out:
        write(options.out, as_json_lines(found))
