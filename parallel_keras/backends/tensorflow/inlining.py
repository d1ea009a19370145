"""Functions of a step's own that are decorated with `tf.function`, as part of the step.

In a graph of its own such a function could not wait for the other replicas, and one
that was traced before would assign variables without telling. As Python it is the same
function. eager/polymorphic_function/polymorphic_function.py, TensorFlow 2.21.
"""

import contextlib
import threading

from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager.polymorphic_function import autograph_util, polymorphic_function

from parallel_keras.keras_internals.patching import patch_once

_here = threading.local()


@contextlib.contextmanager
def inlined():
    """Inside, in this thread, what `tf.function` has made is called as Python."""
    _let_functions_be_inlined()
    before = getattr(_here, "is_inlining", False)
    _here.is_inlining = True
    try:
        yield
    finally:
        _here.is_inlining = before


def _let_functions_be_inlined():
    @patch_once(polymorphic_function.Function, "__call__")
    def _inlining(stock):
        def call(function, *args, **kwargs):
            if getattr(_here, "is_inlining", False) and _is_of_the_user(function.python_function):
                return _python_of(function)(*args, **kwargs)
            return stock(function, *args, **kwargs)

        return call


def _is_of_the_user(function):
    module = getattr(function, "__module__", None) or ""
    return module.partition(".")[0] not in ("tensorflow", "keras")


def _python_of(function):
    """What would be traced."""
    if not function._autograph:
        return function.python_function
    options = function._experimental_autograph_options
    converted = autograph_util.py_func_from_autograph(function.python_function, options)

    def call(*args, **kwargs):
        with ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED, options=options):
            return converted(*args, **kwargs)

    return call
