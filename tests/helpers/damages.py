"""What may lie where an entry of the disk cache was."""
from ggml_py.kernels.disk_cache import HEAD, _checksum

DAMAGES = {  # what may lie where an entry was -> what is said of it
    "empty": (lambda entry: b"", "it is empty"),
    "cut in the checksum": (lambda entry: entry[:HEAD // 2], "its checksum is wrong"),
    "cut in the key": (lambda entry: entry[:HEAD + 10], "its checksum is wrong"),
    "cut in the code": (lambda entry: entry[:-1], "its checksum is wrong"),
    "longer": (lambda entry: entry + b"\0", "its checksum is wrong"),
    "zeros": (lambda entry: bytes(len(entry)), "its checksum is wrong"),
    "a bit of the checksum": (lambda entry: flipped(entry, 3), "its checksum is wrong"),
    "a bit of the key": (lambda entry: flipped(entry, HEAD + 5), "its checksum is wrong"),
    "a bit of the code": (lambda entry: flipped(entry, len(entry) // 2), "its checksum is wrong"),
    "the last bit": (lambda entry: flipped(entry, len(entry) - 1), "its checksum is wrong"),
    "of another kernel": (lambda entry: entry_of("another", b"code"), "it is another kernel's"),
    "of a longer key": (lambda entry: entry_of(entry[HEAD:].split(b"\n")[0].decode() + "x", b"code"), "it is another kernel's"),
}


def flipped(entry: bytes, at: int) -> bytes:
    return entry[:at] + bytes([entry[at] ^ 1]) + entry[at + 1:]


def entry_of(key: str, code: bytes) -> bytes:
    body = key.encode() + b"\n" + code
    return _checksum(body) + body
