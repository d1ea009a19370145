"""Parameters whose numbers are with a worker, until someone looks.

Under a pipeline a weight is trained where its stage is. The caller's parameter then
holds old numbers, and must not show them: whatever torch does with it first asks for
the new ones. torch's own lazy modules change a parameter's class in the same way.
"""

import torch


class RemoteParameter(torch.nn.Parameter):
    """A parameter that brings its numbers up to date before anything is done with it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        for leaf in _leaves((args, kwargs or {})):
            if type(leaf) is RemoteParameter:
                vars(leaf)[_FETCH]()  # this one and all others of its model
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})


_FETCH = "_parallel_keras_fetch"


def make_remote(parameters, fetch):
    """Have parameters ask for their numbers.

    Args:
        parameters: List of `torch.nn.Parameter`.
        fetch: Called without arguments, when one of them is looked at. Calls `make_local`.
    """
    for parameter in parameters:
        vars(parameter)[_FETCH] = fetch
        parameter.__class__ = RemoteParameter


def make_local(parameters):
    """Let parameters be plain ones again."""
    for parameter in parameters:
        parameter.__class__ = torch.nn.Parameter
        vars(parameter).pop(_FETCH, None)


def bring_home(parameters, model):
    """Bring those parameters up to date that another model has left with its workers.

    Args:
        parameters: List of tensors.
        model: The Keras model that asks: what it has left stays there.
    """
    for parameter in parameters:
        if type(parameter) is RemoteParameter:
            fetch = vars(parameter)[_FETCH]
            if fetch.__self__.model is not model:
                fetch()


def versions(parameters):
    """How often each of some parameters was written, without bringing it up to date."""
    with torch._C.DisableTorchFunctionSubclass():
        return [parameter._version for parameter in parameters]


def _leaves(thing):
    """What is in the arguments of a function of torch: tensors, and lists of them."""
    if isinstance(thing, dict):
        thing = list(thing.values())
    if isinstance(thing, (list, tuple)):
        for part in thing:
            yield from _leaves(part)
    else:
        yield thing
