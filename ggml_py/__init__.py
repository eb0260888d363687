"""A GGUF tensor runtime whose results are the same bits on every run, batch size, launch and device."""
from importlib import import_module as _import_module
from pathlib import Path as _Path

__version__ = "0.1.0"
NUMERICS_VERSION = 1  # of docs/numerics.md, which has the history

_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "kernels").is_dir():  # a bare checkout: ggml_py.kernels and ggml_py.quant lie beside this folder
    __path__.append(str(_root))

# Public names are imported when first asked for: numba and tokenizers take a second, and `import ggml_py` should not.
_HOME = {"Model": ".model", "Context": ".model", "Tokenizer": ".tokenizer", "GGUFError": ".gguf_file"}
__all__ = [*_HOME, "__version__"]


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(_HOME[name], __name__), name)
    return value


def __dir__():
    return sorted({*globals(), *_HOME})
