"""What `fit` and `compile` do: losses, metrics, building, batches."""

import contextlib

import keras

from parallel_keras.keras_internals.layers import (
    compute_output_spec,
    flatten_layers,
    own_losses,
)


def compile_metrics_of(model):
    """The container of the metrics that `compile` was given, or None. trainer.py, 3.15.1."""
    return model._compile_metrics


def compile_loss_of(model):
    """The container of the losses that `compile` was given, or None. trainer.py, 3.15.1."""
    return model._compile_loss


def clear_losses(model):
    """Forget the losses that the last call of a model added. layer.py, 3.15.1."""
    model._clear_losses()


def compiled_loss(model, targets, y_pred):
    """A list with the compiled loss, empty where there is none.

    Args:
        model: A compiled Keras model.
        targets: `(y, sample_weight)`.
        y_pred: Outputs as the model gives them.
    """
    compiled = compile_loss_of(model)
    y, sample_weight = targets
    loss = None if compiled is None else compiled(_whole(y, y_pred), y_pred, sample_weight)
    return [] if loss is None else [loss]


def is_about_no_batch(error):
    """Whether an UnboundLocalError is that of `predict` without a batch. trainer.py, 3.15.1."""
    return "'batch_outputs'" in str(error)


def update_metrics(model, targets, y_pred, loss, rows):
    """The metrics of a step, by Keras's own rule. trainer.py, 3.15.1."""
    y, sample_weight = targets
    loss_tracker(model).update_state(loss, sample_weight=rows)
    metrics = compile_metrics_of(model)
    if metrics is not None:
        metrics.update_state(y, y_pred, sample_weight)


def no_gradient():
    """A scope in which the backend records no gradients."""
    if keras.backend.backend() == "torch":
        import torch

        return torch.no_grad()
    return contextlib.nullcontext()


def compute_loss(model, x, y, y_pred, sample_weight, training):
    """A model's loss by Keras's own rule, regularizers included. trainer.py, 3.15.1."""
    y = _whole(y, y_pred)
    return model._compute_loss(
        x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
    )


def _whole(y, y_pred):
    """Targets that Keras will not take apart.

    compile_utils.py, 3.15.1: a tensor that is the target of one of several outputs, the
    losses of the others being `None`, is taken for a list of targets where it has as many
    rows as there are outputs. A part of a batch may have those.
    """
    lone = y is not None and not keras.tree.is_nested(y)
    return [y] if lone and len(keras.tree.flatten(y_pred)) > 1 else y


def added_losses(model):
    """What the last call of a model adds to the loss, regularizers included. trainer.py, 3.15.1."""
    return [model._aggregate_additional_loss(loss) for loss in model.losses]


def added_by_layers(model):
    """Dict of what each layer adds to the loss in the last call of a model.

    Its keys are those of `take_losses`. Regularizers of weights are not among them.
    """
    found = own_losses(enumerate(flatten_layers(model)))
    return {key: model._aggregate_additional_loss(loss) for key, loss in found.items()}


def add_up_losses(losses):
    """The loss in the logs, from a list of scalars. trainer.py, 3.15.1."""
    if not losses:
        raise ValueError("No loss to compute. Provide a `loss` argument in `compile()`.")
    return losses[0] if len(losses) == 1 else keras.ops.sum(losses)


def loss_tracker(model):
    """The metric behind the logs' "loss". trainer.py, 3.15.1."""
    return model._loss_tracker


def unpack(data):
    """A batch as `(x, y, sample_weight)`, by Keras's own rule."""
    return keras.utils.unpack_x_y_sample_weight(data)


def symbolic_build(model, data, kind):
    """Build what a kind of step needs, for batches like this one. trainer.py, 3.15.1.

    Args:
        model: A Keras model.
        data: `(x, y, sample_weight)` of tensors or symbolic inputs; `(x,)` to
            predict.
        kind: `"train"`, `"test"` or `"predict"`.
    """
    if kind == "predict":
        symbols = keras.tree.map_structure(
            lambda leaf: None if leaf is None else keras.KerasTensor(leaf.shape, leaf.dtype), data
        )
        compute_output_spec(model, symbols[0], training=False)
        return
    optimizer = model.optimizer
    if kind == "test":
        # Keras would build it too; in plain evaluate it stays as it is.
        vars(model)["optimizer"] = None
    try:
        model._symbolic_build(data_batch=data)
    finally:
        vars(model)["optimizer"] = optimizer


def build_optimizer(model):
    """Make an optimizer's slots, if the weights are there. trainer.py, 3.15.1.

    `built` of a subclassed model may say nothing about its layers.
    """
    if model.optimizer is None or model.optimizer.built or not is_built(model, "predict"):
        return
    model.optimizer.build(model.trainable_variables)


def is_built(model, kind):
    """Whether a model is built as far as a kind of step needs. trainer.py, 3.15.1."""
    parts = list(flatten_layers(model))
    if kind != "predict":
        parts += [model._compile_loss, model._compile_metrics]
    if kind == "train":
        parts.append(model.optimizer)
    return all(part is None or part.built for part in parts)


def output_loss_metrics(model):
    """The metrics of the single outputs' losses. compile_utils.py, 3.15.1."""
    return [] if model._compile_loss is None else list(model._compile_loss.metrics)


def is_array_adapter(adapter):
    """Whether a fit's data are arrays. trainers/data_adapters/array_data_adapter.py, 3.15.1."""
    return type(adapter).__name__ == "ArrayDataAdapter"


def shuffle_of(adapter):
    """The `shuffle=` of an array adapter. array_data_adapter.py, 3.15.1."""
    return adapter._shuffle


def loader_of(adapter):
    """The DataLoader of an adapter, or None. torch_data_loader_adapter.py, 3.15.1."""
    return getattr(adapter, "_dataloader", None)


def wrap_batches(epoch_iterator, wrap):
    """Have an epoch iterator's batches pass through `wrap`. trainers/epoch_iterator.py, 3.15.1."""
    stock = epoch_iterator._get_iterator
    epoch_iterator._get_iterator = lambda: wrap(stock())


def stock_symbolic_build(model, *args, **kwargs):
    """Keras's own building from a fit's iterator. trainers/trainer.py, 3.15.1."""
    return type(model)._symbolic_build(model, *args, **kwargs)


def batches_of(epoch_iterator):
    """The data set that a fit reads. backend/tensorflow/trainer.py, 3.15.1."""
    return epoch_iterator._distributed_dataset
