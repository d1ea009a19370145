"""Does what the user wrote add up over the rows? Asked of the first batch.

Most of Keras's own losses and metrics are known to. For a loss, a metric or a layer
of the user's own there is one way to know: compute it on some rows at once and on
two uneven parts of them, and compare the first with the combination of the
others. A loss or a metric that does not add up needs the whole batch; a layer, which
sees only the rows of its device, is refused by name, before any weight changes.

Everything runs under a stateless scope: no variable is touched. What a backend holds
beside them, as the buffers of `torch.nn` modules, is put back.
"""

from keras import tree

from parallel_keras import backends, batch, capabilities, keras_internals, loss_state, resting
from parallel_keras.errors import UnsupportedError
from parallel_keras.probe_forward import Forward, probe_forward
from parallel_keras.probe_known import (
    Findings as Findings,
    is_enough as is_enough,
    known as known,
    needs_probe as needs_probe,
    unknown_losses,
)
from parallel_keras.probe_losses import probe_losses
from parallel_keras.probe_metrics import metrics_that_read, probe_metrics
from parallel_keras.probe_rows import rows_of, take
from parallel_keras.tolerances import tolerance_of

# Rows are cut as 4 + 3: uneven, so that a mean of means shows.
MAX_ROWS = 7


def probe(model, strategy, x, y=None, sample_weight=None):
    """Compare the whole of the first rows with the combination of two parts.

    Args:
        model: A built, compiled Keras model.
        strategy: The `Strategy`, for messages.
        x, y, sample_weight: The first batch, as backend tensors.

    Returns:
        `Findings`.

    Raises:
        UnsupportedError: If something does not add up, and is not supported so.
    """
    if not needs_probe(model):
        return known(model)
    rows = min(MAX_ROWS, rows_of(x))
    data = take((x, y, sample_weight), slice(0, rows))
    parts = batch.row_slices(rows, 2)
    shares = batch.shares(rows, 2)

    def refuse(feature, received):
        capabilities.check(feature, strategy, backends.name(), received)

    scope = backends.room("step_scope")
    kept, rest = scope.Kept(model), resting.Rest()
    try:
        with tolerance_of(model), scope.layers_at_rest(rest):
            forward = Forward(model, kept, rest)
            try:
                y_pred, summed = probe_forward(forward, data, parts, shares, refuse)
            except UnsupportedError:
                raise
            except Exception as error:
                if _runs(forward, (x, y, sample_weight)):
                    refuse("batch_size", str(error).strip().partition("\n\nArguments")[0])
                raise
            found = _probe_compiled(model, data, y_pred, parts, shares, refuse)
            late = "" if data[1] is None else metrics_that_read(model, data, y_pred)
    finally:
        kept.restore()
    return found._replace(summed=summed, late=late)


def _probe_compiled(model, data, y_pred, parts, shares, refuse):
    """Compare what `compile` was given: losses and metrics."""
    found = known(model)
    if not model.compiled or data[1] is None or found.of_the_batch:
        return found
    losses = unknown_losses(model)
    with loss_state.kept(losses):
        beside = loss_state.look_at(model, losses, data[1:], y_pred)
    for feature, received in (
        ("loss_state", beside.computed_with),
        ("loss_assigns", beside.assigned),
        ("loss_reads", beside.read),
    ):
        if received:
            refuse(feature, received)
    if beside.computed_with:
        return Findings(of_the_batch=beside.computed_with)
    if any(keras_internals.keras_mask(leaf) is not None for leaf in tree.flatten(y_pred)):
        return Findings(of_the_batch="the loss of an output with a mask")
    with loss_state.kept(losses):
        loss = probe_losses(model, data, y_pred, parts, shares)
    if loss:
        refuse("batch_loss", loss)
        return Findings(of_the_batch=loss)
    if beside.changed:
        return Findings(of_the_batch=beside.changed)
    return probe_metrics(model, data, y_pred, parts, shares)


def _runs(forward, data):
    """Whether a forward pass over a whole batch works, where one over some of its rows does not."""
    try:
        forward(data, training=True)
    except Exception:
        keras_internals.clear_losses(forward.model)
        return False
    return True
