"""Importing this puts what tests share on the path, for scripts that run by themselves."""
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "helpers"))
