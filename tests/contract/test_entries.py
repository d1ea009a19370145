"""Gradients of tables on TensorFlow, in graphs that know how many rows a batch has."""

import keras
import models
import pytest
import rows
import stage_models
from cases import adam, compiled
from harness import compare, make, state

import parallel_keras as pk

pytestmark = pytest.mark.backend("tensorflow")

STRATEGIES = [
    "data=2",
    pytest.param(pk.PipelineParallel(2, microbatches=2), marks=pytest.mark.long),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "build",
    [
        models.positions,
        models.positions_of_each_row,
        pytest.param(models.embedding, marks=pytest.mark.long),
        pytest.param(stage_models.tied, marks=pytest.mark.long),
    ],
)
def test_entries_where_the_number_of_rows_is_known(build, strategy):
    """The same places for all rows and places of each row may be equally many numbers."""
    data = rows.tokens()
    records = []
    for one in (None, strategy):
        model = make(build, compiled(adam)(), one)
        logs = []
        for start, count in ((0, 4), (4, 2), (6, 5), (11, 4)):
            part = slice(start, start + count)
            logs.append(model.train_on_batch(data["x"][part], data["y"][part]))
        records.append({"logs": logs, **state(model)})
    compare(build.__name__, strategy, *records)


def test_without_a_graph_entries_are_refused():
    model = pk.parallelize(models.embedding())
    model.compile(**compiled(adam)(), run_eagerly=True, strategy="data=2")
    with pytest.raises(pk.UnsupportedError, match="(?s)run_eagerly.*Received"):
        model.fit(**rows.tokens(), verbose=0)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 0
