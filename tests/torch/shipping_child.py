"""The other process of `test_shipping.py`: takes models over, and shows what they do.

It is a fresh interpreter that knows nothing of the tests but what comes over its pipe.
"""

import contextlib
import pickle
import sys
import traceback


def main():
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what the models print must not come in between
    while True:
        try:
            name, *arguments = pickle.load(source)
        except EOFError:
            return
        try:
            answer = True, globals()[f"on_{name}"](*arguments)
        except BaseException:
            answer = False, traceback.format_exc()
        pickle.dump(answer, sink)
        sink.flush()


def on_configure(values):
    from parallel_keras.backends.torch import configuration

    configuration.apply(values, rank=0)


def on_configuration():
    from parallel_keras.backends.torch import configuration

    return configuration.read()


def on_run(skeleton, arrays, x, y, steps):
    """What a model that came over gives for a batch; see `outcome`."""
    import torch

    from parallel_keras.backends.torch import shipping

    tensors = []
    for array, requires_grad in arrays:
        tensor = torch.as_tensor(array)
        if requires_grad is not None:
            tensor = torch.nn.Parameter(tensor, requires_grad=requires_grad)
        tensors.append(tensor)
    model = shipping.join(skeleton, tensors)
    check(model)
    return outcome(model, x, y, steps)


def on_do(function, skeleton, arrays):
    """What a function, sent as bytes, makes of a thing that came over."""
    import cloudpickle
    import torch

    from parallel_keras.backends.torch import shipping

    tensors = [
        torch.as_tensor(array) if grad is None else torch.nn.Parameter(torch.as_tensor(array), grad)
        for array, grad in arrays
    ]
    return cloudpickle.loads(function)(shipping.join(skeleton, tensors))


def outcome(model, x, y, steps=2):
    """Everything that a model computes from a batch, as a dict of numpy arrays."""
    import numpy as np
    import torch

    from parallel_keras.backends.torch import shipping

    torch.manual_seed(0)
    found = {}

    def note(name, values):
        for number, value in enumerate(values):
            found[f"{name} {number}"] = np.asarray(value)

    def leaves(value):
        from keras import tree

        return [np.asarray(leaf) for leaf in tree.flatten(value)]

    note("predict", leaves(model.predict(x, verbose=0)))
    if model.compiled:
        for step in range(steps):
            note(f"log {step}", leaves(model.train_on_batch(x, y)))
        note("metric", [v.numpy() for metric in model.metrics for v in metric.variables])
        note("slot", [v.numpy() for v in model.optimizer.variables])
    note("weight", model.get_weights())
    note("shipped", [v.numpy() for v in shipping.variables_of(model)])
    found["paths"] = np.array([v.path for v in shipping.variables_of(model)])
    return found


def check(model):
    """What has to hold inside of a model, wherever it came from."""
    import keras
    import torch

    from parallel_keras import keras_internals

    for layer in keras_internals.flatten_layers(model):
        parameters = dict(layer.named_parameters(recurse=False))
        parameters |= dict(getattr(layer, "_torch_params", {}))
        for variable in layer.variables:
            held = parameters.get(variable.path)
            assert held is None or held is variable._value, variable.path
        owned = layer._trainable_variables + layer._non_trainable_variables
        assert all(v.path in parameters for v in owned) or "_torch_params" not in vars(layer)
        for name, (_, store) in layer._tracker.config.items():
            assert layer._tracker.stored_ids[name] == {id(value) for value in store}, name
        assert isinstance(layer, torch.nn.Module)
    weights = [v._value for v in model.weights if v.trainable]
    known = {id(parameter) for parameter in model.parameters()}
    with contextlib.suppress(AttributeError):  # subclassed models hold them in their layers
        assert all(id(value) in known for value in weights)
    optimizer = model.optimizer if model.compiled else None
    if optimizer is not None and optimizer.built and isinstance(optimizer, keras.Optimizer):
        for number, variable in enumerate(keras_internals.optimizer_trainables(optimizer)):
            assert keras_internals.optimizer_index(optimizer, variable) == number


if __name__ == "__main__":
    main()
