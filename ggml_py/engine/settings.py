"""How a model is to be run, and the context that this asks for."""
import logging
from contextlib import contextmanager
from dataclasses import dataclass

from ..base.defaults import N_BATCH, N_UBATCH
from ..base.errors import ParameterError
from ..base.progress import teller
from ..state.recurrent import LEAST_ROLLBACK

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What a run depends on, besides model and tokens. Only the windows (n_ctx, n_chunks, stride) and the cache types can change
    a result."""
    n_ctx: int = 512  # c, tokens of a window
    n_batch: int = N_BATCH  # B, tokens of a logical batch: max(1, B // c) windows are decoded together, each as a sequence
    n_ubatch: int = N_UBATCH
    n_chunks: int = -1  # at most so many windows; -1: all
    stride: int = 0  # of strided windows; 0: windows side by side
    type_k: str = "f16"
    type_v: str = "f16"
    no_fuse: tuple[str, ...] = ()  # graph passes left out
    graphs: bool = True  # replay steps from CUDA graphs
    kv_write: str = "set_rows"
    n_rollback: int = LEAST_ROLLBACK  # positions that a recurrent model's sequences can be taken back
    n_threads_batch: int | None = None  # of the CPU, for micro-batches of several tokens
    verbose: bool = False  # describe model, memory plan and CUDA graphs on the log


def check_context(model, n_ctx: int) -> None:
    """Refuse more positions in a sequence than the model was trained on."""
    if n_ctx > model.n_ctx_train:
        raise ParameterError("n_ctx", f"a context of {n_ctx} tokens is too long, this model was trained on at most "
                                      f"{model.n_ctx_train}")


@contextmanager
def new_context(model, settings: Settings, window: int, n_seq: int, log=None):
    """A context for n_seq sequences of `window` tokens each, closed at the end. log: the stream on which `verbose` describes it;
    None: by `logging`."""
    say = teller(log, logger.info)
    check_context(model, window)
    n_ctx = n_seq * window
    with model.new_context(n_ctx=n_ctx, n_batch=min(settings.n_batch, n_ctx), n_ubatch=settings.n_ubatch, type_k=settings.type_k,
                           type_v=settings.type_v, n_seq_max=n_seq, no_fuse=settings.no_fuse, graphs=settings.graphs,
                           kv_write=settings.kv_write, n_rollback=settings.n_rollback,
                           n_threads_batch=settings.n_threads_batch) as context:
        if settings.verbose:
            say(f"{model.describe()}\n{context.describe()}")
        yield context
        if settings.verbose:
            say(context.launches())
