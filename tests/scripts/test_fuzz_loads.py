"""Mutated models load and compute, or end in one line; and the fuzz that says so sees loaders that believe what a file states."""
import subprocess
import sys

import pytest

from places import TESTS, environment


def run(*arguments: str) -> subprocess.CompletedProcess:
    """In a process of its own, whose memory and time it limits."""
    return subprocess.run([sys.executable, *arguments], env=environment(NUMBA_NUM_THREADS="1"), capture_output=True, text=True,
                          timeout=900)


def test_mutated_models_load_or_end_in_one_error():
    """200,000 cases: make fuzz."""
    done = run(str(TESTS / "scripts" / "fuzz_loads.py"), "--n", "2500", "--seed", "1")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[:2] == ["2500", "mutations:"] and words[6:8] == ["0", "faults,"]
    n_loaded, n_refused = int(words[2]), int(words[4])
    assert n_loaded > 300 and n_refused > 1500  # the mutations do something, and not always the same


BELIEVERS = {
    "blocks": ("hparams.Keys.block_count = lambda keys: keys.integer('block_count')", "MemoryError|TooLong|KeyError|IndexError"),
    "bounds": ("hparams.Keys.real = lambda keys, key, *default, **bounds: keys.file.get(keys.name(key), 'f32', *default[:1])",
               ""),
    "paper": ("common.Transformer.check_tensors = lambda model, nextn: None", "MemoryError|GraphError"),
    "types": ("weights.VECTOR_TYPES = weights.MATRIX_TYPES = [type.name for type in gguf.GGMLQuantizationType]", "ValueError"),
}


@pytest.mark.parametrize("believes", BELIEVERS)
def test_the_fuzz_sees_a_loader_that_believes_the_file(believes):
    fault, error = BELIEVERS[believes]
    done = run("-c",
               f"import gguf, fuzz_loads\nfrom ggml_py.models import common, hparams, weights\n{fault}\nfuzz_loads.fuzz(3000)")
    assert done.returncode == 1, done.stderr
    *_, said, replay = done.stderr.strip().splitlines()
    assert replay.startswith("replay: --seed 0 --first ") and any(name in said for name in error.split("|")), done.stderr
