"""What strategies have in common, and the one for a single device."""

from parallel_keras import backends
from parallel_keras.errors import UnsupportedError


class Strategy:
    """Base of the strategies. Compare, print and hash them like values."""

    name = ""
    lowering = ""

    def _fields(self):
        """The arguments that tell this strategy from another, in order."""
        return {}

    @property
    def devices(self):
        """Tuple of device names, such as `("gpu:0", "gpu:1")`."""
        raise NotImplementedError

    @property
    def num_replicas(self):
        """Int. How many copies of the model train on slices of a batch."""
        return 1

    @property
    def num_stages(self):
        """Int. Into how many parts the model is cut that work at the same time."""
        return 1

    def devices_for(self, needed):
        """The devices for a model whose places need this many.

        Args:
            needed: Int, zero for a model without places.
        """
        return self.devices

    def describe(self, rows, devices):
        """What the first `fit` says of how the work is spread.

        Args:
            rows: Int or `None`. The rows of a global batch, where they are known.
            devices: Tuple of the names of the devices that are used.
        """
        raise NotImplementedError

    def __eq__(self, other):
        return type(self) is type(other) and self._fields() == other._fields()

    def __hash__(self):
        return hash((type(self), tuple(self._fields().items())))

    def __repr__(self):
        arguments = ", ".join(
            f"{key}={list(value) if isinstance(value, tuple) else value!r}"
            for key, value in self._fields().items()
        )
        return f"{type(self).__name__}({arguments})"

    def __setattr__(self, name, value):
        raise AttributeError(
            f"{type(self).__name__} cannot be changed once made. Make a new one "
            "and pass it to `model.set_strategy` or `model.compile`. "
            f"Received: {name}={value!r}"
        )

    def __mul__(self, other):
        raise UnsupportedError(
            "Products of strategies are not supported yet. Supported: None, "
            f"'single', 'data', 'model', 'pipeline'. Received: {self!r} * {other!r}"
        )


class SingleDevice(Strategy):
    """One device: Keras as it is.

    Example:

    >>> import parallel_keras as pk
    >>> pk.SingleDevice() == pk.SingleDevice()
    True
    """

    name = "single"
    lowering = "single"

    @property
    def devices(self):
        return (backends.current().devices.available()[0],)
