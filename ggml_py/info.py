"""What `ggml-py info` prints: metadata, tensors by type, and the memory that weights and KV cache take."""
import re
from collections import Counter

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .gguf_file import GGUFError, GGUFFile

SHOWN = 6  # elements of an array
MAX_CHARACTERS = 120  # of a string


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


def kv_cache_bytes(file: GGUFFile, n_ctx: int, type_k: str, type_v: str) -> int:
    """Bytes of K and V for n_ctx positions: per layer that is computed, n_head_kv rows of key_length and of value_length values in their types; latent
    attention's values lie in K."""
    arch = file.get("general.architecture", "str")
    n_block, n_nextn = file.get(f"{arch}.block_count", "u32"), file.get(f"{arch}.nextn_predict_layers", "u32", 0)
    n_head = file.get_key_or_arr(f"{arch}.attention.head_count", n_block)
    n_head_kv = file.get_key_or_arr(f"{arch}.attention.head_count_kv", n_block, default=n_head)
    n_embd = file.get(f"{arch}.embedding_length", "u32")
    total = 0
    latent = file.get(f"{arch}.attention.key_length_mla", "u32", 0) > 0
    for type_name, length_key in [(type_k, "key_length"), (type_v, "value_length")][:1 if latent else 2]:
        block_size, type_size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name.upper()]]
        for heads, heads_kv in list(zip(n_head, n_head_kv))[:max(n_block - n_nextn, 0)]:
            length = file.get(f"{arch}.attention.{length_key}", "u32", n_embd // heads if heads else 0)
            total += n_ctx * -(-heads_kv * length // block_size) * type_size
    return total


def size(n_bytes: int) -> str:
    return f"{n_bytes:,} ({n_bytes / 1e6:,.1f} MB)"


def print_info(file: GGUFFile, n_ctx: int, type_k: str, type_v: str, out):
    """Write three tables to `out`; strings of the file are shown as they are, never as markup."""
    console = Console(file=out, width=None if out.isatty() else 200, highlight=False)
    with console.capture() as capture:
        print_tables(file, n_ctx, type_k, type_v, console)
    out.write(re.sub(r" +$", "", capture.get(), flags=re.MULTILINE))


def print_tables(file: GGUFFile, n_ctx: int, type_k: str, type_v: str, console: Console):

    table = Table("key", "type", "value", title=f"GGUF v{file.version}: {len(file.metadata)} keys", box=box.SIMPLE, title_justify="left")
    for key, value in file.metadata.items():
        scalar = isinstance(value, (bool, int, float, str))
        kind = file.metadata_types[key].name.lower()
        table.add_row(Text(key), kind if scalar else Text(f"array of {kind}"), Text(show_value(value)))
    console.print(table)

    counts, n_bytes, n_values = Counter(), Counter(), Counter()
    for tensor in file.tensors.values():
        counts[tensor.type.name] += 1
        n_bytes[tensor.type.name] += tensor.n_bytes
        n_values[tensor.type.name] += int(np.prod(tensor.shape, dtype=object))
    table = Table("type", box=box.SIMPLE, title=f"{len(file.tensors)} tensors", title_justify="left")
    for column in "tensors", "values", "bytes", "bits per value":
        table.add_column(column, justify="right")
    for name, count in counts.most_common():
        table.add_row(name, str(count), f"{n_values[name]:,}", size(n_bytes[name]), f"{8 * n_bytes[name] / n_values[name]:.4g}")
    table.add_section()
    table.add_row("all", str(len(file.tensors)), f"{n_values.total():,}", size(n_bytes.total()))
    console.print(table)

    table = Table("memory", box=box.SIMPLE, title_justify="left")
    table.add_column("bytes", justify="right")
    table.add_row("weights, as in the file", size(n_bytes.total()))
    try:
        kv = kv_cache_bytes(file, n_ctx, type_k, type_v)
        table.add_row(f"KV cache, {n_ctx} positions, {type_k} and {type_v}", size(kv))
        table.add_row("together", size(n_bytes.total() + kv))
    except GGUFError:  # a vocabulary, or an architecture without attention
        table.add_row("KV cache", "the file has no attention keys")
    console.print(table)
