# mypy: ignore-errors
"""Compile functions only as part of those that call them, which takes less time.

numba compiles each function of a call graph to machine code of its own, with one wrapper for Python and one for C, and then
once more within each of its callers.
"""

from numba import _dynfunc
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.registry import CPUDispatcher
from numba.core.typed_passes import NativeLowering


class InlinedLibrary(JITCodeLibrary):
    """LLVM's code of a function, which is optimized and becomes machine code within the libraries that link it."""

    def _optimize_final_module(self):
        pass

    def _finalize_final_module(self):
        self._finalize_dynamic_globals()
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class InlinedLowering(NativeLowering):
    """numba's lowering, into such a library and without wrappers."""

    _name = "native_lowering_inlined"

    def run_pass(self, state):
        """Lower the function of a compiler's state, and let others call it."""
        state.library = InlinedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = state.flags.no_cpython_wrapper = state.flags.no_cfunc_wrapper = True
        super().run_pass(state)
        lowered = state["cr"]
        key = _dynfunc.make_function(
            lowered.fndesc.lookup_module(), lowered.fndesc.qualname, "", 0, lowered.env, (state.library,)
        )
        state.targetctx.insert_user_function(key, lowered.fndesc, [state.library])
        state.reload_init.extend(getattr(state.library, "_reload_init", ()))  # numba has it from 0.63 on
        state["cr"] = lowered._replace(cfunc=key)
        return True


class InlinedCompiler(CompilerBase):
    """numba's compiler with that lowering."""

    def define_pipelines(self):
        """Return numba's passes for a function without Python objects, with one replaced."""
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes[:] = [(InlinedLowering if one is NativeLowering else one, text) for one, text in passes.passes]
        passes.finalize()
        return [passes]


class InlinedDispatcher(CPUDispatcher):
    """A function for compiled functions to call. Its loop in Python is `py_func`."""

    def __call__(self, *arguments):
        """Raise an error: there is no machine code of this function alone."""
        raise TypeError(
            f"{self.py_func.__qualname__} is compiled within the functions that call it, and cannot be called from Python. "
            "Call it in a function of njit_with_cache."
        )


def njit_inlined(**options):
    """Return a decorator: njit, with its options, for functions that only compiled functions call.

    Such a function may not print, and may not raise an error with values that it computes.
    """

    def wrap_function(function):
        return InlinedDispatcher(
            function, targetoptions={"nopython": True, "boundscheck": None, **options}, pipeline_class=InlinedCompiler
        )

    return wrap_function
