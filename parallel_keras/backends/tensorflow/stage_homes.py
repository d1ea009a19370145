"""Where a pipeline's variables live: each with the first stage that uses it.

Optimizer slots are where their variables are, metrics with the last stage. Moving is
what ModelParallel does; layers compute as they are, since a step brings each stage to
its device as a whole.
"""

from typing import Any

from parallel_keras.backends.tensorflow import model
from parallel_keras.backends.tensorflow.devices import tf_device


class StageHomes(model.Lowering):
    """The devices of one model's variables.

    Args:
        model: A Keras model.
        strategy: A `PipelineParallel`.
        devices: Tuple of device names, one for each stage.
    """

    def __init__(self, model, strategy, devices):
        super().__init__(model, strategy)
        self.devices = devices
        self.cut: Any = None

    def settle(self, cut):
        """Bring every variable to its stage; cheap for those that are there.

        Args:
            cut: A `Staged`.
        """
        self.changed_devices()
        self.cut = cut
        self.last = len(cut.stages) - 1
        self._settle()

    def _homes_of_weights(self):
        return {id(v): stage.number for stage in self.cut.stages for v in stage.variables}

    def device(self, number):
        """TensorFlow's name of a stage's device."""
        return tf_device(self.devices[number])
