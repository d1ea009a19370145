"""How long a layer computes, from what it costs and how fast a device is. Pure."""

import dataclasses
import math

_ELEMENT = 4  # bytes of an element of what passes between layers


@dataclasses.dataclass(frozen=True)
class Rates:
    """How fast one device is at what a step consists of.

    Attributes:
        products: Pair of FLOPs a second of matrix products, in a forward pass and in a
            backward pass.
        convolutions: The same of convolutions.
        bytes: Bytes a second that are read and written.
        per_layer: Pair of seconds that a layer takes in any case, forward and backward.
        update: Seconds for each byte of a trained weight that the optimizer updates.
        together: How many such devices work at the same time at full speed, where they are
            parts of one machine; `None` for all.
    """

    products: tuple
    convolutions: tuple
    bytes: float
    per_layer: tuple
    update: float
    together: float | None = None


@dataclasses.dataclass(frozen=True)
class LayerTime:
    """The seconds that a layer takes in a step: of each pass, and of its update."""

    forward: float
    backward: float
    update: float


def layer_times(costs, rates, recompute=False):
    """The times of a model's layers.

    A pass computes or moves bytes, whichever takes longer. A backward pass computes the
    gradient of what the layer was given, where something before it trains, and that of its
    weights, where they train: each takes as long as a forward pass.

    Args:
        costs: List of `LayerCost` for the rows of a pass, in the order in which they run.
        rates: `Rates`.
        recompute: Bool. Whether the forward pass is computed again for the backward pass.

    Returns:
        List of `LayerTime`.

    >>> from parallel_keras.plan import LayerCost
    >>> rates = Rates((1e9, 5e8), (1e9, 5e8), 1e9, per_layer=(1.0, 2.0), update=1e-6)
    >>> dense = LayerCost("a", "Dense", 4000, 4000, 0, 0, 2_000_000_000, (8, 32))
    >>> layer_times([dense, dense], rates)
    [LayerTime(forward=3.0, backward=6.0, update=0.004), \
LayerTime(forward=3.0, backward=10.0, update=0.004)]
    """
    found, flows = [], False
    for cost in costs:
        moved = (cost.parameters + 2 * _output_bytes(cost.output_shape)) / rates.bytes
        flops = rates.convolutions if "Conv" in cost.kind else rates.products
        forward = rates.per_layer[0] + max(cost.flops / flops[0], moved)
        trains = cost.gradients > 0
        passes = trains + flows
        backward = rates.per_layer[1] if passes else 0.0
        # Gradients of weights are added to those of the micro-batches before.
        moved = passes * moved + 2 * cost.gradients / rates.bytes
        backward += max(passes * cost.flops / flops[1], moved)
        if recompute:
            backward += forward
        found.append(LayerTime(forward, backward, cost.gradients * rates.update))
        flows = flows or trains
    return found


def _output_bytes(shape):
    """Bytes of an output, or of several."""
    if shape and isinstance(shape[0], (tuple, list)):
        return sum(_output_bytes(part) for part in shape)
    return _ELEMENT * math.prod(size for size in shape if size is not None)


def output_bytes(cost):
    """The bytes of what a layer gives."""
    return _output_bytes(cost.output_shape)
