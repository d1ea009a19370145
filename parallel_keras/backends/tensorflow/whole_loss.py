"""Loss and metrics of a whole batch, from the outputs for parts of its rows.

Where a loss or a metric does not add up over the rows (a mean over unmasked steps, a
comparison of rows with one another, a maximum), the outputs come together on one device,
in the order of the rows. There Keras computes loss and metrics once, as on one device,
and each part gets the gradient of its own outputs back, which add up over the parts.
"""

import tensorflow as tf
from keras import tree

from parallel_keras import keras_internals
from parallel_keras.backends.tensorflow import logits, variables
from parallel_keras.backends.tensorflow.rows import Rows
from parallel_keras.backends.tensorflow.runtime import per_replica


class WholeLoss:
    """The loss of one whole batch under `DataParallel`.

    Args:
        model: The Keras model.
        strategy: Our `DataParallel`, for messages.
        replicas: Int.
        data: `(x, y, sample_weight)` of the whole batch.
        total: Int or scalar tensor, its rows.
    """

    def __init__(self, model, strategy, replicas, data, total):
        self.model = model
        self.strategy = strategy
        self.targets = data[1:]
        self.total = total
        self.rows = [Rows(total, replicas, number) for number in range(replicas)]

    def compute(self, y_pred, added, differentiate):
        """Loss and metrics, once; called on each replica, which waits for the others.

        Args:
            y_pred: This replica's outputs.
            added: List of scalars that its forward pass adds to the loss.
            differentiate: Bool.

        Returns:
            List of pairs of an output, or its logits, and the gradient of the scaled loss
            for it.
        """
        context = tf.distribute.get_replica_context()
        gradients = context.merge_call(self._of_whole, args=(y_pred, added, differentiate))
        outputs = logits.parts_of(tree.flatten(y_pred))
        pairs = zip(outputs, gradients, strict=True) if differentiate else ()
        return [(output, gradient) for output, gradient in pairs if gradient is not None]

    def _of_whole(self, mirrored, y_pred, added, differentiate):
        """The same where all replicas have come together."""
        local = mirrored.experimental_local_results
        with tf.device(mirrored.extended.worker_devices[0]):
            y_pred = tree.map_structure(
                lambda leaf: together(local(leaf), self.rows, self.strategy, self.total), y_pred
            )
            # Nothing is assigned before all is computed, and then with a copy on each device.
            with keras_internals.ObservingScope() as scope:
                gradients = self._compute(y_pred, [local(loss) for loss in added], differentiate)
        for variable in scope.assigned.values():
            variables.assign_whole(variable, scope.assigned_value(variable), mirrored)
        return per_replica(
            [None if g is None else part_of_gradient(g, rows) for g in gradients]
            for rows in self.rows
        )

    def _compute(self, y_pred, added, differentiate):
        def loss():
            return keras_internals.compiled_loss(self.model, self.targets, y_pred)

        if differentiate:
            scale = self.model.optimizer.scale_loss
            outputs = logits.parts_of(tree.flatten(y_pred))
            losses, gradients = with_gradients(loss, outputs, scale)
        else:
            losses, gradients = loss(), []
        losses += [self._mean(parts) for parts in added]
        total = keras_internals.add_up_losses(losses)
        keras_internals.update_metrics(self.model, self.targets, y_pred, total, self.total)
        return gradients

    def _mean(self, parts):
        # What a replica without rows computed may be anything, NaN too.
        pairs = zip(parts, self.rows, strict=True)
        return tf.add_n([tf.math.multiply_no_nan(p, rows.share(p.dtype)) for p, rows in pairs])


def with_gradients(loss, outputs, scale):
    """Losses, and their gradient.

    Args:
        loss: Function that computes a list of losses from the outputs.
        outputs: List of tensors.
        scale: The optimizer's `scale_loss`.

    Returns:
        The losses, and a list with the gradient of the scaled ones for each of `outputs`,
        `None` where there is none.
    """
    floating = [output for output in outputs if output.dtype.is_floating]
    with tf.GradientTape() as tape:
        tape.watch(floating)
        losses = loss()
        scaled = [scale(loss) for loss in losses]
    # One whose rows are picked comes as entries.
    dense = [
        None if g is None else tf.convert_to_tensor(g) for g in tape.gradient(scaled, floating)
    ]
    found = iter(dense)
    return losses, [next(found) if output.dtype.is_floating else None for output in outputs]


def together(parts, rows, strategy, total):
    """Tensors of all parts of a batch as one, with their Keras masks and logits.

    Args:
        parts: List of tensors.
        rows: List of the `Rows` of each.
        strategy: A `Strategy`, for messages.
        total: Int or scalar tensor, the rows of the batch.
    """

    def make(found):
        return _concatenated(found, rows, strategy, total)

    whole = logits.keep(make(parts), parts, make)
    masks = [keras_internals.keras_mask(part) for part in parts]
    if masks[0] is not None:
        keras_internals.set_keras_mask(whole, make(masks))
    return whole


def _concatenated(parts, rows, strategy, total):
    own = [r.own(part, strategy) for part, r in zip(parts, rows, strict=True)]
    whole = tf.concat(own, axis=0)
    # Where Keras knows the number of rows when it traces, it is known here.
    known = total if isinstance(total, int) else None
    whole.set_shape([known, *whole.shape[1:]])
    return whole


def part_of_gradient(gradient, rows):
    """What some rows have of the gradient of a tensor of `together`; zeros for no rows."""
    part = gradient[rows.start : rows.start + rows.size]
    return tf.where(rows.some, part, tf.zeros_like(part)) if rows.may_be_none else part
