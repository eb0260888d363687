"""ggml-py verify: one digest over all settings that must not matter, or an attestation computed again."""
import json
import sys
from dataclasses import replace
from pathlib import Path

from ..base.errors import UserError
from ..files.writing import check_file, check_folder, write
from .ids import encoded, read_tokens, text_or_tokens, tokens_option
from .loading import OF_A_HUB, existing, model_paths, reader, set_threads
from .main import behind
from .options import attention, cache_types, chunks, context_size, model, reading, report, seed, telling, text, threads
from .parser import refuse
from .values import at_least, device, listed, output

CONFIRMING = ("-m", "-hf", *OF_A_HUB, "-f", "--tokens", "--devices", "-t", "-fa", "-lm", "--no-mmap", "--mmap", "--mlock",
              "--numa", "--fit", "-fitt", "-v", "-lv", "--attestation", "--sample", "--json")
NO_NODE = ("no node differs where every node is waited for: the fault is in the order of work (a race, a missing barrier), or "
           "comes and goes")


def options(p) -> None:
    model(p)
    text(p)
    tokens_option(p, "in the place of a text, ")
    context_size(p, "tokens of a window", 512, least=2)
    chunks(p, 4)
    cache_types(p)
    p.add_argument("--devices", "--device", dest="device", type=listed(device), metavar="LIST",
                   help="of cpu, cpu:N, cuda and cuda:N; all that are present by default")
    threads(p)
    attention(p)
    seed(p)
    reading(p)
    telling(p)
    p.add_argument("--axes", type=listed(str), metavar="NAME[,NAME]",
                   help="of rerun, ubatch, pieces, sequences, prefix, speculation, threads, launch, kv_write, fusion, noise, "
                        "products, placement, which loads the weights a second time, letters, experts and device, all by "
                        "default; one must run here")
    p.add_argument("--reruns", type=at_least(1), default=2, metavar="N", help="of the default setting")
    p.add_argument("--json", type=output(check_file), metavar="FILE", help="the results, or what was confirmed, for machines")
    report(p)
    p.add_argument("--dump", type=output(check_folder), metavar="DIR",
                   help="where inputs and outputs of the first node that differs go, with a script that runs it")
    p.add_argument("--attestation", type=Path, metavar="FILE",
                   help=f"compute what it attests, and nothing else; takes {', '.join(CONFIRMING)}, one device")
    p.add_argument("--sample", type=at_least(1), metavar="K", help="of an attestation only so many windows, drawn at random")
    p.add_argument("--no-bisect", dest="bisect", action="store_false", help="do not look for the first node that differs")


def run(options, load_model) -> int:
    return verify(options, load_model) if options.attestation is None else confirm_attestation(options, load_model)


def verify(options, load_model) -> int:
    refuse(options, ("--sample",), "is of windows of an --attestation, none is given")
    refuse(options, ("--dump",) * (not options.bisect), "saves the first node that differs, which --no-bisect does not look for")
    refuse(options, ("--reruns",) * ("rerun" not in (options.axes or ["rerun"])),
           "is of the axis rerun, which is not among --axes")
    from ..backends import cuda, device_of, present_devices
    from ..check.axes import AXES, check_some_run, settings_of
    from ..check.verify import LiveTable, Verification
    from ..engine.settings import check_context
    from ..engine.windows import first_windows, with_bos
    content, path = text_or_tokens(options), model_paths(options)[0]
    set_threads(options.n_threads)
    devices = list(dict.fromkeys(map(device_of, options.device))) if options.device else present_devices()
    read = reader(options, load_model, options.n_ctx, options.n_chunks if options.n_chunks > 0 else 1)
    with read(path, devices[0]) as model:
        check_context(model, options.n_ctx)
        tokens = encoded(content, options, model.tokenizer, model.n_vocab)
        windows = with_bos(model, first_windows(tokens, options.n_ctx, options.n_chunks))
        axes = options.axes or list(AXES)
        settings = settings_of(axes, devices, windows.shape, options.reruns, cuda.unavailable(0) or "no GPU among --devices",
                               options.type_k, options.type_v)
        if model.fitted:
            reason = f"the model does not fit into {devices[0]} as a whole"
            settings = [replace(each, reason=reason) if each.placement else each for each in settings]
        check_some_run(axes, settings)
        difference, table = None, LiveTable(sys.stdout, windows)
        load = lambda device, placement=None: read(path, device, placement)
        with Verification(load, windows, settings, table) as verification:
            verification.models[devices[0]] = model
            with table:
                verification.run()
            code, mismatch = 0 if verification.confirmed else 1, verification.first_mismatch()
            with behind(code):
                table.print()
                print(verification.verdict(), flush=True)
            if mismatch and options.bisect:
                print("verify: looking for the first node that differs ..", file=sys.stderr)
                difference = verification.bisect(mismatch)
                with behind(code):
                    print(difference or NO_NODE, flush=True)
            if options.report:
                with behind(code):
                    found = str(difference or NO_NODE) if mismatch and options.bisect else ""
                    report_verification(options, verification, found)
        if difference and options.dump:
            with behind(code):
                difference.save(options.dump)
    if options.json:
        with behind(code):
            write(options.json, verification.report(str(path), difference).encode())
    return code


