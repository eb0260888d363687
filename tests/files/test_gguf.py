"""The GGUF reader: what it reads equals what gguf writes, and every bad file ends in one clear error."""
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Q, GGUFValueType as V
from hypothesis import HealthCheck, given, settings, strategies as st

import fuzz_gguf
import ggml_py.files.gguf
from fuzz_gguf import (ALL_KEYS, ALL_TENSORS, FORMATS, OWN, TYPE_OF, Field, file_fields, joined, models, split_keys, string, u32,
                       u64)
from ggml_py.files.gguf import GGUFError, GGUFFile, StringArray
from places import REFERENCE, environment

VOCABULARIES = REFERENCE / "vocab"


def write(path: Path, data) -> Path:
    path.write_bytes(joined(data) if isinstance(data, list) else data)
    return path


def plain(value):
    return value.tolist() if isinstance(value, np.ndarray) else list(value) if isinstance(value, StringArray) else value


def changed(fields: list[Field], kind: str, owner: str, data: bytes, nth: int = 0) -> list[Field]:
    """The fields with the bytes of one of them, found by kind and owner, replaced."""
    i = [i for i, f in enumerate(fields) if (f.kind, f.owner) == (kind, owner)][nth]
    return [*fields[:i], fields[i]._replace(data=data), *fields[i + 1:]]


# What is read.

@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_all_value_types_and_tensors(tmp_path, version, alignment):
    keys = [*ALL_KEYS, ("general.alignment", V.UINT32, alignment)]
    path = write(tmp_path / "m.gguf", file_fields(keys, ALL_TENSORS, version, alignment))
    with GGUFFile.open(path) as file:
        assert (file.version, file.alignment, file.path, file.paths) == (version, alignment, path, (path,))
        assert {k: plain(v) for k, v in file.metadata.items()} == {key: value for key, _, value in keys}
        assert file.metadata_types == {key: type for key, type, _ in keys}
        assert file.metadata["a.f32"].dtype == np.float32 and file.metadata["a.bool"].dtype == bool
        assert [(t.name, TYPE_OF[t.type.name], t.shape) for t in file.tensors.values()] == ALL_TENSORS
        for i, (name, tensor) in enumerate(file.tensors.items()):
            data = file.data(name)
            assert tensor.offset % alignment == 0 and tensor.part == 0 and not data.flags.writeable
            assert data.dtype == np.uint8 and data.tolist() == [(i + j) % 251 for j in range(tensor.n_bytes)]


@pytest.mark.parametrize("type", GGML_QUANT_SIZES, ids=lambda t: t.name)
def test_every_tensor_type(tmp_path, type):
    tensors = [("a", type, (GGML_QUANT_SIZES[type][0] * 2, 3)), ("b", type, (GGML_QUANT_SIZES[type][0],))]
    with GGUFFile.open(write(tmp_path / "m.gguf", file_fields([], tensors))) as file:
        assert file.tensors["a"].n_bytes == 6 * GGML_QUANT_SIZES[type][1] == file.data("a").nbytes
        assert file.data("b")[0] == 1


@pytest.mark.parametrize("type", OWN, ids=lambda t: OWN[t][0])
def test_types_of_ik_llama_cpp(tmp_path, type):
    """Rows may have a header. Whole blocks are needed, and bytes for the headers."""
    name, block, size, header = OWN[type]
    group = int(name.partition("_R")[2] or 1)
    fields = file_fields([], [("a", type, (2 * block, 3 * group)), ("b", type, (block, group))])
    with GGUFFile.open(path := write(tmp_path / "m.gguf", fields)) as file:
        assert file.tensors["a"].type.name == name and file.tensors["a"].type.read_as == name.partition("_R")[0]
        assert file.tensors["a"].n_bytes == 3 * group * (header + 2 * size) == file.data("a").nbytes
        assert file.tensors["b"].n_bytes == group * (header + size) and file.data("b")[0] == 1
    path.write_bytes(path.read_bytes()[:-(-group * (header + size) % 32) - 1])  # with the last byte of the tensor
    with pytest.raises(GGUFError, match=rf"'b' \({name}, shape .*\) takes {group * (header + size)} bytes from offset .*, but"):
        GGUFFile.open(path)
    with pytest.raises(GGUFError, match=f"tensor 'a': {name} rows must be a multiple of {block} values, got {block + 1}$"):
        GGUFFile.open(write(path, file_fields([], [("a", type, (block + 1, 3), b"")])))
    for shape, n_rows in (((block, group + 1, 2), group + 1), ((block,), 1)) if group > 1 else ():
        with pytest.raises(GGUFError, match=f"tensor 'a': {name} matrices must have a multiple of {group} rows, got {n_rows}$"):
            GGUFFile.open(write(path, file_fields([], [("a", type, shape, b"")])))


