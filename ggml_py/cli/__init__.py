"""The command line: main.py finds and runs a command, each of which is a file; options.py has the options that they share."""
from .main import execute

__all__ = ["execute"]
