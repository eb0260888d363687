"""Device functions of the CPU: those that only compiled functions call.

A function's LLVM code has that of all that it calls in it, which is so optimized where it will run. numba optimizes it in each
function on the way there as well, and makes machine code of each: a third of the time of compiling. Here neither is done: device
functions are `_Part`s.

Unlike those of CUDA, one is compiled again for each value of a literal among its arguments: loops have known lengths so, without
which attention of a token takes a third longer.
"""
import numba
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering


def device(function):
    """Compiles a device function, by numpy's division and without fast-math."""
    return numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=_PartCompiler)(function)


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
        entry = {}.popitem
        state.targetctx.insert_user_function(entry, state["cr"].fndesc, [state.library])
        state["cr"] = state["cr"]._replace(cfunc=entry)
        return True


class _PartCompiler(CompilerBase):
    def define_pipelines(self):
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [(_PartLowering if each is NativeLowering else each, said) for each, said in passes.passes]
        passes.finalize()
        return [passes]
