"""Every case under every number of replicas equals plain Keras."""

import inspect

import keras
import pytest
from cases import batches, kinds, losses, metrics, optimizers, own_optimizers, precision
from harness import check, fit, grid, make

import parallel_keras as pk


@pytest.mark.parametrize("case, strategy", grid(optimizers))
def test_optimizers(case, strategy):
    check(case, strategy)


@pytest.mark.parametrize("case, strategy", grid(own_optimizers))
def test_own_optimizers(case, strategy):
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


@pytest.mark.parametrize("case, strategy", grid(precision))
def test_precision(case, strategy):
    check(case, strategy)


def test_one_replica_where_keras_would_not_compute():
    devices = pk.list_devices()
    if len(devices) < 2:
        pytest.skip("it computes on the second device, and there is one")
    case = next(case for case in optimizers.CASES if case.name == "clipnorm")
    check(case, pk.DataParallel(devices[1:2]))


def test_every_metric_class_has_a_case():
    seen = set()
    for case in metrics.CASES:
        arguments = case.compile()
        for key in ("metrics", "weighted_metrics"):
            seen |= {type(metric) for metric in keras.tree.flatten(arguments.get(key))}
    classes = {c for c in vars(keras.metrics).values() if inspect.isclass(c)}
    assert classes - seen - metrics.OF_LAYERS == {keras.metrics.Metric}


@pytest.mark.parametrize("verbose", [0, 2])
def test_a_fit_says_why_it_needs_the_whole_batch(verbose, caplog):
    caplog.set_level("INFO", logger="parallel_keras")
    case = next(case for case in losses.CASES if case.name == "loss_sum")
    fit(make(case.model, case.compile(), "data=2"), **case.data(), epochs=2, verbose=verbose)
    assert caplog.text.count("reduction='sum' does not add up") == (verbose > 0)


def test_every_loss_class_has_a_case():
    elsewhere = {keras.losses.Loss, keras.losses.MeanSquaredError}  # the base; used by name
    elsewhere |= {keras.losses.SparseCategoricalCrossentropy}
    named = {case.name.removeprefix("loss_") for case in losses.CASES}
    classes = {c for c in vars(keras.losses).values() if inspect.isclass(c)}
    assert {c.__name__ for c in classes - elsewhere} <= named