@pytest.mark.parametrize("type, name", [(36, "I2_S of BitNet"), (151, "Q8_KV of caches"), (398, "Q8_KV_R8 of caches"),
                                        (97, "which holds activations"), (399, "Q8_K_R8, which is made in memory")])
def test_types_that_are_refused_by_name(tmp_path, type, name):
    with pytest.raises(GGUFError, match=rf"tensor 'a' has type {type}, {name}, allowed are 0 \(F32\), .*, 144 \(IQ4_KS\), "):
        GGUFFile.open(write(tmp_path / "m.gguf", changed(file_fields([], [("a", Q.F32, (8,))]), "tensor type", "a", u32(type))))


def test_text_that_is_not_utf8_stays_distinct(tmp_path):
    keys = [("one", V.STRING, b"a\xff"), ("many", V.STRING, [b"\xff", b"\xfe", b"\xc3\x28"])]
    file = GGUFFile.open(write(tmp_path / "m.gguf", file_fields(keys, [])))
    assert file.metadata["one"] == r"a\xff" and list(file.metadata["many"]) == [r"\xff", r"\xfe", r"\xc3("]


def test_string_array_is_a_sequence(tmp_path):
    file = GGUFFile.open(write(tmp_path / "m.gguf", file_fields([("s", V.STRING, ["a", "", "ß"])], [])))
    strings = file.metadata["s"]
    assert (len(strings), strings[2], strings[-3], strings[1:], "ß" in strings,
            strings.index("")) == (3, "ß", "a", ["", "ß"], True, 1)
    assert file.metadata["s"] is strings  # decoded once
    with pytest.raises(IndexError):
        strings[3]


def test_gaps_between_tensors_and_bytes_after_them_are_allowed(tmp_path):
    fields = changed(file_fields([], [("a", Q.I8, (4,)), ("b", Q.I8, (4,))]), "offset", "b", u64(64))
    with GGUFFile.open(write(tmp_path / "m.gguf", joined(fields) + bytes(100))) as file:
        assert file.tensors["b"].offset == file.tensors["a"].offset + 64


def test_views_outlive_close(tmp_path):
    with GGUFFile.open(write(tmp_path / "m.gguf", file_fields(ALL_KEYS, ALL_TENSORS))) as file:
        data, array, strings = file.data("blk.0.a"), file.metadata["a.f32"], file.metadata["a.str"]
    assert data[5] == 7 and array.tolist() == [0.0, -1.5] and strings[2] == "β"
    for access in lambda: file.data("blk.0.a"), lambda: file.get("k.u32", "u32"), lambda: file.metadata["a.str"]:
        with pytest.raises(GGUFError, match="m.gguf: .* the file is closed"):
            access()


def test_unknown_tensor_name(tmp_path):
    with pytest.raises(GGUFError, match="m.gguf: tensor 'x' is not one of the file's 8 tensors$"):
        GGUFFile.open(write(tmp_path / "m.gguf", file_fields([], ALL_TENSORS))).data("x")


# Against gguf.

@st.composite
def metadata(draw):
    """A dict of key -> (type, value), lists for arrays."""
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    floats = dict(allow_nan=False)
    values = {V.STRING: text, V.BOOL: st.booleans(), V.FLOAT32: st.floats(width=32, **floats), V.FLOAT64: st.floats(**floats)}
    for type, code in FORMATS.items():
        if type not in values:
            bits = 8 * struct.calcsize(code)
            values[type] = st.integers(0, 2**bits - 1) if code.isupper() else st.integers(-2**(bits - 1), 2**(bits - 1) - 1)
    typed = st.sampled_from(sorted(values)).flatmap(
        lambda type: st.tuples(st.just(type), st.one_of(values[type], st.lists(values[type], min_size=1, max_size=9))))
    return draw(st.dictionaries(text.filter(lambda k: len(k) > 0 and not k.startswith("general.")), typed, max_size=8))


