"""A second CPU for free: the environment of a process where numpy does without AVX-512 and AVX2, numba compiles for Haswell."""
import pytest
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

from places import environment

FEATURES = "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+cx16,+64bit"


def turned_down() -> dict[str, str]:
    from ggml_py.kernels.compile import cpu_features
    if not cpu_features().get("avx2"):
        pytest.skip("needs an x86-64 CPU with AVX2")
    without = " ".join(f for f in __cpu_dispatch__ if __cpu_features__.get(f))  # what numpy found here and can do without
    return environment(NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES=FEATURES, NPY_DISABLE_CPU_FEATURES=without)
