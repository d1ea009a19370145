"""One stream of random numbers for all devices of a kind.

torch draws on each device from a generator of that device. A layer without a seed would
draw on the second device what another one has drawn on the first, and nothing of it would
be what one device draws.
"""

import torch


def go_on(last, place):
    """Draw on a device from where another one has got to.

    Nothing waits for the devices: the state of a generator is in host memory.

    Args:
        last: String, as Keras calls the device that has computed.
        place: String. The one that computes next.
    """
    if last == place:
        return
    before, after = _numbered(last), _numbered(place)
    if before != after and _are_of_a_kind(before, after):
        _put(_state(before), after)


def _numbered(place):
    device = torch.device(place)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _are_of_a_kind(one, other):
    return one.type == other.type == "cuda"  # the devices of one CPU have one generator


def _state(device):
    return torch.cuda.get_rng_state(device)


def _put(state, device):
    torch.cuda.set_rng_state(state, device)
