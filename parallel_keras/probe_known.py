"""What of a model is known to add up over the rows, and what a probe has found."""

from typing import NamedTuple

import keras

from parallel_keras import backends, capabilities, features, keras_internals

# Keras's own losses that reduce over the batch unless told otherwise.
_BATCH_LOSSES = ("Circle", "Dice", "Tversky", "dice", "tversky", "circle")


class Findings(NamedTuple):
    """How loss and metrics of a batch come from those of its parts.

    Attributes:
        averaged: Frozenset of the ids of the metrics' variables whose change counts with
            the part's share of the rows. All others are summed.
        summed: Frozenset of the keys of what layers add to the loss as a sum over the rows:
            it counts in full. All else that they add counts with the share of the rows.
        of_the_batch: String, the loss or metric that has to be computed on the whole
            batch. Empty where all add up.
        late: String, a metric that reads what the optimizer changes. Empty where none does.
    """

    averaged: frozenset = frozenset()
    summed: frozenset = frozenset()
    of_the_batch: str = ""
    late: str = ""

    def check(self, kind, strategy):
        """Refuse what a kind of step cannot do.

        Args:
            kind: `"train"`, `"test"` or `"predict"`.
            strategy: The `Strategy`, for messages.
        """
        if self.late and kind == "train":
            capabilities.check("metric_reads", strategy, backends.name(), self.late)

    def described(self):
        """A line for the log, empty where all add up."""
        if not self.of_the_batch:
            return ""
        return (
            f"{self.of_the_batch} does not add up over the rows of a batch: the outputs of all "
            "replicas come together on the first device, which computes loss and metrics once"
        )


def known(model):
    """The `Findings` that need no look at a batch."""
    found = features.loss_of_the_batch(model) if model.compiled else ""
    return Findings(of_the_batch=found)


def needs_probe(model):
    """Whether a model has a loss, metric or layer that is not known to add up."""
    return bool(
        unknown_losses(model)
        or unknown_metrics(model)
        or unknown_layers(model)
        or _makes_masks(model)
        or keras_internals.has_bare_operations(model)
    )


def is_enough(rows):
    """Whether a batch has the rows that a probe needs."""
    return rows >= 2


def unknown_losses(model):
    return [loss for loss in features.user_losses(model) if not _is_known_loss(loss)]


def _is_known_loss(loss):
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    function = getattr(loss, "fn", loss)
    names = {type(loss).__name__, getattr(function, "__name__", "")}
    of_keras = features.is_keras(loss) and features.is_keras(function)
    return of_keras and not names & {*_BATCH_LOSSES} and not _is_over_rows(loss)


def _is_over_rows(thing):
    """Whether a loss or a metric around a function has it work along the rows."""
    return features.may_be_over_rows(getattr(thing, "_fn_kwargs", {}).get("axis"))


def unknown_metrics(model):
    container = keras_internals.compile_metrics_of(model) if model.compiled else None
    metrics = container.metrics if container is not None else []
    return [metric for metric in metrics if not _is_known_metric(metric)]


def _is_known_metric(metric):
    function = getattr(metric, "_fn", None)
    if function is None:
        return features.is_keras(metric)
    # A Keras metric class around a function: a loss object as a metric has
    # reduced over its rows already, so only plain Keras functions are known.
    known = features.is_keras(function) and hasattr(function, "__code__")
    known = known and function.__name__ not in _BATCH_LOSSES and not _is_over_rows(metric)
    return features.is_keras(metric) and known


def unknown_layers(model):
    return [
        layer
        for layer in keras_internals.flatten_layers(model)
        if not features.keeps_rows_apart(layer)
    ]


def _makes_masks(model):
    return any(
        isinstance(layer, keras.layers.Masking) or getattr(layer, "mask_zero", False)
        for layer in keras_internals.flatten_layers(model)
    )
