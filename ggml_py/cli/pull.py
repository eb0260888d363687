"""ggml-py pull: a model by its name, of a hub or of a package."""
import sys

from .loading import OF_A_HUB, hub_path
from .options import hub
from .parser import refuse


def options(p) -> None:
    p.add_argument("model", metavar="REPO[:QUANT]|NAME",
                   help="OWNER/NAME of the hub, and which quantization: Q4_K_M, else Q8_0, else the first by default; or smollm2")
    hub(p)


def run(options, load_model) -> None:
    from ..files.hub import pulled
    from ..files.pull import pull
    if "/" not in options.model:
        refuse(options, OF_A_HUB, f"is of a hub's OWNER/NAME, not of {options.model}")
        print(pull(options.model, sys.stderr))
        return
    path = hub_path(options, options.model, thorough=True)
    if record := pulled(path):
        print(f"{record.file} of {record.repo}, revision {record.revision}, sha256 {record.sha256}", file=sys.stderr)
    print(path)
