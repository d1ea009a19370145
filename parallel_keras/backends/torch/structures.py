"""Leaves of nested structures, in one order.

`keras.tree.flatten` sorts the keys of a dict where `map_structure` leaves them as
they are; what one took apart the other must not put together.
"""

from keras import tree


def leaves(structure):
    """The leaves of a structure, in the order of `fill`."""
    found: list = []
    tree.map_structure(found.append, structure)
    return found


def fill(structure, values):
    """A structure like this one, with these leaves."""
    values = iter(values)
    return tree.map_structure(lambda _: next(values), structure)
