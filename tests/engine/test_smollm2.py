"""How near SmolLM2-135M comes to float32 arithmetic: likelihoods of requests as transformers has them, those of WikiText-2 as
llama.cpp has them in float32, KL divergence and perplexity. Bounds are twice what was measured (docs/python.md)."""
from pathlib import Path

import numpy as np
import pytest

import smollm2
from harness_tasks import float32_likelihoods
from ggml_py.base.exact_math import exp, log, tree_sum
from ggml_py.engine.model import Model
from places import REFERENCE


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - log(tree_sum(exp(x)))[:, None]


def windows(path: Path, tokens: np.ndarray, type_kv: str):
    """log probabilities [512, n_vocab] of each window."""
    with Model.load(path, device="cpu") as model, model.new_context(n_ctx=512, type_k=type_kv, type_v=type_kv) as context:
        for window in tokens:
            context.clear()
            yield log_probabilities(context.decode(window, logits="all"))


def size(x) -> tuple[float, float]:
    """Root mean square and largest magnitude."""
    return float(np.sqrt(np.mean(np.square(x)))), float(np.abs(x).max())


@pytest.mark.parametrize("weights, type_kv, typical, most, of_texts", [
    ("Q4_1", "f16", 6e-3, 2e-2, 6e-4), ("Q4_1", "f32", 6e-3, 2.4e-2, 1.7e-3),
    pytest.param("F32", "f32", 1.8e-5, 3.6e-5, 1.8e-5, marks=pytest.mark.slow)])
def test_likelihoods_of_transformers(tmp_path, weights, type_kv, typical, most, of_texts):
    """The difference a token (of the sum over a request's tokens, over their number): root mean square and maximum over all
    requests, and the maximum over texts of 15 and more tokens."""
    path = smollm2.require()
    if weights == "F32":
        path = smollm2.write_f32_copy(path, tmp_path / "f32.gguf")
    pairs, wanted = float32_likelihoods()
    with Model.load(path, device="cpu") as model:
        found = model.score_many(pairs, type_k=type_kv, type_v=type_kv)
    if weights == "F32":
        path.unlink()
    off = np.array([(each.logprob - x) / len(each.ids) for each, x in zip(found, wanted)])
    texts = [len(ids) >= 15 for _, ids in pairs]
    (rms, largest), (_, text) = size(off), size(off[texts])
    print(f"{weights}, {type_kv}: {rms:.2e}, at most {largest:.2e}; texts at most {text:.2e}")
    assert sum(texts) == 4
    assert rms <= typical
    assert largest <= most
    assert text <= of_texts


@pytest.mark.slow
def test_perplexity_and_divergence(tmp_path):
    """F32 and Q4_1 against llama.cpp's float32: likelihoods of all 2044 tokens; mean KL divergence; perplexity."""
    if not REFERENCE.is_dir():
        pytest.skip("needs ../shared/reference, which is not here")
    source = smollm2.require()
    recorded = np.load(REFERENCE / "logits" / "smollm2-nll.npz")
    tokens = recorded["tokens"].reshape(4, 512)
    divergence, nll, float_nll, off, float_off = [], [], [], [], []
    f32 = smollm2.write_f32_copy(source, tmp_path / "f32.gguf")
    for i, (exact, got) in enumerate(zip(windows(f32, tokens, "f32"), windows(source, tokens, "f16"))):
        targets = np.arange(511), tokens[i, 1:]
        float_off.append(exact[targets] + recorded["nll_f32"][i])
        off.append(got[targets] + recorded["nll_f32"][i])
        divergence.append((np.exp(exact) * (exact - got)).sum(-1).mean())
        nll.append(-got[targets][256:])
        float_nll.append(-exact[targets][256:])
    f32.unlink()
    perplexity = np.exp(np.mean(nll))
    (rms, largest), (float_rms, float_largest), (_, text) = size(off), size(float_off), size(np.mean(off, 1))
    print(f"PPL {perplexity:.4f} (float32 {np.exp(np.mean(float_nll)):.4f}), KL {np.mean(divergence):.2e}; tokens {rms:.2e}, "
          f"at most {largest:.2e}, a text at most {text:.2e} a token; in float32 {float_rms:.1e}, at most {float_largest:.1e}")
    assert float_rms <= 1.8e-5
    assert float_largest <= 3.4e-4
    assert rms <= 5e-3
    assert largest <= 9e-2
    assert text <= 5e-4
    assert np.mean(divergence) <= 4.2e-6
    assert abs(perplexity / 22.7437 - 1) <= 2e-4
