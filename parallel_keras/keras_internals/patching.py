"""What is put in the place of a function of Keras or TensorFlow, for the whole process, once."""

import functools

_in_place: set = set()


def patch_once(owner, name):
    """Put a function in the place of another, unless it stands there already.

    Args:
        owner: The class or module.
        name: The name of the function there.

    Returns:
        A decorator of a function that takes the stock function and returns what calls it.

    Example:

    >>> import types
    >>> room = types.SimpleNamespace(double=lambda x: 2 * x)
    >>> @patch_once(room, "double")
    ... def _and_one(stock):
    ...     return lambda x: stock(x) + 1
    >>> room.double(3)
    7
    """

    def decorate(make):
        key = (id(owner), name, make.__module__, make.__qualname__)
        if key not in _in_place:
            stock = getattr(owner, name)
            setattr(owner, name, functools.wraps(stock)(make(stock)))
            _in_place.add(key)

    return decorate
