"""Device functions: what kernels call, and how it is compiled.

Python is what takes the time: numba runs some thirty passes over each function and asks up to fifty templates for the type of
each `a + b`. So factories may make their functions anew for every kernel, but of those that are alike one is compiled
(`quant.alike`); by the passes that such functions need (`_Passes`); and of what has been asked the answer is kept (`_Types`).
"""
import operator
from functools import lru_cache
from types import FunctionType

from numba import types
from numba.cuda.core import config

from ...quant.alike import first_alike

SIMULATED = bool(config.ENABLE_CUDASIM)
if not SIMULATED:
    from numba.cuda.compiler import CUDACompiler, compile_extra
    from numba.cuda.core.typed_passes import InlineOverloads, NopythonRewrites
    from numba.cuda.core.untyped_passes import InlineClosureLikes, LiteralPropagationSubPipelinePass, LiteralUnroll, WithLifting
    from numba.cuda.descriptor import cuda_target
    from numba.cuda.dispatcher import CUDADispatcher
    from numba.cuda.flags import CUDAFlags
    from numba.cuda.utils import numba_target_override


def device(function):
    """Compiles a device function, one that kernels and other device functions call. In the simulator it is called as it is."""
    return function if SIMULATED else _DeviceFunction(function, targetoptions={"device": True})


def stage(function):
    """A device function that is compiled as if its text stood where it is called: a named part of a long function, without code
    of its own. (Other device functions are put in the places of their calls too, by NVVM. But it simplifies each alone before
    that, so a cut can change the order of instructions.)"""
    return function if SIMULATED else _DeviceFunction(function, targetoptions={"device": True, "inline": "always"})


if not SIMULATED:
    class _DeviceFunction(CUDADispatcher):
        """What cuda.jit(device=True) makes, but without asking a GPU for its compute capability: that of the kernel decides.

        Factories make their functions anew for every kernel. Of functions that are alike one is compiled, and of calls that
        differ in the values of literals alone: NVVM puts these in when it puts functions in the places of their calls."""

        def compile_device(self, args, return_type=None):
            args = tuple(map(types.unliteral, args))
            if args not in self.overloads:
                with self._compiling_counter:
                    self.overloads[args] = _compiled(first_alike(self.py_func), args, return_type)
            return self.overloads[args]

    class _Flags(CUDAFlags):
        def values(self):
            """Those that were set, which tell flags apart as all of them would."""
            return self._values

    @lru_cache(None)
    def _compiled(function: FunctionType, args: tuple, return_type):
        """What numba's compile_cuda gives, as far as `_Passes` and `_Types` do not differ from it."""
        flags = _Flags()
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.forceinline = True
        flags.error_model, flags.nvvm_options, flags.compute_capability = "numpy", {"opt": 3}, (8, 0)
        with numba_target_override():
            compiled = compile_extra(_Types(cuda_target.typing_context), cuda_target.target_context, function, args, return_type,
                                     flags, {}, pipeline_class=_Passes)
        compiled.library.finalize()
        compiled.target_context.insert_user_function(compiled.entry_point, compiled.fndesc, [compiled.library])
        return compiled

    # For blocks of `with`, functions within functions, `literal_unroll`, expressions of arrays and functions of other packages
    # that ask to be inlined, none of which there is in a device function. Each costs a look at all instructions at least
    LEFT_OUT = (WithLifting, InlineClosureLikes, LiteralUnroll, LiteralPropagationSubPipelinePass, InlineOverloads,
                NopythonRewrites)

    class _Passes(CUDACompiler):
        def define_pipelines(self):
            passes, = super().define_pipelines()
            if "print" not in self.state.func_id.func.__code__.co_names:  # while a kernel is written; NopythonRewrites makes it
                passes.passes = [each for each in passes.passes if each[0] not in LEFT_OUT]
                passes.finalize()
            return [passes]

    class _Types:
        """A typing context of numba that keeps its answers about its own functions (not those about overloads, which depend on
        more than types)."""

        def __init__(self, context):
            self.context = context

        def __getattr__(self, name):
            return getattr(self.context, name)

        def resolve_function_type(self, function, args, given):
            known = self.context._lookup_global(function) or function
            is_own = isinstance(known, types.Function) and not given
            asked = known, tuple(map(types.unliteral, args)) if is_own and known.typing_key in ARITHMETIC else args
            signature = _signatures.get(asked) if is_own else None
            if signature is None:
                signature = self.context.resolve_function_type(function, args, given)
                if is_own and signature is not None and known._impl_keys.get(signature.args) is known.typing_key:
                    _signatures[asked] = signature
            return signature


# Whose types do not depend on a literal's value
ARITHMETIC = frozenset((operator.add, operator.sub, operator.mul, operator.and_, operator.or_, operator.xor, operator.lshift,
                        operator.rshift))
_signatures: dict = {}  # (numba's function, types of arguments) -> signature
