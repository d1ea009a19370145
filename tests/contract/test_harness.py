"""The harness itself sees what it has to see."""

import harness
import models
import numpy as np
import pytest
import rows
from cases import compiled


@pytest.fixture
def no_table(monkeypatch):
    monkeypatch.setattr(harness, "TABLE", [])


def _record(**change):
    record = {
        "history": {"loss": [1.0, 0.5]},
        "weights": {"0 dense/kernel": np.ones(3, "float32")},
        "predict": np.zeros((2, 2), "float32"),
    }
    return {**record, **change}


@pytest.mark.parametrize(
    "change",
    [
        {"history": {"loss": [1.0, 0.5001]}},
        {"history": {"loss": [1.0]}},
        {"history": {"loss": [1.0, np.nan]}},
        {"weights": {"0 dense_1/kernel": np.ones(3, "float32") + np.float32(2e-5)}},
        {"weights": {"0 dense_1/kernel": np.ones(3, "float16")}},
        {"weights": {}},
        {"predict": np.zeros((2, 1), "float32")},
        {"more": 1},
    ],
)
def test_a_difference_is_found(change, no_table):
    with pytest.raises(AssertionError):
        harness.compare("harness", "none", _record(), _record(**change))


def test_names_of_a_second_model_do_not_matter(no_table):
    again = _record(weights={"0 dense_7/kernel": np.ones(3, "float32")})
    assert harness.compare("harness", "none", _record(), again) == 0


def test_loose_variables_are_named(no_table):
    noise = _record(weights={"0 dense_7/kernel": np.zeros(3, "float32")})
    reason = {r"kernel$": "noise"}
    assert harness.compare("harness", "none", _record(), noise, loose=reason) == 0


def test_equal_seeds_make_equal_models_and_others_do_not():
    first, second = (harness.make(models.mlp, compiled()(), None) for _ in range(2))
    weights = [np.concatenate([w.ravel() for w in m.get_weights()]) for m in (first, second)]
    np.testing.assert_array_equal(*weights)
    # One row less shows: the tests are sharp enough to see a dropped row.
    data = rows.classes()
    harness.fit(first, **data, **harness.FIT)
    harness.fit(second, data["x"][:-1], data["y"][:-1], **harness.FIT)
    weights = [np.concatenate([w.ravel() for w in m.get_weights()]) for m in (first, second)]
    assert np.abs(weights[0] - weights[1]).max() > 100 * harness.TOLERANCE
