"""The Merkle tree of a list of digests, as in RFC 6962: one digest stands for all of them, in their order."""
from collections.abc import Sequence
from hashlib import sha256


def merkle_root(digests: Sequence[str]) -> str:
    """digests: of sha256, in hex, at least one. A leaf is sha256(0x00 + digest), a node sha256(0x01 + left + right), left the
    largest power of two of leaves that leaves some to the right. Returns hex."""
    if not digests:
        raise ValueError("merkle_root: needs at least one digest")
    return _root([bytes.fromhex(digest) for digest in digests]).hex()


def _root(digests: list[bytes]) -> bytes:
    if len(digests) == 1:
        return sha256(b"\0" + digests[0]).digest()
    left = 1 << (len(digests) - 1).bit_length() - 1
    return sha256(b"\1" + _root(digests[:left]) + _root(digests[left:])).digest()
