"""A small model, and a harness that fetches nothing."""
import pytest
from tiny_text_models import write_text_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Whether BOS is added -> a file."""
    folder = tmp_path_factory.mktemp("tiny")
    return {add_bos: write_text_model(folder / f"{add_bos}.gguf", add_bos) for add_bos in (False, True)}


@pytest.fixture(scope="session", autouse=True)
def offline(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name in "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE":
            patch.setenv(name, "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        yield
