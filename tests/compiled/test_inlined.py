"""Functions that are compiled only within those that call them."""

import numpy as np
import pytest

numba = pytest.importorskip("numba", reason="the loops need numba, which is not installed")

from regard.compiled.inlined import njit_inlined  # noqa: E402


@njit_inlined(error_model="numpy")
def divide(x, y):
    return x / y


@njit_inlined()
def divide_all(x, y, out):
    for n in range(len(x)):
        out[n] = divide(x[n], y)


@numba.njit
def divide_rows(x, y, out):
    for n in range(len(x)):
        divide_all(x[n], y, out[n])


def test_a_function_with_inlined_ones_computes_what_they_do_in_python_with_their_options():
    x, found = np.arange(12.0).reshape(3, 4) - 2, np.empty((3, 4))
    divide_rows(x, 7.0, found)
    assert (found == x / 7).all()
    divide_rows(x, 0.0, found)  # no ZeroDivisionError: the numpy error model is that of divide alone
    assert np.isinf(found[x != 0]).all()
    assert np.isnan(found[x == 0]).all()


def test_there_is_machine_code_of_the_caller_alone():
    divide_rows(np.ones((1, 1)), 1.0, np.ones((1, 1)))
    for function, has_code in ((divide, False), (divide_all, False), (divide_rows, True)):
        (compiled,) = function.overloads.values()
        name, engine = compiled.fndesc.mangled_name, compiled.library.codegen._engine
        assert engine.is_symbol_defined(name) == has_code


def test_a_call_from_python_is_refused():
    with pytest.raises(TypeError, match="divide is compiled within the functions that call it"):
        divide(1.0, 2.0)


def test_an_error_in_an_inlined_function_is_that_of_its_caller():
    @njit_inlined()
    def pick(x, n):
        return x[n, n]

    @numba.njit
    def pick_first(x):
        return pick(x, 0)

    with pytest.raises(numba.TypingError, match="pick"):
        pick_first(np.ones(3))
