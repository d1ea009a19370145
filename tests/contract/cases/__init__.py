"""The lists of cases. A new feature is a new line in one of them."""

import keras
import models
import rows
from harness import Case


def case(name, model=models.mlp, data=rows.classes, compile=None, fit=(), **rest):
    """A case that says only in what it differs from a small classifier under SGD."""
    return Case(
        name=name,
        model=model,
        data=data,
        compile=compile or compiled(),
        fit=dict(fit),
        **rest,
    )


def sgd():
    """A rate at which a wrong gradient shows after a few steps."""
    return keras.optimizers.SGD(0.1, momentum=0.9)


def adam(epsilon=1e-7):
    return keras.optimizers.Adam(0.01, epsilon=epsilon)


def compiled(optimizer=sgd, loss="sparse_categorical_crossentropy", metrics=("accuracy",), **rest):
    """Fresh arguments for `compile`. Functions among them are called each time."""

    def arguments():
        return {
            "optimizer": optimizer(),
            "loss": fresh(loss),
            "metrics": fresh(metrics),
            **{key: fresh(value) for key, value in rest.items()},
        }

    return arguments


def fresh(value):
    """A loss or a metric that is written as `lambda: ...` is made anew for each model."""
    if getattr(value, "__name__", None) == "<lambda>":
        return value()
    return list(value) if isinstance(value, tuple) else value
