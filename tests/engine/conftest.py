"""A small model on a device whose greedy steps run ahead, and on one whose do not."""
import pytest
from queueing_backend import QueueingBackend
from tiny_models import write_model

from ggml_py.backends.cpu import CPUBackend
from ggml_py.engine.model import Model
from ggml_py.files.gguf import GGUFFile


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "m.gguf", "llama", ("Q8_0", "F16", "Q4_0", "F32"))


@pytest.fixture(params=[CPUBackend, QueueingBackend])
def model(path, request):
    with Model(GGUFFile.open(path), request.param()) as model:
        yield model
