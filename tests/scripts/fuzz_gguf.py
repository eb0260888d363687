"""Structured mutations of valid GGUF files: each must open, or end in one `GGUFError` of one line, within a second and bounded
memory.

    python tests/scripts/fuzz_gguf.py --n 100000 [--seed 0] [--first 0]

Valid files are built here as lists of fields, so a mutation can aim at a length, count, type or offset as well as at bytes.
Case i of a seed depends on nothing else: `--seed S --first I --n 1` runs exactly that case again.
"""
import argparse
import random
import resource
import struct
import tempfile
import time
from math import prod
from pathlib import Path
from typing import NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Q, GGUFValueType as V

from ggml_py.files.gguf import GGUFError, GGUFFile, StringArray
from ggml_py.quant.formats import format_of
from ggml_py.quant.interleaved import INTERLEAVED

MAX_SECONDS = 1.0
MAX_EXTRA_BYTES = 64 << 20  # above what the process and the files take


# Valid files, as fields in file order.

class Field(NamedTuple):
    """kind: what the bytes are; owner: the key or tensor they belong to, '' for the header."""
    kind: str
    owner: str
    data: bytes


NUMBERS = {"version", "n_tensors", "n_keys", "key length", "type", "element type", "count", "string length", "number",
           "name length", "n_dims", "ne", "tensor type", "offset"}
FORMATS = {V.UINT8: "B", V.INT8: "b", V.UINT16: "H", V.INT16: "h", V.UINT32: "I", V.INT32: "i", V.UINT64: "Q", V.INT64: "q",
           V.FLOAT32: "f", V.FLOAT64: "d", V.BOOL: "?"}


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return u64(len(data)) + data


def key_fields(key: str, type: V, value) -> list[Field]:
    """One metadata entry; a list as value makes an array of that type."""
    fields = [Field("key length", key, string(key)[:8]), Field("key", key, key.encode())]
    if isinstance(value, list):
        fields += [Field("type", key, u32(V.ARRAY)), Field("element type", key, u32(type)), Field("count", key, u64(len(value)))]
    else:
        fields += [Field("type", key, u32(type))]
    for v in value if isinstance(value, list) else [value]:
        if type == V.STRING:
            fields += [Field("string length", key, string(v)[:8]), Field("string", key, string(v)[8:])]
        else:
            fields += [Field("number", key, struct.pack("<" + FORMATS[type], v))]
    return fields


# values and bytes of a block, bytes in front of a row; of ik_llama.cpp's types some of each kind
OWN = {133: ("Q6_0", 32, 26, 0), 139: ("IQ4_K", 256, 144, 0), 145: ("IQ2_KS", 256, 70, 2), 144: ("IQ4_KS", 256, 136, 4),
       158: ("IQ1_KT", 256, 56, 4), 212: ("Q4_K_R4", 256, 144, 0), 344: ("IQ4_KS_R4", 256, 136, 4),
       223: ("IQ4_XS_R8", 256, 136, 0)}
SIZES = {**{int(type): (*sizes, 0) for type, sizes in GGML_QUANT_SIZES.items()},
         **{type: tuple(sizes) for type, (_, *sizes) in OWN.items()}}
TYPE_OF = {**{type.name: int(type) for type in GGML_QUANT_SIZES}, **{name: type for type, (name, *_) in OWN.items()}}


def tensor_n_bytes(type: int, shape: tuple[int, ...]) -> int:
    n_values = 1
    for ne in shape:
        n_values *= ne
    block, size, header = SIZES[type]
    return n_values // shape[0] * header + n_values // block * size


