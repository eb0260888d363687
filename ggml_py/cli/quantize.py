"""ggml-py quantize: a model's file with other types of tensors, in the manner of llama-quantize."""
import math
import os
import sys
from pathlib import Path

from ..base.collection import settle
from ..base.errors import UserError
from ..base.progress import Progress
from ..files.writing import check_file
from .loading import existing, load_on, model_path, set_threads
from .options import chunks, context_size, threads
from .parser import refuse
from .tables import new_table, print_tables, size
from .values import at_least, device, tensor_type, weight_type

OF_KL = "-c", "--chunks", "--device"


def options(p) -> None:
    p.add_argument("source", metavar="IN", help="a GGUF file, the first part of a split one, or a name that pull knows")
    p.add_argument("output", metavar="OUT", help="the new file; with --dry-run it may be left out")
    p.add_argument("type", nargs="?", metavar="TYPE",
                   help="of the file: a name or a number, such as Q4_K_M or 15 (docs/quantize.md; an unknown name lists them); "
                        "COPY changes none and makes one file of a split one")
    p.add_argument("n_threads_last", nargs="?", type=at_least(1), metavar="N", help="as -t, where llama-quantize has it")
    p.add_argument("--imatrix", type=Path, metavar="FILE", help="how much each column counts: GGUF of `ggml-py imatrix` or of "
                                                                "llama-imatrix, or its older .dat")
    p.add_argument("--output-tensor-type", type=weight_type, metavar="TYPE", help="of the output head")
    p.add_argument("--token-embedding-type", type=weight_type, metavar="TYPE", help="of the token embedding")
    p.add_argument("--tensor-type", dest="tensor_types", type=tensor_type, action="append", metavar="REGEX=TYPE",
                   help="of tensors in whose names the pattern is found; the first pattern that is found decides")
    p.add_argument("--pure", action="store_true", help="one type for all matrices, no mix")
    p.add_argument("--leave-output-tensor", action="store_true", help="the output head stays as it is")
    p.add_argument("--allow-requantize", action="store_true", help="quantized tensors are quantized again, which loses more")
    p.add_argument("--dry-run", action="store_true", help="print what each tensor would become, and write nothing")
    threads(p)
    p.add_argument("--kl", type=Path, metavar="TEXT",
                   help="at the end, run both files on a UTF-8 text and print the KL divergence")
    context_size(p, "tokens of a window of --kl; 512 by default", least=3)
    chunks(p)
    p.add_argument("--device", "-dev", dest="device", type=device, metavar="DEVICE",
                   help="that --kl runs on: auto, which is the first GPU if there is one, cpu or cuda:N; auto by default")


def run(options, load_model) -> None:
    from ..conversion.convert import convert
    from ..conversion.imatrix import ImportanceMatrix
    from ..conversion.plan import Asked, check_imatrix, keys_of, plan
    from ..files.gguf import GGUFFile
    from ..kernels.threads import get_num_threads
    if options.type is None:
        if not options.dry_run:
            raise UserError("TYPE: it is missing, expected IN OUT TYPE")
        options.output, options.type = None, options.output
    refuse(options, OF_KL * (options.kl is None), "is of --kl, which is not given")
    refuse(options, ("--kl",) * options.dry_run, "compares with the new file, and --dry-run writes none")
    text = existing(options.kl) if options.kl else None
    names = "type", "output_tensor_type", "token_embedding_type", "pure", "allow_requantize", "leave_output_tensor"
    asked = Asked(**{name: getattr(options, name) for name in names}, tensor_types=options.tensor_types or ())
    _ = asked.mix  # an unknown type is a mistake before any file is read
    set_threads(options.n_threads_last or options.n_threads)
    with GGUFFile.open(model_path(options.source)) as file:
        imatrix = ImportanceMatrix.read(existing(options.imatrix)) if options.imatrix else None
        changes = plan(file, asked, imatrix)
        errors = None
        if not options.dry_run:
            out = Path(options.output)
            check_output(out, file)
            check_imatrix(file, changes, imatrix)
            settle()
            with Progress(sys.stderr, "quantizing", len(changes)) as progress:
                n_bytes, errors = convert(file, changes, keys_of(file, asked, imatrix), out, imatrix, get_num_threads(),
                                          lambda change: progress.advance(change.tensor.name))
        print_tables(table_of_tensors(changes, errors, imatrix), table_of_sizes(changes))
    if not options.dry_run:
        print(f"{out}: {size(n_bytes)}")
    if text:
        print_kl(options, text, load_model)


def check_output(out: Path, file) -> None:
    """UserError where it cannot be written, or is one of the files that are read."""
    check_file(out)
    if out.exists() and any(os.path.samefile(out, path) for path in file.paths):
        raise UserError(f"OUT: {out} is IN, which is read while OUT is written; allowed: another file")


def table_of_tensors(changes, errors, imatrix):
    """errors: by name; None: there are none."""
    table = new_table("tensor", right=("shape",))
    for column in "before", "after":
        table.add_column(column)
    for column in ["bits", *["rms error"] * (errors is not None)]:
        table.add_column(column, justify="right")
    table.add_column("")
    for change in changes:
        tensor = change.tensor
        cells = [tensor.name, " x ".join(map(str, tensor.shape)), tensor.type.name, "" if change.is_copy else change.type,
                 f"{8 * change.entry.n_bytes / math.prod(tensor.shape):.4g}"]
        if errors is not None:
            cells.append(f"{errors[tensor.name]:.5f}" if tensor.name in errors else "")
        table.add_row(*cells, remark(change, imatrix))
    return table


def remark(change, imatrix) -> str:
    from ..quant.formats import FORMATS
    found = []
    if change.type != change.wanted:
        found.append(f"not {change.wanted}: rows are no multiple of {FORMATS[change.wanted].block_size}")
    if change.needs_imatrix:
        found.append("needs an importance matrix")
    elif imatrix is not None and not change.is_copy and not change.imatrix and FORMATS[change.type].is_quantized:
        found.append("not in the importance matrix")
    return "; ".join(found)


def table_of_sizes(changes):
    """Bytes and bits of a weight, of all tensors together."""
    n_values = sum(math.prod(change.tensor.shape) for change in changes)
    table = new_table(f"{len(changes)} tensors", right=("bytes", "bits per weight"))
    for when, n_bytes in (("before", sum(change.tensor.n_bytes for change in changes)),
                          ("after", sum(change.entry.n_bytes for change in changes))):
        table.add_row(when, size(n_bytes), f"{8 * n_bytes / n_values:.4f}")
    fallen = sum(change.type != change.wanted for change in changes)
    if fallen:
        table.caption = f"{fallen} tensors have another type than the mix says"
        table.caption_justify = "left"
    return table


def print_kl(options, text: Path, load_model) -> None:
    from ..engine.settings import Settings
    from ..engine.windows import read_text
    from ..measure.kl_divergence import compare_models
    settings = Settings(n_ctx=options.n_ctx or 512, n_chunks=options.n_chunks)
    on = options.device or "auto"
    with load_on(model_path(options.source), on, load_model) as source, load_on(Path(options.output), on, load_model) as model:
        found = compare_models(model, source, source.tokenizer.encode(read_text(text)), settings, sys.stderr)
    print(f"KL divergence: {found.kld:.6f}")
    print(f"PPL: {found.ppl:.4f}, of IN {found.ppl_base:.4f}; same top p: {found.same_top.times(100):.3f} %")
