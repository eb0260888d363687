"""Models and contexts: the Python interface."""
