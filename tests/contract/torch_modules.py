"""Models with `torch.nn` modules in them. Torch only."""

import os
import pathlib

import keras
import torch
from keras import layers
from torch import nn

FEATURES, KINDS = 6, 3


class Running(nn.Module):
    """A dense layer that keeps a mean over the rows, and counts; a constant as well."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(FEATURES, 8)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32))
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("constant", torch.arange(float(FEATURES)), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x):
        if self.training:
            self.seen = self.seen + 1  # another tensor
            self.calls += 1
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return torch.relu(self.dense(x + 0.01 * self.constant))


class Rows(nn.Module):
    """Counts rows, which no replica can for the others."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.rows += x.shape[0]
        return x


class LaterRows(Rows):
    """Counts rows once it has seen two batches."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return super().forward(x) if self.calls > 2 else x


class Largest(nn.Module):
    """Keeps a maximum over the rows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.largest = torch.maximum(self.largest, x.detach().max())
        return x


class Always(nn.Module):
    """Counts in inference too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        return x


class Noting(nn.Module):
    """Notes in a folder how many rows a process computed."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def forward(self, x):
        pathlib.Path(self.folder, str(os.getpid())).write_text(str(len(x)))
        return x


def wrapped(module, width, name):
    return layers.TorchModuleWrapper(module, output_shape=(None, width), name=name)


def _model(*modules):
    x = y = keras.Input((FEATURES,))
    for number, (module, width) in enumerate(modules):
        y = wrapped(module, width, f"module{number}")(y)
    return keras.Model(x, layers.Dense(KINDS, activation="softmax", name="head")(y))


def running():
    return _model((Running(), 8))


def linear():
    return _model((nn.Sequential(nn.Linear(FEATURES, 8), nn.GELU()), 8))


def spectral():
    dense = nn.utils.parametrizations.spectral_norm(nn.Linear(FEATURES, 8))
    return _model((dense, 8))


def batch_norm():
    return _model((nn.BatchNorm1d(FEATURES), FEATURES), (nn.Linear(FEATURES, 8), 8))


def dropout():
    return _model((nn.Sequential(nn.Linear(FEATURES, 64), nn.Dropout(0.5)), 64))


def sync_batch_norm():
    return _model((nn.SyncBatchNorm(FEATURES), FEATURES))


def old_spectral_norm():
    return _model((nn.utils.spectral_norm(nn.Linear(FEATURES, 8)), 8))


def counts_rows():
    return _model((Rows(), FEATURES))


def counts_rows_later():
    return _model((LaterRows(), FEATURES))


def counts_rows_beside_dropout():
    """Where random draws hide the rest, whole numbers are compared all the same."""
    x = keras.Input((FEATURES,))
    y = wrapped(Rows(), FEATURES, "module0")(layers.Dropout(0.5)(x))
    return keras.Model(x, layers.Dense(KINDS, activation="softmax")(y))


def keeps_largest():
    return _model((Largest(), FEATURES))


def noting(folder):
    return _model((Noting(folder), FEATURES))


def counts_always():
    return _model((Always(), FEATURES))


class Bare(keras.Model):
    """Modules as plain attributes, a buffer of the model's own, and ones in a ModuleList."""

    def __init__(self):
        super().__init__()
        self.first = Running()
        self.others = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = layers.Dense(KINDS, activation="softmax")
        self.register_buffer("steps", torch.zeros(()))

    def build(self, input_shape):
        self.head.build((None, 8))

    def call(self, x, training=False):
        if training:
            self.steps = self.steps + 1
        y = self.first(x)
        for module in self.others.module:
            y = torch.relu(module(y))
        return self.head(y)


class InAList(keras.Model):
    """A module that neither Keras nor torch sees."""

    def __init__(self):
        super().__init__()
        self.kept = [nn.BatchNorm1d(FEATURES)]
        self.head = layers.Dense(KINDS, activation="softmax")

    def call(self, x):
        return self.head(self.kept[0](x))


class OwnStep(Bare):
    """A training step of its own, with buffers that move."""

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        loss.backward()
        self.optimizer.apply([v.value.grad for v in self.trainable_weights])
        return {"loss": loss}


class NormStep(keras.Model):
    """A training step of its own, with a BatchNorm1d that decides nothing in it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(FEATURES)
        self.head = layers.Dense(KINDS, activation="softmax")

    def call(self, x, training=False):
        return self.head(self.norm(x) if not training else x + 0 * self.norm(x).detach())

    train_step = OwnStep.train_step


def buffers(model):
    """All buffers of a model by name, as tensors that stay what they are."""
    found = {}
    for layer in model._flatten_layers():
        for name, buffer in layer._buffers.items():
            if buffer is not None:
                found[f"{len(found)}.{name}"] = buffer.detach().clone()
        if isinstance(layer, layers.TorchModuleWrapper):
            found |= {
                f"{len(found)}.{name}": buffer.detach().clone()
                for name, buffer in layer.module.named_buffers()
            }
    return found
