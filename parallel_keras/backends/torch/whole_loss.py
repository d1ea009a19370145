"""Loss and metrics of a whole batch, from the outputs that several ranks have computed.

Where a loss or a metric does not add up over the rows (a mean over unmasked steps, a
comparison of rows with one another, a maximum), the outputs come together in one rank,
in the order of the rows. There Keras computes loss and metrics once, as on one device,
and each rank gets the gradient of its own outputs back, which add up over the ranks.
"""

import torch

from parallel_keras import batch, capabilities, keras_internals
from parallel_keras.backends.torch.channel import Channel
from parallel_keras.backends.torch.structures import fill, leaves
from parallel_keras.strategies import DataParallel


class WholeLoss:
    """The loss of whole batches under `DataParallel`, which rank 0 computes.

    Args:
        model: This rank's Keras model.
        rank, world_size, group, device: This rank's place among the ranks.
    """

    def __init__(self, model, rank, world_size, group, device):
        self.model = model
        self.rank = rank
        self.world_size = world_size
        self.channel = Channel(group, device)

    def compute(self, y_pred, added, targets, total, differentiate, with_idle):
        """Loss and metrics, once; called on all ranks that have computed outputs.

        Args:
            y_pred: This rank's outputs.
            added: Scalar tensor, what this rank's forward pass adds to the loss.
            targets: On rank 0 `(y, sample_weight)` of the whole batch.
            total: Int. The rows of the batch.
            differentiate: Bool.
            with_idle: Bool. Whether the ranks without rows have computed outputs too, which do
                not count, and get a gradient of zero.

        Returns:
            The gradient of the scaled loss for each of this rank's outputs, `None` where there
            is none. An empty list if not asked for.
        """
        outputs = leaves(y_pred)
        if self.rank == 0:
            found = self._of_whole(y_pred, outputs, added, targets, total, differentiate, with_idle)
        else:
            has_rows = batch.row_counts(total, self.world_size)[self.rank] > 0
            if has_rows:
                self.channel.send(0, [*outputs, added])
            found = self.channel.receive(0, len(outputs)) if differentiate else []
            if differentiate and not has_rows:
                pairs = zip(outputs, found, strict=True)
                found = [None if g is None else torch.zeros_like(output) for output, g in pairs]
        self.channel.flush()
        return found

    def _of_whole(self, y_pred, outputs, added, targets, total, differentiate, with_idle):
        rows = batch.row_slices(total, self.world_size)
        shares = batch.shares(total, self.world_size)
        others = [rank for rank in range(1, self.world_size) if shares[rank]]
        parts, added = [outputs], added.detach() * shares[0]
        for rank in others:
            *of_rank, one = self.channel.receive(rank, len(outputs) + 1)
            parts.append(of_rank)
            added = added + one.detach() * shares[rank]
        whole = [together(pieces) for pieces in zip(*parts, strict=True)]
        refuse_other_rows(whole, total, DataParallel(self.world_size))
        y_pred = fill(y_pred, whole)

        def compiled():
            return keras_internals.compiled_loss(self.model, targets, y_pred)

        if differentiate:
            losses, gradients = with_gradients(compiled, whole, self.model.optimizer.scale_loss)
            for rank in range(1, self.world_size) if with_idle else others:
                self.channel.send(rank, [None if g is None else g[rows[rank]] for g in gradients])
        else:
            losses, gradients = compiled(), []
        with torch.no_grad():
            loss = keras_internals.add_up_losses([*losses, added])
            keras_internals.update_metrics(self.model, targets, y_pred, loss, total)
        return [None if g is None else g[rows[0]] for g in gradients]


def with_gradients(loss, outputs, scale):
    """Losses, and their gradient.

    Args:
        loss: Function that computes a list of losses from the outputs.
        outputs: List of tensors without a history.
        scale: The optimizer's `scale_loss`.

    Returns:
        The losses, and a list with the gradient of the scaled ones for each of `outputs`,
        `None` where there is none.
    """
    floats = [output.requires_grad_() for output in outputs if output.is_floating_point()]
    with torch.enable_grad():
        losses = loss()
        scaled = [scale(one) for one in losses if one.requires_grad]
    found = iter([None] * len(floats))
    if scaled:
        found = iter(torch.autograd.grad(scaled, floats, allow_unused=True))
    for output in floats:
        output.requires_grad_(False)
    gradients = [next(found) if output.is_floating_point() else None for output in outputs]
    return [one.detach() for one in losses], gradients


def backward(pairs):
    """Go back from several tensors at once.

    Args:
        pairs: List of a tensor and its gradient. `None` is one for a scalar, and none for others.
    """
    pairs = [(t, g) for t, g in pairs if t.requires_grad and not (t.ndim and g is None)]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])


def refuse_other_rows(outputs, rows, strategy):
    """Refuse outputs that do not have an entry for each row."""
    for output in outputs:
        if output.ndim == 0 or output.shape[0] != rows:
            capabilities.check(
                "row_output",
                strategy,
                "torch",
                f"an output of shape {tuple(output.shape)} for {rows} rows",
            )


def together(parts):
    """The parts of an output in one tensor, and their masks in one."""
    whole = torch.cat([part.detach() for part in parts])
    masks = [keras_internals.keras_mask(part) for part in parts]
    if masks[0] is not None:
        keras_internals.set_keras_mask(whole, torch.cat(masks))
    return whole
