"""What a metric keeps in plain attributes is as if only the steps had run, not a probe of it."""

import keras
import models
import pytest
import rows
from cases import compiled
from harness import compare, fit, make
from keras import ops

import parallel_keras as pk
from parallel_keras import probe


class Noting(keras.metrics.Metric):
    """Counts its updates in an attribute that the first makes, and notes them in a list."""

    def __init__(self, least=0):
        super().__init__(name="noting")
        self.least = least
        self.noted = []
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.calls = getattr(self, "calls", 0) + 1
        self.noted.append(y_pred.shape[0])
        self.total.assign_add(ops.mean(ops.abs(y_true - y_pred)) * self.calls)
        if (y_pred.shape[0] or self.least) < self.least:
            raise ValueError("of too few rows")

    def result(self):
        return ops.copy(self.total)


def _probed(metric):
    model = make(models.regressor, compiled(loss="mse", metrics=())(), None)
    model.compile("sgd", "mse", metrics=[metric])
    x, y = (ops.convert_to_tensor(a[:16]) for a in rows.regression(48).values())
    model.test_on_batch(x[:1], y[:1])
    vars(metric).pop("calls")
    metric.noted.clear()
    return lambda: probe.probe(model, pk.DataParallel(2), x, y)


def test_a_probe_takes_away_what_it_has_made():
    metric = Noting()
    probed = _probed(metric)
    assert probed().of_the_batch
    assert not hasattr(metric, "calls") and metric.noted == []


def test_so_does_one_that_fails():
    metric = Noting()
    probed = _probed(metric)
    metric.least = 5
    with pytest.raises(ValueError, match="of too few rows"):
        probed()
    assert not hasattr(metric, "calls") and metric.noted == []


@pytest.mark.backend("torch")
def test_a_fit_is_that_of_plain_keras():
    """On TensorFlow such an attribute is a constant of the traced step."""
    records = []
    for strategy in (None, "data=2"):
        metric = Noting()
        model = make(models.regressor, {"loss": "mse", "metrics": [metric]}, strategy)
        history = fit(model, **rows.regression(48), batch_size=16, epochs=2, verbose=0)
        records.append([history["noting"], metric.calls, metric.noted])
    compare("noting", "data=2", *records)
