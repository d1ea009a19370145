"""The one table of what runs where."""

import itertools

import pytest

from parallel_keras import capabilities
from parallel_keras.errors import UnsupportedError
from parallel_keras.strategies import (
    DataParallel,
    ModelParallel,
    PipelineParallel,
    SingleDevice,
)

STRATEGIES = {
    "single": SingleDevice(),
    "data": DataParallel(2),
    "model": ModelParallel(2),
    "pipeline": PipelineParallel(2),
}
CELLS = list(
    itertools.product(capabilities.FEATURES, capabilities.STRATEGIES, capabilities.BACKENDS)
)


@pytest.mark.parametrize("feature, strategy, backend", CELLS)
def test_each_cell_runs_or_says_why_not(feature, strategy, backend):
    line = capabilities.FEATURES[feature]
    reason = line.reason(strategy, backend)
    if reason is capabilities.RUNS:
        capabilities.check(feature, STRATEGIES[strategy], backend)
        return
    with pytest.raises(UnsupportedError) as caught:
        capabilities.check(feature, STRATEGIES[strategy], backend, received="this one")
    message = str(caught.value)
    assert line.title in message
    assert reason in message
    assert line.change and line.change in message, "a refusal says what to change"
    assert message.endswith("Received: this one")


def test_refusals_name_what_there_is():
    for feature in capabilities.FEATURES.values():
        for strategy, backend in feature.refused:
            assert strategy in capabilities.STRATEGIES
            assert backend in capabilities.BACKENDS


def test_the_table_of_the_docs_has_every_feature():
    lines = capabilities.as_markdown().splitlines()
    assert len(lines) == 2 + len(capabilities.FEATURES)
    columns = len(capabilities.STRATEGIES) * len(capabilities.BACKENDS)
    assert {line.count("|") for line in lines} == {columns + 3}
