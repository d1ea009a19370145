"""A model that was never compiled predicts."""

import keras
import models
import numpy as np
import pytest
import rows
from harness import LONG_WHERE_TRACED, compare

import parallel_keras as pk


@pytest.mark.parametrize(
    "strategy",
    ["data=3", *(pytest.param(s, marks=LONG_WHERE_TRACED) for s in ("model=2", "pipeline=2"))],
)
@pytest.mark.parametrize("build", [models.sequential_unbuilt, models.two_outputs])
def test_predict_without_compile(build, strategy):
    x = rows.classes()["x"]
    records = []
    for chosen in (None, strategy):
        keras.utils.set_random_seed(0)
        model = build()
        if chosen is not None:
            pk.parallelize(model, chosen)
        records.append(
            {
                "predict": model.predict(x, batch_size=16, verbose=0),
                "on_batch": model.predict_on_batch(x[:5]),
                "again": model.predict(x[:17], batch_size=16, verbose=0),
            }
        )
        model.set_weights([np.ones_like(w) for w in model.get_weights()])
        records[-1]["after writing"] = model.predict(x[:17], batch_size=16, verbose=0)
        if chosen is not None:
            model.set_strategy(None)  # what the workers hold comes home
            records[-1]["alone"] = model.predict(x[:17], batch_size=16, verbose=0)
        else:
            records[-1]["alone"] = records[-1]["after writing"]
    compare("uncompiled", strategy, *records)


def test_xla_is_refused_without_compile():
    model = pk.parallelize(models.mlp(), "data=2")
    model.jit_compile = True
    with pytest.raises(pk.UnsupportedError, match="jit_compile"):
        model.predict(rows.classes()["x"], verbose=0)
