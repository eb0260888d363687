"""Measurements of models: perplexity, KL divergence, speed."""
