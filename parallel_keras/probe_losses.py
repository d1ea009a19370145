"""Is the compiled loss a mean over the rows?"""

import numpy as np
from keras import ops, tree

from parallel_keras import backends, keras_internals, stress
from parallel_keras.probe_known import unknown_losses
from parallel_keras.probe_rows import as_array, mean_of, name_of, sum_rows, take
from parallel_keras.tolerances import close, nudge, roughly


def probe_losses(model, data, y_pred, parts, shares):
    """A string that tells of losses that do not add up; empty where all do."""
    unknown = unknown_losses(model)
    if not unknown:
        return ""
    # Twice: with the predictions, and with those of the neighbouring row, so
    # that a coincidence at the start of training does not pass.
    # Copies: of the outputs Keras may know more than their numbers, of a part of them not.
    for shift in (0, 1):
        predictions = tree.map_structure(lambda t, by=shift: ops.roll(t, by, axis=0), y_pred)
        whole, slopes = _loss(model, data, predictions)
        pieces = [_loss(model, take(data, part), take(predictions, part)) for part in parts]
        together = mean_of([value for value, _ in pieces], shares)
        names = ", ".join(name_of(loss) for loss in unknown)
        if not close(whole, together):
            return (
                f"loss={names}: {float(whole):.6g} on {sum_rows(parts)} rows, "
                f"{float(together):.6g} from its parts"
            )
        if not _same_slopes(slopes, [found for _, found in pieces], shares, close):
            return f"loss={names}: its gradient on all rows is not that on parts of them"
    for said, rows, predictions in stress.predictions(data, y_pred, parts[0].stop, model):
        if _is_a_mean_of_large(model, rows, predictions, parts, shares):
            continue
        names = ", ".join(name_of(loss) for loss in unknown)
        return f"loss={names}, with larger numbers ({said}), is no mean over the rows"
    return ""


def _is_a_mean_of_large(model, data, predictions, parts, shares):
    """Whether a loss of large numbers adds up, as far as that can be told."""

    def add_up(whole, pieces, shares):
        values, slopes = zip(*pieces, strict=True)
        same = roughly(whole[0], mean_of(values, shares))
        return same and _same_slopes(whole[1], slopes, shares, roughly)

    try:
        whole = _loss(model, data, predictions)
        pieces = [_loss(model, take(data, part), take(predictions, part)) for part in parts]
        if add_up(whole, pieces, shares):
            return True
        rounded = tree.map_structure(lambda t: t * (1.0 + nudge()), predictions)
        return not add_up(whole, [_loss(model, data, rounded)], [1.0])
    except Exception:
        return True  # it has no answer to such numbers


def _loss(model, data, y_pred):
    """The compiled loss, and its gradient for each output."""
    with keras_internals.ObservingScope():
        (value,), slopes = backends.room("whole_loss").with_gradients(
            lambda: keras_internals.compiled_loss(model, data[1:], y_pred),
            tree.flatten(y_pred),
            lambda loss: loss,
        )
    return as_array(value), [None if slope is None else as_array(slope) for slope in slopes]


def _same_slopes(whole, pieces, shares, near):
    """Whether the gradient of each row is, by its share, that in the row's part."""
    for slope, *parts in zip(whole, *pieces, strict=True):
        if slope is None or any(part is None for part in parts):
            if slope is not None or any(part is not None for part in parts):
                return False
            continue
        weighted = [share * part for share, part in zip(shares, parts, strict=True)]
        if not near(slope, np.concatenate(weighted)):
            return False
    return True