def file_fields(keys: list[tuple], tensors: list[tuple], version: int = 3, alignment: int = 32) -> list[Field]:
    """A valid file. keys: (key, type, value); tensors: (name, type, shape, ne0 first), and bytes, if it is to have certain ones.
    general.alignment is among the keys where it is not 32."""
    fields = [Field("magic", "", b"GGUF"), Field("version", "", u32(version)),
              Field("n_tensors", "", u64(len(tensors))), Field("n_keys", "", u64(len(keys)))]
    for key in keys:
        fields += key_fields(*key)
    offset, data = 0, []
    for i, (name, type, shape, *given) in enumerate(tensors):
        fields += [Field("name length", name, string(name)[:8]), Field("name", name, name.encode()),
                   Field("n_dims", name, u32(len(shape)))]
        fields += [Field("ne", name, u64(ne)) for ne in shape]
        fields += [Field("tensor type", name, u32(type)), Field("offset", name, u64(offset))]
        content = given[0] if given else bytes((i + j) % 251 for j in range(tensor_n_bytes(type, shape)))
        n_padded = -(-len(content) // alignment) * alignment
        data += [Field("data", name, content), Field("padding", name, bytes(n_padded - len(content)))]
        offset += n_padded
    n_header = sum(len(f.data) for f in fields)
    return [*fields, Field("padding", "", bytes(-n_header % alignment if tensors else 0)), *data]


def joined(fields: list[Field]) -> bytes:
    return b"".join(f.data for f in fields)


ALL_KEYS = [
    ("general.architecture", V.STRING, "llama"), ("general.name", V.STRING, "naïve 模型"),
    ("k.u8", V.UINT8, 200), ("k.i8", V.INT8, -3), ("k.u16", V.UINT16, 60000), ("k.i16", V.INT16, -30000),
    ("k.u32", V.UINT32, 4_000_000_000), ("k.i32", V.INT32, -7), ("k.u64", V.UINT64, 2**63 + 1), ("k.i64", V.INT64, -2**62),
    ("k.f32", V.FLOAT32, 0.5), ("k.f64", V.FLOAT64, 1e300), ("k.bool", V.BOOL, True),
    ("a.u8", V.UINT8, [0, 1, 255]), ("a.i8", V.INT8, [-1, 2]), ("a.u16", V.UINT16, [7]), ("a.i16", V.INT16, [-7, 8]),
    ("a.u32", V.UINT32, [3, 1, 4, 1, 5]), ("a.i32", V.INT32, [-1, 2]), ("a.u64", V.UINT64, [2**64 - 1]),
    ("a.i64", V.INT64, [-1, 0]),
    ("a.f32", V.FLOAT32, [0.0, -1.5]), ("a.f64", V.FLOAT64, [2.5]), ("a.bool", V.BOOL, [True, False, True]),
    ("a.str", V.STRING, ["a", "", "β", "long " * 9]), ("a.none", V.UINT32, []),
]
ALL_TENSORS = [("token_embd.weight", Q.F32, (8, 6)), ("blk.0.attn_norm.weight", Q.F16, (7,)), ("blk.0.a", Q.BF16, (3, 2, 2)),
               ("blk.0.b", Q.Q4_0, (64, 3)), ("blk.0.c", Q.Q8_0, (32, 2, 1, 2)), ("blk.0.d", Q.Q6_K, (256, 2)),
               ("blk.0.e", 144, (256, 3)), ("blk.0.f", 145, (512,))]  # IQ4_KS and IQ2_KS, whose rows have headers
VOCABULARY = [("tokenizer.ggml.model", V.STRING, "gpt2"), ("tokenizer.ggml.tokens", V.STRING, [f"token{i}" for i in range(400)]),
              ("tokenizer.ggml.scores", V.FLOAT32, [-0.5 * i for i in range(400)]),
              ("tokenizer.ggml.token_type", V.INT32, [1] * 400)]


def split_keys(no: int, count: int, n_tensors: int) -> list[tuple]:
    return [("split.no", V.UINT16, no), ("split.count", V.UINT16, count), ("split.tensors.count", V.INT32, n_tensors)]


def models() -> list[dict[str, list[Field]]]:
    """Valid models: file name -> fields. The first file of each opens it."""
    aligned = [("general.alignment", V.UINT32, 64), *ALL_KEYS[::2]]
    parts = [ALL_TENSORS[:3], ALL_TENSORS[3:5], ALL_TENSORS[5:]]
    return [
        {"v3.gguf": file_fields(ALL_KEYS, ALL_TENSORS)},
        {"v2.gguf": file_fields(aligned, ALL_TENSORS[::-1], version=2, alignment=64)},
        {"vocabulary.gguf": file_fields(VOCABULARY, [])},
        {f"split-{i + 1:05d}-of-00003.gguf":
             file_fields([*split_keys(i, 3, len(ALL_TENSORS)), *(ALL_KEYS[:8] if i == 0 else [])], tensors)
         for i, tensors in enumerate(parts)},
    ]


# Mutations: each changes a list of fields in place.

def interesting(rng: random.Random, width: int, value: int) -> int:
    """A number for a field of `width` bytes that holds `value`: edges of types, neighbours, multiples, swapped bytes,
    anything."""
    top = 256 ** width
    edges = [0, 1, 2, 4, 5, 8, 9, 12, 13, 31, 32, 33, 63, 64, 65, 255, 256, 65535, 65536,
             2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]
    near = [value + d for d in (-64, -32, -8, -2, -1, 1, 2, 8, 32, 64)]
    near += [value * 2, value // 2, value << 32, value ^ (1 << rng.randrange(8 * width))]
    swapped = int.from_bytes(value.to_bytes(width, "little"), "big")
    return rng.choice([rng.choice(edges), rng.choice(near), rng.choice(near), swapped, rng.randrange(top),
                       rng.randrange(100)]) % top


def pick(rng: random.Random, fields: list[Field], kinds=None) -> int:
    """The index of a field that is not empty; kind first, so that rare kinds (n_dims, count) come as often as common ones."""
    kind = rng.choice(sorted({f.kind for f in fields if f.data and (kinds is None or f.kind in kinds)}))
    return rng.choice([i for i, f in enumerate(fields) if f.data and f.kind == kind])


def set_number(rng, fields):
    i = pick(rng, fields, NUMBERS)
    width = len(fields[i].data)
    value = interesting(rng, width, int.from_bytes(fields[i].data, "little"))
    fields[i] = fields[i]._replace(data=value.to_bytes(width, "little"))


def set_bytes(rng, fields):
    i = pick(rng, fields)
    data = bytearray(fields[i].data)
    for _ in range(rng.choice([1, 1, 2, 8]) if data else 0):
        data[rng.randrange(len(data))] = rng.choice([0, 255, 128, rng.randrange(256)])
    fields[i] = fields[i]._replace(data=bytes(data))


def set_text(rng, fields):
    """Another text of the same or of another length, valid UTF-8 or not, with its length set right."""
    i = pick(rng, fields, {"key length", "string length", "name length"})
    text = rng.choice([b"", b"\xff", b"\xc3\x28", b"\x00", b"\n", b"x" * rng.choice([63, 64, 65, 300, 70_000]), rng.randbytes(9)])
    fields[i:i + 2] = [fields[i]._replace(data=u64(len(text))), Field("text", fields[i].owner, text)]


def copy_over(rng, fields):
    """One field's bytes over another of the same kind: duplicate names, foreign types, overlapping offsets."""
    i = pick(rng, fields)
    j = rng.choice([j for j, f in enumerate(fields) if f.kind == fields[i].kind])
    fields[j] = fields[j]._replace(data=fields[i].data)
    if fields[i].kind in ("key", "name"):
        fields[j - 1] = fields[j - 1]._replace(data=fields[i - 1].data)


def duplicate(rng, fields):
    """A field, a few fields or all fields of a key or tensor once more; half of the time counted."""
    i = rng.randrange(len(fields))
    j = i + rng.choice([1, 2, 5])
    run = [f for f in fields if f.owner and f.owner == fields[i].owner and f.kind not in ("data", "padding")]
    if run and rng.random() < 0.5:
        count = "n_keys" if run[0].kind == "key length" else "n_tensors"
        j = i = next(k for k, f in enumerate(fields) if f.owner == run[0].owner)
        for k, f in enumerate(fields):
            if f.kind == count and len(f.data) == 8 and rng.random() < 0.8:
                fields[k] = f._replace(data=u64((int.from_bytes(f.data, "little") + 1) % 2**64))
    else:
        run = fields[i:j]
    fields[j:j] = run


def delete(rng, fields):
    i = rng.randrange(len(fields))
    del fields[i:i + rng.choice([1, 1, 2, 5])]


def swap(rng, fields):
    i, j = rng.randrange(len(fields)), rng.randrange(len(fields))
    fields[i], fields[j] = fields[j], fields[i]


def insert(rng, fields):
    fields.insert(rng.randrange(len(fields) + 1), Field("noise", "", rng.randbytes(rng.choice([1, 4, 8, 100]))))


def truncate(rng, fields):
    i = rng.randrange(len(fields))
    fields[i] = fields[i]._replace(data=fields[i].data[:rng.randrange(len(fields[i].data) + 1)])
    del fields[i + 1:]


MUTATIONS = [set_number] * 6 + [set_bytes] * 3 + [set_text, copy_over, copy_over, duplicate, delete, swap, insert, truncate]


def mutated(rng: random.Random, model: dict[str, list[Field]]) -> tuple[str, dict[str, bytes]]:
    """The name of the file to open and the files of one case: one to three mutations of one file,
    sometimes files missing or swapped as well."""
    model = dict(model)
    name = rng.choice(list(model))
    fields = list(model[name])
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if len(fields) > 30:  # what a truncation leaves may hold nothing to aim at
            rng.choice(MUTATIONS)(rng, fields)
    model[name] = fields
    opened = next(iter(model))
    files = {name: joined(fields) for name, fields in model.items()}
    if len(files) > 1 and rng.random() < 0.1:
        a, b = rng.sample(sorted(files), 2)
        rng.choice([lambda: files.pop(b), lambda: files.update({a: files[b], b: files[a]}),
                    lambda: files.update({a: files[b]})])()
        opened = rng.choice([a, opened])
    return opened, files


# Running cases.

def expected_bytes(tensor) -> int:
    """Of its type by its name; by its row in the table where a mutation made it one of ik_llama.cpp's that OWN does not have."""
    name, shape = tensor.type.name, tensor.shape
    if name in TYPE_OF:
        return tensor_n_bytes(TYPE_OF[name], shape)
    return prod(shape[1:]) * (INTERLEAVED.get(name) or format_of(name)).row_bytes(shape[0])


def exercise(path: Path) -> None:
    """Opens the file and reads everything in it."""
    with GGUFFile.open(path) as file:
        for key, value in file.metadata.items():
            n = len(list(value)) if isinstance(value, StringArray) else getattr(value, "size", None)
            assert n is None or n == len(value), f"{key}: {n} values, len {len(value)}"
            repr(value), file.metadata_types[key]
        for kind in "u32", "str", "arr[str]", "arr[int]":
            for key in file.metadata:
                try:
                    file.get(key, kind)
                    file.get_key_or_arr(key, 3)
                except GGUFError as e:
                    check_message(e, path)
        for name, tensor in file.tensors.items():
            data = file.data(name)
            assert data.nbytes == tensor.n_bytes == expected_bytes(tensor), name
            assert not data.flags.writeable, name
            data.max()  # every byte is there


def check_message(error: GGUFError, path: Path) -> None:
    text = str(error)
    assert text.startswith(str(path.parent)) and "\n" not in text and len(text) < 2000 and text.isprintable(), text


def run_case(seed: int, i: int, folder: Path) -> tuple[bool, float]:
    """Writes and reads case i. Returns whether the file opened, and seconds. Any exception is a failure of the reader."""
    rng = random.Random(f"{seed}:{i}")
    opened, files = mutated(rng, rng.choice(_MODELS))
    for old in folder.iterdir():
        old.unlink()  # never written over: a mapping of an older case may still be alive
    for name, data in files.items():
        (folder / name).write_bytes(data)
    start = time.perf_counter()
    try:
        exercise(folder / opened)
        ok = True
    except GGUFError as e:
        check_message(e, folder / opened)
        ok = False
    return ok, time.perf_counter() - start


_MODELS = models()


def fuzz(n: int, seed: int = 0, first: int = 0) -> dict:
    """Runs cases first .. first + n - 1 under a limit on the address space. Returns counts,
    slowest case and growth of the peak resident set."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for model in _MODELS:  # unmutated, all open; it also warms up everything that the limit shall not count
            for name, fields in model.items():
                (folder / name).write_bytes(joined(fields))
            exercise(folder / next(iter(model)))
        n_mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        old_limit = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (n_mapped + MAX_EXTRA_BYTES, old_limit[1]))
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        n_opened, slowest = 0, (0.0, -1)
        try:
            for i in range(first, first + n):
                try:
                    ok, seconds = run_case(seed, i, folder)
                    if seconds >= MAX_SECONDS:  # a busy machine, or a slow answer: the second try tells
                        ok, seconds = run_case(seed, i, folder)
                    assert seconds < MAX_SECONDS, f"{seconds:.1f} s, allowed {MAX_SECONDS}"
                except Exception as e:
                    e.add_note(f"replay: --seed {seed} --first {i} --n 1")
                    raise
                n_opened += ok
                slowest = max(slowest, (seconds, i))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, old_limit)
        growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss) * 1024
    return dict(n=n, n_opened=n_opened, n_refused=n - n_opened, slowest_s=slowest[0], slowest_case=slowest[1],
                peak_rss_growth=growth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    a = parser.parse_args()
    start = time.perf_counter()
    r = fuzz(a.n, a.seed, a.first)
    print(f"{r['n']} mutations: {r['n_opened']} opened, {r['n_refused']} refused, "
          f"slowest {1000 * r['slowest_s']:.1f} ms (case {r['slowest_case']}), "
          f"peak memory grew by {r['peak_rss_growth'] / 2**20:.1f} MiB, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
