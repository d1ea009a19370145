"""Values of any shape and type from rank to rank, in order, through the process group.

What a stage hands on may change its shape from batch to batch, carry a mask, or be
nothing at all. So each message starts with a header of fixed size, from which the
receiver makes room for what follows.
"""

import torch

from parallel_keras import keras_internals

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_MAX_RANK = 8
_WIDTH = _MAX_RANK + 3  # dtype, whether a gradient is wanted, number of dimensions, the dimensions
NOTHING = -1


class Channel:
    """One rank's messages to and from the other ranks.

    Args:
        group: The process group.
        device: This rank's `torch.device`.
    """

    def __init__(self, group, device):
        self.group = group
        self.device = device
        self._under_way: list = []

    def begin(self):
        """A step begins."""

    def send(self, rank, values):
        """Send values without waiting: each a tensor, with its Keras mask, or `None`."""
        flat = []
        for value in values:
            mask = None if value is None else keras_internals.keras_mask(value)
            flat += [value, mask]
        header = torch.tensor([described(tensor) for tensor in flat], dtype=torch.int64)
        self._send(rank, header)
        for tensor in flat:
            if tensor is not None and tensor.numel():
                self._send(rank, tensor.detach().contiguous())

    def receive(self, rank, count):
        """Wait for values that a rank has sent.

        Args:
            rank: Int.
            count: Int. How many values.

        Returns:
            A list of tensors and `None`. One requires a gradient where the sender's did.
        """
        header = torch.empty((2 * count, _WIDTH), dtype=torch.int64)
        self.group.recv([header], rank, 0).wait()
        flat = [self._receive(rank, row) for row in header.tolist()]
        for value, mask in zip(flat[::2], flat[1::2], strict=True):
            if mask is not None:
                keras_internals.set_keras_mask(value, mask)
        return flat[::2]

    def flush(self):
        """Wait until everything that was sent has left."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()

    def _send(self, rank, tensor):
        # The tensor has to live until it has left.
        self._under_way.append((self.group.send([tensor], rank, 0), tensor))

    def _receive(self, rank, row):
        code, wants_gradient, dimensions, *shape = row
        if code == NOTHING:
            return None
        tensor = torch.empty(shape[:dimensions], dtype=DTYPES[code], device=self.device)
        if tensor.numel():
            self.group.recv([tensor], rank, 0).wait()
        return tensor.requires_grad_() if wants_gradient else tensor


def described(tensor):
    """A row of a header."""
    if tensor is None:
        return [NOTHING] * _WIDTH
    if tensor.ndim > _MAX_RANK or tensor.dtype not in DTYPES:
        raise ValueError(
            f"What passes from stage to stage is a tensor of up to {_MAX_RANK} dimensions and an "
            f"ordinary type. Received: shape {tuple(tensor.shape)}, {tensor.dtype}"
        )
    padding = [0] * (_MAX_RANK - tensor.ndim)
    code = DTYPES.index(tensor.dtype)
    return [code, int(tensor.requires_grad), tensor.ndim, *tensor.shape, *padding]
