"""Importing this puts the checkout and what its tests share on the path, so that benchmarks run from a bare checkout and use the
tests' random blocks."""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "scripts")]
