"""What a strategy lowers to: three functions of one global batch.

`model.py` puts the functions where Keras looks for `train_function`,
`test_function` and `predict_function`; Keras's own fit, evaluate, predict,
callbacks and data adapters stay as they are.
"""

import contextlib
from typing import Any

from parallel_keras import backends
from parallel_keras.log import say

KINDS = ("train", "test", "predict")


class Lowering:
    """How one model runs under one strategy on one backend.

    Args:
        model: The user's Keras model.
        strategy: A `Strategy`.

    Attributes:
        trained_rows: Int, or a scalar tensor that is not waited for: the rows of the last
            training step. `None` before one.
        speaks: Bool. Whether the program wants to be told what goes on.
    """

    def __init__(self, model, strategy):
        self.model = model
        self.strategy = strategy
        self.trained_rows: Any = None
        self.speaks = False
        self._said: set = set()

    def note(self, text):
        """Log a line, once, where a `fit` with a progress bar logs."""
        if text and self.speaks and text not in self._said:
            self._said.add(text)
            say(text)

    def note_own_step(self, kind):
        """Say, once, how a step of the model's own is run."""
        self.note(
            f"{type(self.model).__name__}.{kind}_step is the model's own: each replica runs it on "
            "its rows, and they are synchronised wherever an optimizer is applied"
        )

    def check(self):
        """Raise where the model cannot be brought under the strategy. Changes nothing."""

    def chosen(self):
        """Called once, when the strategy has been chosen for the model."""

    def attach(self):
        """Bring the model's variables to where the strategy wants them.

        Called at the start of each fit, evaluate and predict: cheap when
        nothing has changed since.
        """

    def prepare(self, name):
        """Called when the method of this name begins, before Keras's own part of it."""

    def remark(self):
        """What the first `fit` adds to the line about the strategy; a clause, or `""`."""
        return ""

    def detach(self):
        """Bring the variables back to where plain Keras has them."""

    def make_function(self, kind):
        """The function that Keras calls for each batch.

        Args:
            kind: `"train"`, `"test"` or `"predict"`.

        Returns:
            A callable with the arguments and the result of Keras's own
            function of that kind on this backend.
        """
        raise NotImplementedError

    @contextlib.contextmanager
    def session(self):
        """Surrounds one call of fit, evaluate, predict or an on_batch."""
        yield

    def events(self):
        """What each device did in the last training step.

        Returns:
            List of `timeline.Event`, empty before the first step.
        """
        return []


class SingleLowering(Lowering):
    """Plain Keras."""

    def attach(self):
        # Places and `pk.host()` build in host memory.
        backends.current().devices.bring_home(self.model)

    def make_function(self, kind):
        return stock_function(self.model, kind)


def stock_function(model, kind):
    """Keras's own function of a kind, made anew."""
    maker = getattr(type(model), f"make_{kind}_function")
    maker(model, force=True)
    return getattr(model, f"{kind}_function")
