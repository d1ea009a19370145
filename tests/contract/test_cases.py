"""Every case under every number of replicas equals plain Keras."""

import inspect

import keras
import pytest
from cases import batches, kinds, losses, metrics, optimizers
from harness import check, grid


@pytest.mark.parametrize("case, strategy", grid(optimizers))
def test_optimizers(case, strategy):
    check(case, strategy)


@pytest.mark.parametrize("case, strategy", grid(batches))
def test_batches(case, strategy):
    check(case, strategy)


@pytest.mark.parametrize("case, strategy", grid(losses))
def test_losses(case, strategy):
    check(case, strategy)


@pytest.mark.parametrize("case, strategy", grid(kinds))
def test_kinds(case, strategy):
    check(case, strategy)


@pytest.mark.parametrize("case, strategy", grid(metrics))
def test_metrics(case, strategy):
    check(case, strategy)


def test_every_metric_class_has_a_case():
    seen = set()
    for case in metrics.CASES:
        arguments = case.compile()
        for key in ("metrics", "weighted_metrics"):
            seen |= {type(metric) for metric in keras.tree.flatten(arguments.get(key))}
    classes = {c for c in vars(keras.metrics).values() if inspect.isclass(c)}
    assert classes - seen - metrics.OF_LAYERS == {keras.metrics.Metric}


def test_every_loss_class_is_refused_or_has_a_case():
    # These three reduce over the batch, or compare its rows with each other.
    of_the_batch = {keras.losses.Dice, keras.losses.Tversky, keras.losses.Circle}
    elsewhere = {keras.losses.Loss, keras.losses.MeanSquaredError}  # the base; used by name
    elsewhere |= {keras.losses.SparseCategoricalCrossentropy}
    named = {case.name.removeprefix("loss_") for case in losses.CASES}
    classes = {c for c in vars(keras.losses).values() if inspect.isclass(c)}
    assert {c.__name__ for c in classes - of_the_batch - elsewhere} <= named
