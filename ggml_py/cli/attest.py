"""ggml-py attest: what came out, for others to confirm."""
import json
import sys
from dataclasses import replace

from ..files.writing import check_file, write
from . import corpus, tasks
from .ids import checked_tokens, encoded, given_prompt, prompt_tokens_option, text_or_tokens, tokens_option
from .loading import load, sampling_of, settings_of
from .options import chunks, one_model, sampling, text
from .parser import refuse
from .prompts import chat_of, encoded_prompt
from .values import at_least, output

OF_A_PERPLEXITY = "-f", "--tokens", "-c", "--chunks", *corpus.NAMES, *tasks.NAMES
OF_A_GENERATION = "-n", "--chat", "--date", "--temp", "--seed", "--top-k", "--top-p", "--min-p"


def options(p) -> None:
    one_model(p, "tokens of a window; 512 by default")
    p.add_argument("-o", "--output", type=output(check_file), required=True, metavar="FILE", help="where the attestation goes")
    text(p)
    tokens_option(p, "in the place of a text, ")
    chunks(p)
    corpus.options(p)
    p.add_argument("-p", "--prompt", metavar="TEXT",
                   help="the text to continue, by the options that follow; without it the perplexity of -f by windows of -c")
    prompt_tokens_option(p)
    p.add_argument("-n", "--n-predict", type=at_least(1), default=128, metavar="N", help="new tokens at most")
    sampling(p)
    tasks.options(p)


def run(options, load_model) -> None:
    from ..check.attestation import attest_generation, perplexity_document
    from ..files.pull import file_sha256
    from ..measure.perplexity import attest_perplexity
    from ..measure.tasks import attest_tasks
    settings = settings_of(options, n_ctx=options.n_ctx or 512, n_chunks=options.n_chunks)
    generates = options.prompt is not None or options.prompt_tokens is not None
    if generates:
        refuse(options, OF_A_PERPLEXITY, "is of a perplexity or of tasks, and -p asks for a generation")
    else:
        refuse(options, OF_A_GENERATION, "is of a generation, which -p asks for; without it a perplexity is attested")
    refuse(options, ("--date",) * (not options.chat), "is of --chat, which is not given")
    ids, asked = given_prompt(options), None if generates else tasks.asked(options)
    read = asked.read(sys.stderr) if asked else []
    content = "" if generates or asked else text_or_tokens(options)
    text_sha256 = None if generates or asked or options.tokens else file_sha256(options.text)
    if options.ray:
        ppl, digests, made, tokens, add_bos = corpus.computed(options, content, settings)
        write_document(options, perplexity_document(made, add_bos, text_sha256, tokens, settings, ppl, digests))
        return
    corpus.refuse_without(options)
    with load(options, load_model) as model:
        if generates:
            prompt = encoded_prompt(options, model.tokenizer) if ids is None else (
                checked_tokens(ids, options.prompt_tokens, model.n_vocab))
            choice = sampling_of(options)
            document = attest_generation(model, prompt, options.n_predict, choice, settings, sys.stderr, chat_of(options))
            print(document["result"]["text"])
        elif asked:
            settings = replace(settings, n_ctx=options.n_ctx or model.n_ctx_train)
            document = attest_tasks(model, asked.name, read, str(asked.path), asked.n_tasks, file_sha256(asked.path), settings,
                                    sys.stdout, sys.stderr)
        else:
            tokens = encoded(content, options, model.tokenizer, model.n_vocab)
            document = attest_perplexity(model, text_sha256, tokens, settings, sys.stdout, sys.stderr)
    write_document(options, document)
    if generates or asked:  # a perplexity has said it
        print(f"root: {document['merkle_root']}")


def write_document(options, document: dict) -> None:
    write(options.output, json.dumps(document, indent=1).encode() + b"\n")