MARKS = {"same": ("good", "✓"), "different": ("bad", "✗"), "elsewhere": ("bad", "✗"), "not run": ("none", ""),
         "running": ("none", "")}  # styles of report.html, and signs


def report_verification(options, verification, difference: str) -> None:
    """The page of --report. difference: what is said of the first node that differs, or ""."""
    from .. import NUMERICS_VERSION
    from ..check.attestation import environment_of, files_sha256
    from ..check.axes import AXES
    from ..check.verify import SHORTENED
    from .report import Chart, Mark, Table, Text, write_report
    models, results = verification.models, verification.results
    model, (n_windows, n_ctx) = next(iter(models.values())), verification.windows.shape
    verdicts, axes, default = [result.described(verification.windows) for result in results], [], results[0].digest
    for axis in dict.fromkeys(result.setting.axis for result in results):
        of_axis = [result for result in results if result.setting.axis == axis]
        squares = [[Mark(MARKS[r.status][1], f"cell {MARKS[r.status][0]}", f"{r.setting.name}: {r.digest or r.setting.reason}")
                    for r in of_axis if r.setting.device == device and not r.setting.reason] for device in models]
        # of settings that computed fewer tokens, the same digest as that of the default one's rows stands for the default one's
        found = {default if r.status == "same" else r.digest for r in of_axis if r.digest}
        digests = [Mark(f"{digest[:16]} ", "digest" if digest == default else "digest bad", digest)
                   for digest in sorted(found, key=lambda digest: (digest != default, digest))]
        axes.append((axis, AXES.get(axis, "one window after the other"), *squares,
                     digests or [Mark("; ".join(dict.fromkeys(r.setting.reason for r in of_axis)), "none")]))
    settings = [(r.setting.axis, r.setting.name, r.setting.device, tokens, f"{r.seconds:.1f}" if r.digest else "",
                 [Mark(r.digest[:16], "digest", r.digest)], [Mark(verdict, MARKS[r.status][0])])
                for r, (tokens, verdict) in zip(results, verdicts)]
    parts: list[Table | Chart | Text] = [
        Table("Axes", ("axis", "settings that must not matter", *models, "digests"), axes,
              text="A square is a setting. Point at it to read its name and its digest."),
        *([Text("The first node that differs", difference)] if difference else []),
        Table("Settings", ("axis", "setting", "device", "tokens", "s", "digest", "result"), settings, frozenset({3, 4}),
              note=SHORTENED if any(r.setting.n_tokens for r in results) else "")]
    write_report(options.report, options, f"The same bits: {model.file.path.name}", verification.verdict(),
                 verification.confirmed, parts, environment_of([each.backend for each in models.values()]),
                 model=str(model.file.path),
                 sha256=", ".join(files_sha256(model.file)), numerics=str(NUMERICS_VERSION),
                 windows=f"{n_windows} of {n_ctx} tokens", text=str(options.tokens or options.text))


def confirm_attestation(options, load_model) -> int:
    from .. import NUMERICS_VERSION
    from ..backends import device_of
    from ..check.attestation import NotConfirmed, confirm, read_attestation, sampled
    from ..engine.windows import read_text
    from ..files.pull import file_sha256
    refuse(options, {*options.given.values()} - {*CONFIRMING},
           f"does not apply to an --attestation, which says what to compute; allowed: {', '.join(CONFIRMING)}")
    if options.device and len(options.device) > 1:
        raise UserError(f"--devices: an attestation is computed on one device, got {', '.join(options.device)}")
    document = read_attestation(existing(options.attestation))
    text: str | list[int] | bytes | None = None
    if document["kind"] == "generation":
        refuse(options, ("-f", "--tokens"), f"{options.attestation} is of a generation, whose prompt is in it")
    elif "text" not in document:
        refuse(options, ("-f",), f"{options.attestation} is of token ids, which --tokens gives")
        if options.tokens is None:
            raise UserError(f"--tokens: is missing; {options.attestation} is of token ids")
        text = read_tokens(options.tokens)
    else:
        refuse(options, ("--tokens",), f"{options.attestation} is of a file, which -f gives")
        read = Path.read_bytes if document["kind"] == "tasks" else read_text
        text, found = read(existing(options.text)), file_sha256(options.text)
        if found != document["text"]:
            raise UserError(f"{options.text}: another text than attested: sha256 is {found}, must be {document['text']}")
    path, = model_paths(options)
    set_threads(options.n_threads)
    with reader(options, load_model, None)(path, device_of((options.device or ["auto"])[0])) as model:
        sample = sampled(document, options.sample)
        try:
            said, code = confirm(document, model, text, sample, sys.stderr), 0
        except NotConfirmed as error:
            said, code = str(error), 1
        with behind(code):
            print(said, flush=True)
        report = {"numerics": NUMERICS_VERSION, "model": str(path), "device": model.device, "device_name": model.backend.name,
                  "attestation": str(options.attestation), "kind": document["kind"], "sha256": document["sha256"],
                  "n_windows": len(document["windows"]),
                  "windows": [i + 1 for i in sample], "confirmed": not code, "message": said}
    if options.json:
        with behind(code):
            write(options.json, json.dumps(report, indent=1).encode() + b"\n")
    return code
