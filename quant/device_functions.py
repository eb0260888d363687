"""Device functions of the CPU: those that only compiled functions call.

A function's LLVM code has that of all that it calls in it, which is so optimized where it will run. numba optimizes it in each
function on the way there as well, and makes machine code of each: a third of the time of compiling. Here neither is done: device
functions are `_Part`s. Of those that are alike (`alike`) one is compiled.

Those that are not `inlined` are, unlike those of CUDA, compiled again for each value of a literal among their arguments: loops
have known lengths so, without which attention of a token takes a third longer.
"""
from collections.abc import Callable

from numba import types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.registry import CPUDispatcher
from numba.core.sigutils import normalize_signature
from numba.core.typed_passes import NativeLowering

from .alike import first_alike


def device(function):
    """Compiles a device function, by numpy's division and without fast-math: once for each value of a literal."""
    return _DeviceFunction(function)


def inlined(function):
    """The same, always within the function that calls it: what it gets and gives stays in registers, and the values of literals
    come with the call. One form for all of them."""
    return _DeviceFunction(function, forceinline=True)


_compiled: dict[tuple, "_DeviceFunction"] = {}  # (function, options) -> the first that was made of it


class _DeviceFunction(CPUDispatcher):
    """Of functions that are alike, the first one is compiled, and the others have its code."""

    def __init__(self, function, **options):
        wrappers = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        super().__init__(function, targetoptions={"nopython": True, "error_model": "numpy", **wrappers, **options},
                         pipeline_class=_PartCompiler)

    def compile(self, sig):
        args, _ = normalize_signature(sig)
        if "forceinline" in self.targetoptions:
            sig = args = tuple(map(types.unliteral, args))
        if args not in self.overloads:
            first = _compiled.setdefault((first_alike(self.py_func), repr(self.targetoptions)), self)
            if first is self:
                return super().compile(sig)
            first.compile(sig)
            self.add_overload(first.overloads[args])
        return self.overloads[args].entry_point

    def _make_finalizer(self):
        return lambda: None  # numba would forget the code with the function, which others have, too


class _Part(JITCodeLibrary):
    """LLVM code that others take in, and nobody runs by itself."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _PartLowering(NativeLowering):
    _name = "part_lowering"

    def run_pass(self, state) -> bool:
        state.library = _Part(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        # In the place of the compiled function: numba tells functions apart by it, and wants one that is built in. Calling this
        # one is an error, as nobody may call a part
        entry: Callable = {}.popitem
        state.targetctx.insert_user_function(entry, state["cr"].fndesc, [state.library])
        state["cr"] = state["cr"]._replace(cfunc=entry)
        return True


class _PartCompiler(CompilerBase):
    def define_pipelines(self):
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [(_PartLowering if each is NativeLowering else each, said) for each, said in passes.passes]
        passes.finalize()
        return [passes]
