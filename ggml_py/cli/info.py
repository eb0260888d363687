"""ggml-py info: metadata, tensors by type, and the memory that weights and KV cache take."""
import math
from collections import Counter

from ..base.defaults import N_UBATCH
from ..base.errors import UserError
from .loading import OF_A_HUB, devices_of, model_path, model_paths, placement_of, typed
from .options import cache_types, context_size, model, placement
from .parser import refuse
from .tables import new_table, print_tables, size
from .values import device, listed

SHOWN = 6  # elements of an array
MAX_CHARACTERS = 100  # of a string


def options(p) -> None:
    p.add_argument("path", nargs="?", metavar="MODEL", help="as -m")
    model(p)
    context_size(p, "positions that the KV cache is reckoned for", 4096)
    cache_types(p)
    p.add_argument("--device", "-dev", dest="device", type=listed(device), metavar="DEVICE[,DEVICE]",
                   help="what each would hold by the options of a placement; none need be here")
    placement(p)


def run(options, load_model) -> None:
    """Prints three tables, and the last of them before it complains of a model that this version cannot run; a fourth of a
    placement."""
    from ..files.gguf import GGUFFile
    if options.path is not None:
        for name, value in ("-m", options.model), ("-hf", options.hf):
            if name in options.given.values():
                raise UserError(f"MODEL: got {options.path} and {name} {value}, one is enough")
        refuse(options, OF_A_HUB, "is of -hf, which is not given")
    path = model_path(options.path) if options.path is not None else model_paths(options)[0]
    with GGUFFile.open(path) as file:
        parts, trouble = memory_bytes(file, options.n_ctx, options.type_k, options.type_v)
        tables = [metadata_table(file), tensor_table(file), memory_table(file, parts)]
        if asked := placement_of(options, devices_of(options)):
            tables.append(placement_table(file, asked, options))
        print_tables(*tables)
    if trouble:
        raise trouble


def memory_bytes(file, n_ctx: int, type_k: str, type_v: str) -> tuple[dict[str, int] | None, UserError | None]:
    """Bytes of what a context of one sequence remembers, as it would take them, or why this version cannot run the model. Neither
    of a file without tensors, a vocabulary."""
    from ..models import model_class
    from ..base.placement import HOST, PlacementOptions
    if not file.tensors:
        return None, None
    try:
        model = model_class(file)(file, PlacementOptions((HOST,)))
        taken, full = (model.cache_bytes(n_ctx, type_k, type_v, n_ubatch) for n_ubatch in (N_UBATCH, n_ctx))
        saved = f" (windows save {size(full - taken)})" if full > taken else ""
        parts = {f"KV cache, {n_ctx} positions, {type_k} and {type_v}{saved}": taken}
        if n_bytes := model.state_bytes():
            parts["states of recurrent layers"] = n_bytes
        return parts, None
    except UserError as error:
        return None, error


def shorten(text: str) -> str:
    """A string on one line, quoted, cut with its length named."""
    shown = repr(text[:MAX_CHARACTERS])
    return shown if len(text) <= MAX_CHARACTERS else f"{shown}... {len(text)} characters"


def show_value(value) -> str:
    if isinstance(value, str):
        return shorten(value)
    if isinstance(value, (bool, int, float)):
        return str(value)
    items = [shorten(v) if isinstance(v, str) else str(v) for v in value[:SHOWN]]
    return f"{len(value)} values: {', '.join(items)}{', ...' if len(value) > SHOWN else ''}"


def placement_table(file, asked, options):
    """What each device holds: weights as tiles, and a context of one sequence."""
    from rich.text import Text
    from ..models import model_class
    model = model_class(file)(file, asked)
    model.check_tensors(nextn=False)
    weights = model.weight_bytes()
    context = model.context_bytes(options.n_ctx, 1, options.type_k, options.type_v)
    table = new_table("device", title=Text(typed(asked) or "one device"),
                      right=("weights", f"{options.n_ctx} positions", "together"))
    for name in model.placement.devices:
        if weights[name] + context[name]:
            table.add_row(name, *(f"{n:,}" for n in (weights[name], context[name], weights[name] + context[name])))
    return table


def metadata_table(file):
    """Strings of the file are shown as they are, never as markup."""
    from rich.text import Text
    table = new_table("key", "type", "value", title=f"GGUF v{file.version}: {len(file.metadata)} keys")
    for key, value in file.metadata.items():
        scalar = isinstance(value, (bool, int, float, str))
        kind = file.metadata_types[key].name.lower()
        table.add_row(Text(key), kind if scalar else Text(f"array of {kind}"), Text(show_value(value)))
    return table


def tensor_table(file):
    counts: Counter[str] = Counter()
    n_bytes: Counter[str] = Counter()
    n_values: Counter[str] = Counter()
    for tensor in file.tensors.values():
        name = f"{tensor.type.name}, read as {tensor.type.plain}" if tensor.type.plain else tensor.type.name
        counts[name] += 1
        n_bytes[name] += tensor.n_bytes
        n_values[name] += math.prod(tensor.shape)
    table = new_table("type", title=f"{len(file.tensors)} tensors", right=("tensors", "values", "bytes", "bits per value"))
    for name, count in counts.most_common():
        table.add_row(name, str(count), f"{n_values[name]:,}", size(n_bytes[name]), f"{8 * n_bytes[name] / n_values[name]:.4g}")
    table.add_section()
    table.add_row("all", str(len(file.tensors)), f"{n_values.total():,}", size(n_bytes.total()))
    return table


def memory_table(file, parts: dict[str, int] | None):
    weights = sum(tensor.n_bytes for tensor in file.tensors.values())
    table = new_table("memory", right=("bytes",))
    table.add_row("weights, as in the file", size(weights))
    if parts is None:
        why = "unknown: this version cannot run the model" if file.tensors else "none: the file has no tensors"
        table.add_row("KV cache", why)
    else:
        for name, n_bytes in parts.items():
            table.add_row(name, size(n_bytes))
        table.add_row("together", size(weights + sum(parts.values())))
    return table
