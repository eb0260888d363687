"""A GGUF tensor runtime whose results are the same bits on every run, batch size, launch and device."""
import os as _os

TYPE_CHECKING = False  # of typing, which takes longer to import than all of this; type checkers know the name
if TYPE_CHECKING:
    from .base.placement import ExpertsOnHost as ExpertsOnHost, Override as Override, PlacementOptions as PlacementOptions
    from .base.errors import ParameterError as ParameterError, UserError as UserError
    from .engine.completion import Completion as Completion, Generation as Generation
    from .engine.completion import Piece as Piece, TokenLogprob as TokenLogprob
    from .engine.context import Context as Context
    from .engine.grammar import Grammar as Grammar
    from .engine.likelihood import Likelihood as Likelihood
    from .engine.model import Model as Model
    from .engine.sampling import Sampling as Sampling
    from .files.gguf import GGUFError as GGUFError
    from .files.hub import HubModel as HubModel
    from .models.fit import Fit as Fit
    from .tokenizer import Tokenizer as Tokenizer

__version__ = "0.1.0"
NUMERICS_VERSION = 1  # of docs/numerics.md, which has the history

_root = _os.path.dirname(_os.path.dirname(_os.path.realpath(__file__)))
if _os.path.isfile(_os.path.join(_root, "pyproject.toml")) and _os.path.isdir(_os.path.join(_root, "kernels")):
    __path__.append(_root)  # a bare checkout: ggml_py.kernels and ggml_py.quant lie beside this folder

# Public names are imported when first asked for: numba and tokenizers take a second, and `import ggml_py` should not.
_HOME = {"Model": ".engine.model", "Context": ".engine.context", "Tokenizer": ".tokenizer", "GGUFError": ".files.gguf",
         "PlacementOptions": ".base.placement", "Override": ".base.placement", "ExpertsOnHost": ".base.placement",
         "Fit": ".models.fit", "Likelihood": ".engine.likelihood", "ParameterError": ".base.errors", "UserError": ".base.errors",
         "Completion": ".engine.completion", "Generation": ".engine.completion", "Piece": ".engine.completion",
         "TokenLogprob": ".engine.completion", "Grammar": ".engine.grammar", "Sampling": ".engine.sampling",
         "HubModel": ".files.hub"}
__all__ = ["Completion", "Context", "ExpertsOnHost", "Fit", "GGUFError", "Generation", "Grammar", "HubModel", "Likelihood",
           "Model", "Override", "ParameterError", "Piece", "PlacementOptions", "Sampling", "TokenLogprob", "Tokenizer",
           "UserError", "__version__"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module
    value = globals()[name] = getattr(import_module(_HOME[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