tensor_list = st.lists(st.tuples(st.sampled_from(list(GGML_QUANT_SIZES)), st.integers(1, 3),
                                 st.lists(st.integers(1, 3), max_size=3)), max_size=5)


def gguf_write(path: Path, keys: dict, tensors: list, alignment: int = 32, **split) -> dict[str, bytes]:
    """Writes with gguf's own writer; returns name -> bytes of each tensor."""
    writer = gguf.GGUFWriter(path, "llama", **split)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    for key, (type, value) in keys.items():
        if isinstance(value, list):
            writer.add_key_value(key, value, V.ARRAY, sub_type=type)
        else:
            writer.add_key_value(key, value, type)
    rng, data = np.random.default_rng(0), {}
    for i, (type, n_blocks, rest) in enumerate(tensors):
        array = rng.integers(0, 256, (*reversed(rest), n_blocks * GGML_QUANT_SIZES[type][1]), np.uint8)
        data[f"t{i}"] = array.tobytes()
        writer.add_tensor(f"t{i}", array, raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return data


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=metadata(), tensors=tensor_list, alignment=st.sampled_from([8, 32, 128]))
def test_reads_what_gguf_writes_as_gguf_reads_it(tmp_path, keys, tensors, alignment):
    path = tmp_path / "m.gguf"
    path.unlink(missing_ok=True)
    data = gguf_write(path, keys, tensors, alignment)
    reference = gguf.GGUFReader(path)
    with GGUFFile.open(path) as file:
        assert file.alignment == alignment == reference.alignment
        assert {k: plain(v) for k, v in file.metadata.items() if k in keys} == {k: v for k, (_, v) in keys.items()}
        assert {k: t for k, t in file.metadata_types.items() if k in keys} == {k: t for k, (t, _) in keys.items()}
        fields = {k: f for k, f in reference.fields.items() if not k.startswith("GGUF.")}
        assert {k: plain(v) for k, v in file.metadata.items()} == {k: f.contents() for k, f in fields.items()}
        assert {name: file.data(name).tobytes() for name in file.tensors} == data
        assert [(t.name, list(t.shape), Q[t.type.name], t.offset, t.n_bytes) for t in file.tensors.values()] == [
            (t.name, t.shape.tolist(), t.tensor_type, t.data_offset, t.n_bytes) for t in reference.tensors]


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm"])
def test_real_vocabularies_as_gguf_reads_them(name):
    path = VOCABULARIES / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip(f"needs the reference vocabulary {path.name}")
    fields = gguf.GGUFReader(path).fields
    with GGUFFile.open(path) as file:
        assert set(file.metadata) == {k for k in fields if not k.startswith("GGUF.")}
        for key, value in file.metadata.items():
            if isinstance(value, (StringArray, np.ndarray)):  # contents() of a whole vocabulary is slow
                n = len(value)
                assert n == len(fields[key].data)
                assert all(value[i] == fields[key].contents(i) for i in (0, 1, n // 2, n - 1))
            else:
                assert value == fields[key].contents()


# Keys of a given kind.

@pytest.fixture
def keyed(tmp_path):
    return GGUFFile.open(write(tmp_path / "m.gguf", file_fields([*ALL_KEYS, ("a.big", V.UINT32, [2 ** 31])], [])))


def test_get_returns_the_value_of_the_right_kind(keyed):
    assert keyed.get("k.u32", "u32") == 4_000_000_000 and keyed.get("k.bool", "bool") is True
    assert keyed.get("a.str", "arr[str]")[0] == "a" and keyed.get("a.f32", "arr[i32]|arr[f32]")[1] == -1.5
    assert [keyed.get(key, "arr[int]").tolist() for key in ("a.bool", "a.i32")] == [[True, False, True], [-1, 2]]
    assert keyed.get("absent", "u32", 5) == 5 and keyed.get("absent", "str", None) is None


@pytest.mark.parametrize("key, kind, message", [
    ("k.i32", "u32", "key 'k.i32' is of type i32, must be of type u32$"),
    ("k.u32", "f32", "key 'k.u32' is of type u32, must be of type f32$"),
    ("a.u32", "u32", r"key 'a.u32' is of type arr\[u32\], must be of type u32$"),
    ("a.u64", "u32|arr[int]",
     r"key 'a.u64' is of type arr\[u64\], must be of type u32 or arr\[bool\] or arr\[u32\] or arr\[i32\]$"),
    ("k.u32", "arr[u32]", r"key 'k.u32' is of type u32, must be of type arr\[u32\]$"),
    ("absent", "str", "key 'absent' is missing, must be there with a value of type str$"),
])
def test_get_refuses_other_kinds(keyed, key, kind, message):
    with pytest.raises(GGUFError, match=f"m.gguf: {message}"):
        keyed.get(key, kind)
    if key != "absent":
        with pytest.raises(GGUFError, match=message):  # a default stands for a missing key only
            keyed.get(key, kind, 0)


def test_get_key_or_arr(keyed):
    assert keyed.get_key_or_arr("k.u32", 3) == [4_000_000_000] * 3
    assert keyed.get_key_or_arr("a.u32", 5) == [3, 1, 4, 1, 5]
    flags = keyed.get_key_or_arr("a.bool", 3)
    assert flags == [1, 0, 1] and type(flags[0]) is int
    assert keyed.get_key_or_arr("a.i32", 2, "i32") == [-1, 2]
    assert keyed.get_key_or_arr("a.f32", 2, "f32") == [0.0, -1.5]
    assert keyed.get_key_or_arr("absent", 2, default=8) == [8, 8] and keyed.get_key_or_arr("absent", 2, default=[4, 2]) == [4, 2]


@pytest.mark.parametrize("key, n, kind, message", [
    ("a.u32", 4, "u32", "key 'a.u32' has 5 values, must have 4, or be a single value for all$"),
    ("k.i32", 2, "u32", r"key 'k.i32' is of type i32, must be of type u32 or arr\[bool\] or arr\[u32\] or arr\[i32\]$"),
    ("a.i32", 2, "u32", "key 'a.i32' has -1 as value 0, must have 0 to 4294967295$"),
    ("a.i32", 2, "f32", r"is of type arr\[i32\], must be of type f32 or arr\[f32\]$"),
    ("a.big", 1, "i32", "key 'a.big' has 2147483648 as value 0, must have -2147483648 to 2147483647$"),
    ("absent", 2, "u32", "is missing"),
])
def test_get_key_or_arr_refuses(keyed, key, n, kind, message):
    with pytest.raises(GGUFError, match=message):
        keyed.get_key_or_arr(key, n, kind)


# Split models.

def write_split(folder: Path) -> list[Path]:
    return [write(folder / name, fields) for name, fields in models()[-1].items()]


def test_split_model(tmp_path):
    paths = write_split(tmp_path)
    with GGUFFile.open(paths[0]) as file:
        assert file.paths == tuple(paths) and file.get("general.architecture", "str") == "llama"
        assert [(t.name, TYPE_OF[t.type.name], t.shape) for t in file.tensors.values()] == ALL_TENSORS
        assert [t.part for t in file.tensors.values()] == [0, 0, 0, 1, 1, 2, 2, 2]
        for i, name in enumerate(file.tensors):
            first = [0, 1, 2, 0, 1, 0, 1, 2][i]  # data counts on from a tensor's place in its part
            assert file.data(name)[:3].tolist() == [first, first + 1, first + 2]


def test_split_model_as_gguf_writes_it(tmp_path):
    tensors = [(Q.F32, 2, [3]), (Q.Q8_0, 1, [2, 2]), (Q.Q4_K, 1, []), (Q.F16, 3, [1]), (Q.I8, 2, [])]
    data = gguf_write(tmp_path / "m.gguf", {"k": (V.STRING, "v")}, tensors, split_max_tensors=2)
    with GGUFFile.open(tmp_path / "m-00001-of-00003.gguf") as file:
        assert {name: file.data(name).tobytes() for name in file.tensors} == data and file.metadata["k"] == "v"


def test_a_split_of_one_part_is_a_plain_file(tmp_path):
    assert len(GGUFFile.open(write(tmp_path / "m.gguf", file_fields(split_keys(0, 1, 8), ALL_TENSORS))).tensors) == 8


def test_a_later_part_names_the_first(tmp_path):
    paths = write_split(tmp_path)
    with pytest.raises(GGUFError,
                       match="split-00002-of-00003.gguf: this file is part 2 of 3, must be the first part: "
                             "open .*split-00001-of-00003.gguf$"):
        GGUFFile.open(paths[1])


SPLIT_DAMAGE = {
    "missing": (lambda p: p[2].unlink(), "split-00003-of-00003.gguf: cannot be opened: No such file"),
    "other name": (lambda p: p[0].rename(p[0].with_name("m.gguf")),
                   "m.gguf: this file is part 1 of 3, must be named NAME-00001-of-00003.gguf$"),
    "other count in name": (lambda p: p[0].rename(p[0].with_name("m-00001-of-00004.gguf")),
                            "this file is part 1 of 3, must be named NAME-00001-of-00003.gguf$"),
    "other part": (lambda p: p[2].replace(p[1]), "split-00002-of-00003.gguf: key 'split.no' is 2, must be 1"),
    "other model": (lambda p: write(p[1], file_fields(split_keys(1, 4, 8), [])),
                    "split-00002-of-00003.gguf: key 'split.count' is 4, must be 3"),
    "no keys": (lambda p: write(p[1], file_fields([], [])),
                "split-00002-of-00003.gguf: key 'split.no' is missing, must be there with a value of type u16$"),
    "duplicate": (lambda p: write(p[1], file_fields(split_keys(1, 3, 8), ALL_TENSORS[:1])),
                  "tensor 'token_embd.weight' is in part 1, too, must be in one part only$"),
    "too few": (lambda p: write(p[2], file_fields(split_keys(2, 3, 8), ALL_TENSORS[-1:])),
                "the 3 parts have 6 tensors, must have 8, the value of key 'split.tensors.count'$"),
    "no beyond count": (lambda p: write(p[0], file_fields(split_keys(7, 3, 8), [])),
                        "key 'split.no' is 7, must be less than 3, the value of key 'split.count'$"),
    "count of another type": (lambda p: write(p[0], file_fields([("split.count", V.UINT32, 3)], [])),
                              "key 'split.count' is of type u32, must be of type u16$"),
    "broken part": (lambda p: p[1].write_bytes(p[1].read_bytes()[:-100]),
                    "split-00002-of-00003.gguf: tensor 'blk.0.c'.*, but the file ends at"),
}


@pytest.mark.parametrize("damage", SPLIT_DAMAGE)
def test_damaged_splits(tmp_path, damage):
    hurt, message = SPLIT_DAMAGE[damage]
    hurt(write_split(tmp_path))
    with pytest.raises(GGUFError, match=message):
        GGUFFile.open(next(p for p in sorted(tmp_path.iterdir()) if "00002" not in p.name and "00003-of-00003" not in p.name))


# Bad files.

TWO = file_fields([("k", V.UINT32, 1), ("l", V.STRING, ["a", "b"]), ("b", V.BOOL, True), ("i", V.INT64, [1, 2])],
                  [("t", Q.Q8_0, (64, 2)), ("u", Q.F32, (8,))])
BAD = {
    "empty": (b"", "the file has 0 bytes, must have at least 24, the shortest GGUF header$"),
    "short": (b"GGUF\3\0\0\0", "the file has 8 bytes, must have at least 24, the shortest GGUF header$"),
    "magic": (changed(TWO, "magic", "", b"GGML"), "this is not a GGUF file: it starts with b'GGML', must start with b'GGUF'$"),
    "version 1": (changed(TWO, "version", "", u32(1)), "the file is of GGUF version 1, must be of version 2 or 3$"),
    "version 0": (changed(TWO, "version", "", u32(0)), "the file is of GGUF version 0, must be of version 2 or 3$"),
    "version 4": (changed(TWO, "version", "", u32(4)), "the file is of GGUF version 4, must be of version 2 or 3$"),
    "big-endian": (changed(TWO, "version", "", b"\0\0\0\3"),
                   r"this is a big-endian GGUF file \(its version reads 0x03000000\), must be a little-endian one$"),
    "n_keys": (changed(TWO, "n_keys", "", u64(2**64 - 1)),
               "there should be 18446744073709551615 keys from offset 24, but the remaining .* bytes of the file hold at most"),
    "n_tensors": (changed(TWO, "n_tensors", "", u64(2**40)),
                  "there should be 1099511627776 tensors from offset 24, but the remaining .* hold at most"),
    "more keys than there are": (changed(TWO, "n_keys", "", u64(5)),
                                 "name of tensor 0 has 562949953421312 bytes, must have 1 to 64"),
    "many keys": ([*TWO[:3], Field("", "", u64(20000)), Field("", "", bytes(400000))],
                  "the file has 20000 keys, allowed are 16384$"),
    "many tensors": ([*TWO[:2], Field("", "", u64(70000) + u64(0) + bytes(3000000))],
                     "the file has 70000 tensors, allowed are 65536$"),
    "key length": (changed(TWO, "key length", "k", u64(2**63)), "key 0 has 9223372036854775808 bytes, must have 1 to 65535"),
    "key past the end": (changed(TWO, "key length", "k", u64(60_000)),
                         "key 0 takes 60000 bytes from offset 32, but the file ends at"),
    "empty key": ([*file_fields([("", V.BOOL, True)], []), Field("", "", b"xx")], "key 0 has 0 bytes, must have 1 to 65535"),
    "key not UTF-8": (changed(TWO, "key", "k", b"\xff"), r"key 0 is b'\\xff', must be UTF-8"),
    "duplicate key": (file_fields([("k", V.BOOL, True), ("k", V.UINT8, 1)], []), "key 'k' appears twice"),
    "value type": (changed(TWO, "type", "k", u32(13)), "key 'k' has unknown value type 13, allowed are 0 to 12"),
    "element type": (changed(TWO, "element type", "l", u32(2**32 - 1)), "key 'l' has unknown value type 4294967295"),
    "nested array": (changed(TWO, "element type", "l", u32(V.ARRAY)),
                     "key 'l' is an array of arrays, allowed are arrays of numbers, bools and strings"),
    "count": (changed(TWO, "count", "i", u64(2**61)),
              "there should be 2305843009213693952 i64 values of key 'i' from offset .* hold at most"),
    "count that wraps": (changed(TWO, "count", "i", u64(2**61 + 2)),
                         "there should be 2305843009213693954 i64 values of key 'i' from offset"),
    "count of strings": (changed(TWO, "count", "l", u64(2**62)),
                         "there should be 4611686018427387904 strings of key 'l' from offset"),
    "many strings": ([*file_fields([], [])[:3],
                      Field("", "", u64(1) + string("s") + u32(9) + u32(8) + u64(5 << 20) + bytes(8 * (5 << 20)))],
                     "arrays up to key 's' have 5242880 strings together, allowed are 4194304$"),
    "string length": (changed(TWO, "string length", "l", u64(2**64 - 1), 0),
                      "string 0 of 2 of key 'l' ends at offset 18446744073709551.*, but the file ends at"),
    "last string": (changed(TWO, "string length", "l", u64(10**6), 1),
                    "string 1 of 2 of key 'l' ends at offset 1000.*, but the file ends at"),
    "scalar string": (changed(file_fields([("s", V.STRING, "x")], []), "string length", "s", u64(2)),
                      "key 's' takes 2 bytes from offset"),
    "bool": (changed(TWO, "number", "b", b"\2"), "key 'b' is of type bool and has the byte 2, must have 0 or 1$"),
    "bool in array": (changed(file_fields([("b", V.BOOL, [True, False])], []), "number", "b", b"\xff", 1),
                      "key 'b' is of type bool and has the byte 255, must have 0 or 1$"),
    "alignment 0": (file_fields([("general.alignment", V.UINT32, 0)], []), "key 'general.alignment' is 0, must be a power of 2"),
    "alignment 48": (file_fields([("general.alignment", V.UINT32, 48)], []),
                     "key 'general.alignment' is 48, must be a power of 2"),
    "alignment type": (file_fields([("general.alignment", V.INT32, 32)], []),
                       "key 'general.alignment' is of type i32, must be of type u32$"),
    "long tensor name": (file_fields([], [("x" * 65, Q.F32, (1,))]), "name of tensor 0 has 65 bytes, must have 1 to 64"),
    "tensor name not UTF-8": (changed(TWO, "name", "t", b"\x80"), r"name of tensor 0 is b'\\x80', must be UTF-8"),
    "duplicate tensor": (file_fields([], [("t", Q.F32, (1,)), ("t", Q.F32, (1,))]), "tensor 't' appears twice"),
    "0 dimensions": (changed(TWO, "n_dims", "t", u32(0)), "tensor 't' has 0 dimensions, must have 1 to 4"),
    "5 dimensions": (changed(TWO, "n_dims", "t", u32(5)), "tensor 't' has 5 dimensions, must have 1 to 4"),
    "dimension 0": (changed(TWO, "ne", "t", u64(0), 1), r"tensor 't' of shape \(64, 0\) has 0 values, must have 1 to 2\^63 - 1"),
    "product overflows": (changed(TWO, "ne", "t", u64(2**58), 1),
                          r"tensor 't' of shape \(64, 288230376151711744\) has 18446744073709551616 values"),
    "tensor type": (changed(TWO, "tensor type", "t", u32(4)), r"tensor 't' has unknown type 4, allowed are 0 \(F32\), 1 \(F16\)"),
    "rows": (changed(TWO, "ne", "t", u64(48), 0), "tensor 't': Q8_0 rows must be a multiple of 32 values, got 48"),
    "misaligned": (changed(TWO, "offset", "u", u64(40)), "tensor 'u' has offset 40, must be a multiple of general.alignment, 32"),
    "overlapping": (changed(TWO, "offset", "u", u64(64)),
                    r"tensor 'u' \(F32, shape \(8,\)\) starts at offset .*, before the end of tensor 't' at"),
    "past the end": (changed(TWO, "offset", "u", u64(2**64 - 32)),
                     r"tensor 'u' \(F32, shape \(8,\)\) takes 32 bytes from offset 18446744.*, but the file ends at"),
    "size": (changed(TWO, "ne", "t", u64(2**40), 1),
             "tensor 't' .* takes 74766790688768 bytes from offset .*, but the file ends at"),
    "cut by one byte": (joined(TWO)[:-1], "tensor 'u' .* takes 32 bytes from offset .*, but the file ends at"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file(tmp_path, case):
    data, message = BAD[case]
    path = write(tmp_path / "bad.gguf", data)
    with pytest.raises(GGUFError, match=message) as caught:
        GGUFFile.open(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and text.isprintable()


def test_every_truncation_is_refused(tmp_path):
    data = joined(TWO)
    for n in range(len(data)):
        path = tmp_path / f"{n}.gguf"
        with pytest.raises(GGUFError, match=f"{n}.gguf: "):
            GGUFFile.open(write(path, data[:n]))
        path.unlink()


def test_not_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    for name, message in (("absent.gguf", "cannot be opened: No such file"), (".", "this is not a regular file"),
                          ("pipe.gguf", "this is not a regular file")):
        with pytest.raises(GGUFError, match=message):
            GGUFFile.open(tmp_path / name)


def test_names_in_errors_are_short_and_printable(tmp_path):
    key = "line\nbreak" + "x" * 60_000
    with pytest.raises(GGUFError) as caught:
        GGUFFile.open(write(tmp_path / "m.gguf", changed(file_fields([(key, V.BOOL, True)], []), "number", key, b"\7")))
    assert str(caught.value).isprintable() and len(str(caught.value)) < len(str(tmp_path)) + 200


# Speed, memory, fuzz.

def test_a_large_vocabulary_opens_fast(tmp_path):
    def array(key, type, n, data):
        return string(key) + u32(V.ARRAY) + u32(type) + u64(n) + data
    n, n_merges = 150_000, 300_000
    data = b"GGUF" + u32(3) + u64(0) + u64(4)
    data += array("tokenizer.ggml.tokens", V.STRING, n, b"".join(string(f"token{i}") for i in range(n)))
    data += array("tokenizer.ggml.scores", V.FLOAT32, n, np.arange(n, dtype="<f4").tobytes())
    data += array("tokenizer.ggml.token_type", V.INT32, n, np.ones(n, "<i4").tobytes())
    data += array("tokenizer.ggml.merges", V.STRING, n_merges, b"".join(string(f"tok en{i}") for i in range(n_merges)))
    path, seconds = write(tmp_path / "m.gguf", data), []
    for _ in range(3):  # the best of three: other work may hold the machine
        start = time.perf_counter()
        file = GGUFFile.open(path)
        tokens, merges = list(file.metadata["tokenizer.ggml.tokens"]), list(file.metadata["tokenizer.ggml.merges"])
        seconds.append(time.perf_counter() - start)
    last = tokens[-1], merges[-1], file.metadata["tokenizer.ggml.scores"][-1]
    assert last == (f"token{n - 1}", f"tok en{n_merges - 1}", n - 1)
    assert min(seconds) < 1.0


def test_opening_reads_no_tensor_data(tmp_path):
    """A sparse file of 64 GiB opens: what is mapped and not read takes no memory."""
    n = 64 << 30
    fields = file_fields([], [("t", Q.I8, (1,))])
    header = joined(changed(fields, "ne", "t", u64(n)))[:sum(len(f.data) for f in fields if f.kind != "data") - 31]
    with open(write(tmp_path / "m.gguf", header), "r+b") as f:
        f.truncate(len(header) + n)
    with GGUFFile.open(tmp_path / "m.gguf") as file:
        assert file.data("t").nbytes == n and file.data("t")[-1] == 0


def run_fuzz(*arguments: str) -> str:
    result = subprocess.run([sys.executable, fuzz_gguf.__file__, *arguments], env=environment(), capture_output=True, text=True,
                            timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_mutated_files_open_or_end_in_one_error():
    """In its own process, whose address space it limits to the files' size plus 64 MiB;
    100,000 cases: `python tests/scripts/fuzz_gguf.py`."""
    words = run_fuzz("--n", "5000", "--seed", "1").split()
    assert words[:2] == ["5000", "mutations:"]
    n_opened, n_refused = int(words[2]), int(words[4])
    assert n_opened > 100 and n_refused > 2500  # the mutations do something, and not always the same


def test_the_harness_notices_a_reader_that_trusts_lengths(monkeypatch):
    def take(part, n_bytes, what):
        part._pos += n_bytes
        return part._pos - n_bytes
    monkeypatch.setattr(ggml_py.files.gguf._Part, "_take", take)
    with pytest.raises((struct.error, OverflowError)) as caught:
        fuzz_gguf.fuzz(500)
    assert "replay: --seed 0 --first" in caught.value.__notes__[0]


def mapped_bytes(path) -> int:
    """Of the file, that this process has in memory."""
    found, n_bytes = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            found = line.endswith(str(path))
        elif found and line.startswith("Rss:"):
            n_bytes += 1024 * int(line.split()[1])
    return n_bytes


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux tells what of a file is in memory")
def test_memory_of_a_tensor_goes_and_comes(tmp_path):
    values = np.random.default_rng(0).random((3, 1 << 18), np.float32)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for i, row in enumerate(values):
        writer.add_tensor(f"t{i}", row)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GGUFFile.open(tmp_path / "m.gguf") as file:
        for i, row in enumerate(values):
            assert np.array_equal(file.data(f"t{i}").view(np.float32), row)
        before = mapped_bytes(tmp_path / "m.gguf")
        kept = file.data("t1")
        file.release("t1")
        gone = before - mapped_bytes(tmp_path / "m.gguf")
        assert values.nbytes <= before and row.nbytes - 2 * 4096 <= gone <= row.nbytes
        assert np.array_equal(kept.view(np.float32), values[1])
        del kept
    with GGUFFile.open(tmp_path / "m.gguf", mapped=False) as file:
        before = mapped_bytes(tmp_path / "m.gguf")
        data = file.data("t2")
        assert np.array_equal(data.view(np.float32), values[2]) and data.base is None
        assert mapped_bytes(tmp_path / "m.gguf") == before < row.nbytes
        os.truncate(tmp_path / "m.gguf", 5000)
        with pytest.raises(GGUFError, match="m.gguf: tensor 't2': the file is shorter than when it was opened"):
            file.data("t2")
