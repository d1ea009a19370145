"""What the user asks for: plain, frozen, comparable, printable objects.

A strategy holds no device and starts nothing. `lowering` names the room of
`backends/<backend>/` that turns it into train, test and predict functions.
"""

from parallel_keras.strategies.base import SingleDevice, Strategy
from parallel_keras.strategies.data import DataParallel
from parallel_keras.strategies.model import ModelParallel
from parallel_keras.strategies.parsing import parse
from parallel_keras.strategies.pipeline import PipelineParallel

__all__ = [
    "DataParallel",
    "ModelParallel",
    "PipelineParallel",
    "SingleDevice",
    "Strategy",
    "parse",
]
