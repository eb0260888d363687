"""Checks an installed wheel against the checkout that it was built from; `make wheel-test` runs it in an empty environment and
another folder.

usage: python -I wheel_check.py CHECKOUT
"""
import os
import subprocess
import sys
from hashlib import sha256
from importlib import resources
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np

import ggml_py
import ggml_py.kernels
import ggml_py.quant
from ggml_py import GGUFError, Tokenizer

ROOMS = {"ggml_py": "", "kernels": "kernels", "quant": "quant"}  # folder of the checkout -> folder in the installed package


def first_hour(helpers: Path, command: Path) -> None:
    """What a new user does, with a hub on this machine: pulls a model, continues and scores tokens, measures, looks at a page."""
    sys.path.append(str(helpers))
    from hub_server import Hub, serving
    from tiny_models import write_model
    content = write_model(Path("model.gguf")).read_bytes()
    with serving(Hub({})) as hub:
        hub.put("me/tiny", {"tiny-F32.gguf": content})
        os.environ.update(HF_ENDPOINT=hub.url, XDG_CACHE_HOME=os.path.abspath("cache"))
        sweep = "sweep-bench -hf me/tiny -c 16 -ub 8 -n 2 --device cpu --report r.html"
        for argv, expected in ((["pull", "me/tiny"], "tiny-F32.gguf"), (["info", "-hf", "me/tiny:f32"], "general.architecture"),
                               (sweep.split(), "S_TG t/s")):
            result = subprocess.run([command, *argv], capture_output=True, text=True)
            assert result.returncode == 0 and expected in result.stdout, result
        assert "<svg" in Path("r.html").read_text()
        with ggml_py.Model.load(hf="me/tiny", device="cpu") as model:
            found = model.generate([1, 2, 3], max_tokens=4)
            assert len(found.ids) == 4 and model.score([1, 2, 3], found.ids[:1]).is_greedy


def main(checkout: Path):
    installed = Path(ggml_py.__file__).parent
    assert "site-packages" in installed.parts, f"imported from {installed}, not from a wheel"
    assert issubclass(GGUFError, ValueError) and Tokenizer.from_gguf and (installed / "py.typed").is_file()
    assert version("ggml-bitwise") == ggml_py.__version__
    for room in ggml_py.kernels, ggml_py.quant:
        assert installed in Path(room.__file__).parents, f"{room.__name__} is {room.__file__}, not in {installed}"
    for room, folder in ROOMS.items():
        sources = {path.relative_to(checkout / room) for path in (checkout / room).rglob("*.py")}
        missing = sorted(str(path) for path in sources if not (installed / folder / path).is_file())
        assert not missing, f"{room}: not in the wheel: {missing}"
    demo = resources.files("ggml_py").joinpath("demo/prose.txt").read_bytes()
    assert sha256(demo).digest() == sha256((checkout / "ggml_py/demo/prose.txt").read_bytes()).digest(), "demo/prose.txt differs"

    writer = gguf.GGUFWriter("tiny.gguf", "llama")
    writer.add_block_count(1), writer.add_embedding_length(32), writer.add_head_count(1), writer.add_head_count_kv(1)
    writer.add_context_length(8), writer.add_layer_norm_rms_eps(1e-5)
    for name, shape in (("token_embd", (3, 32)), ("output_norm", (32,)), ("blk.0.attn_norm", (32,)), ("blk.0.ffn_norm", (32,)),
                        ("blk.0.ffn_up", (64, 32))):
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    command = Path(sys.executable).with_name("ggml-py")
    for argv, expected in (["--version"], f"ggml-py {ggml_py.__version__}\n"), (["info", "tiny.gguf"], "5 tensors"):
        result = subprocess.run([command, *argv], capture_output=True, text=True)
        assert result.returncode == 0 and expected in result.stdout, result
    first_hour(checkout / "tests" / "helpers", command)
    print(f"wheel ggml_bitwise {ggml_py.__version__}: {installed} works")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
