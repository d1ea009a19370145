"""ModelParallel on torch, on devices that tell places apart (see places.py).

Every operation of the forward and the backward pass and of the optimizer is run for
real, and fails where its inputs are on different devices.
"""

import os

import pytest

pytestmark = pytest.mark.backend("torch")

if os.environ.get("KERAS_BACKEND") == "torch":
    import pathlib
    import sys

    sys.path.append(str(pathlib.Path(__file__).parents[1] / "contract"))
    import cases
    import harness
    import keras
    import models
    import rows
    import stage_models
    import torch
    from cases import kinds, losses, optimizers, own_optimizers
    from keras import layers
    from places import Devices, WrongDevice

    import parallel_keras as pk
    from parallel_keras.backends.torch import generators, model as placed

    ROOMS = (optimizers, own_optimizers, kinds, losses)
    # What needs several processes, or is of TensorFlow, has its tests elsewhere.
    CASES = [c for room in ROOMS for c in room.CASES if c.backend != "tensorflow"]
    QUICK = {name for room in ROOMS for name in room.TRACED} | {
        c.name for c in optimizers.CASES if c.name.startswith("optimizer_")
    }
    QUICK |= {c.name for c in own_optimizers.CASES}
else:
    CASES, QUICK = [], set()


@pytest.fixture
def devices(monkeypatch):
    """Two devices beside the host, `cpu:1` and `cpu:2`, with the same rules as GPUs."""
    monkeypatch.setattr(placed, "place_of", lambda name: f"cpu:{int(name[-1]) + 1}")
    monkeypatch.setattr(placed.Lowering, "move", _move)
    monkeypatch.setattr(keras.Model, "zero_grad", _zero_grad)
    with Devices() as found:
        yield found


def _move(self, variable, number):
    # A tensor of another kind cannot be put into a parameter: another parameter.
    target = torch.device("cpu") if number is None else torch.device(self.places[number])
    if variable._value.device.index != target.index:
        moved = variable._value.detach().to(target)
        variable._value = torch.nn.Parameter(moved, requires_grad=variable._value.requires_grad)
    return False


def _zero_grad(self, set_to_none=True):
    for variable in self.variables:
        variable._value.grad = None


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.name, marks=[] if c.name in QUICK else [pytest.mark.long])
        for c in CASES
    ],
)
def test_cases(case, devices):
    with torch.utils._python_dispatch._disable_current_modes():
        expected = harness.oracle(case)
    received = harness.run(case, "model=2")
    harness.compare(case.name, "model=2", expected, received, case.tolerance, case.loose)


def test_everything_is_where_its_layer_is(devices):
    arguments = {"optimizer": "adam", "loss": "sparse_categorical_crossentropy"}
    model = harness.make(models.placed_skip, arguments, "model")
    harness.fit(model, **rows.classes(48), batch_size=16, epochs=1, verbose=0)
    where = {"first": "cpu:1", "second": "cpu:2", "third": "cpu:2"}
    for name, device in where.items():
        for variable in model.get_layer(name).weights:
            assert str(variable._value.device) == device
            assert str(variable._value.grad.device) == device
        slots = [v for v in model.optimizer.variables if f"{name}_" in v.path]
        assert len(slots) == 4
        assert {str(slot._value.device) for slot in slots} == {device}
    ran = {name for name, device in devices.ran if device == "cpu:2"}
    assert {"aten.mm", "aten.addmm"} & ran
    # Per step: a batch in, two activations (one of them skips), two gradients, and scalars.
    devices.crossed.clear()
    model.train_on_batch(*list(rows.classes(16).values()))
    assert devices.crossed["cpu:1", "cpu:2"] + devices.crossed["cpu:2", "cpu:1"] <= 20


# A number on a device becomes one of Python, or decides a shape.
_WAITS = ("aten._local_scalar_dense", "aten.equal", "aten.nonzero", "aten.masked_select")


def waits(devices, build, batches):
    """How often the host waits for a device in a fit of so many batches, by operation."""
    arguments = {
        "optimizer": keras.optimizers.Adam(0.01, global_clipnorm=0.5),
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
    }
    model = harness.make(build, arguments, "model=2")
    data = rows.classes(8 * batches)
    for _ in range(2):  # what is done once is done in the first
        devices.ran.clear()
        devices.crossed.clear()
        harness.fit(model, **data, batch_size=8, epochs=1, verbose=0)
    found = {name: sum(n for (ran, _), n in devices.ran.items() if ran == name) for name in _WAITS}
    return {**found, "copies": sum(n for (_, to), n in devices.crossed.items() if to == "cpu")}


def test_no_step_waits_for_a_device(devices):
    # The logs at the end of the epoch do, however many steps there were, as in plain Keras.
    assert waits(devices, models.placed_skip, 3) == waits(devices, models.placed_skip, 7)


def test_the_harness_sees_the_host_wait(devices):
    class Waits(layers.Layer):
        def call(self, x):
            return x if x.device.type == "meta" else x * float(x.sum() * 0 + 1)

    def build():
        x = keras.Input((6,))
        y = pk.place(0)(layers.Dense(4))(x)
        return keras.Model(x, layers.Softmax()(pk.place(1)(Waits())(y)))

    few, many = waits(devices, build, 3), waits(devices, build, 7)
    assert many[_WAITS[0]] - few[_WAITS[0]] == 4


def test_the_harness_tells_places_apart(devices):
    a, b = torch.ones(3).to("cpu:1"), torch.ones(3).to("cpu:2")
    with pytest.raises(WrongDevice):
        a + b
    assert ("aten.add", "cpu:1") not in devices.ran


class Mixed(pk.ParallelModel if CASES else object):
    """Operations between layers, of torch itself."""

    def __init__(self):
        super().__init__()
        with pk.place(0):
            self.first = layers.Dense(6, activation="tanh")
        with pk.place(1):
            self.second = layers.Dense(6, activation="tanh")
        self.third = layers.Dense(3, activation="softmax")

    def call(self, x):
        h = self.first(x)
        y = self.second(h) + h  # where the last layer was
        with pk.place(0):
            y = y * 2 + keras.ops.sin(h)
        return self.third(y)


def test_operations_of_a_subclass(devices):
    arguments = {"optimizer": "adam", "loss": "sparse_categorical_crossentropy"}
    records = []
    for strategy in (None, "model"):
        model = harness.make(Mixed, dict(arguments), strategy)
        history = harness.fit(model, **rows.classes(), batch_size=16, epochs=2, verbose=0)
        records.append({"history": history, **harness.state(model)})
    harness.compare("subclass_operations", "model", *records)


def _attended():
    model = stage_models.attended()
    return pk.place_layers(model, {"words|queries": 0, r"block_\d|join|mean|head": 1})


def test_masks_that_attention_takes_away(devices):
    """From the words, which the first block has taken to its own device."""
    case = cases.case("attended", _attended, rows.tokens)
    with torch.utils._python_dispatch._disable_current_modes():
        expected = harness.oracle(case)
    harness.compare(case.name, "model", expected, harness.run(case, "model"))


def _with_a_norm():
    x = keras.Input((6,))
    with pk.place(0):
        y = layers.Dense(6, activation="tanh")(x)
    with pk.place(1):
        # Without weights: here a weight that moves is another one, of which a module does not know.
        norm = torch.nn.BatchNorm1d(6, affine=False)
        y = layers.TorchModuleWrapper(norm, output_shape=(None, 6), name="norm")(y)
        y = layers.Dense(3, activation="softmax")(y)
    return keras.Model(x, y)


def test_buffers_are_where_their_layer_is(devices):
    arguments = {"optimizer": "sgd", "loss": "sparse_categorical_crossentropy"}
    records = []
    for strategy in (None, "model"):
        model = harness.make(_with_a_norm, dict(arguments), strategy)
        module = model.get_layer("norm").module
        if strategy:
            assert {str(buffer.device) for buffer in module.buffers()} == {"cpu:2"}
        history = harness.fit(model, **rows.classes(48), batch_size=16, epochs=2, verbose=0)
        model.set_strategy(None) if strategy else None
        assert {str(buffer.device) for buffer in module.buffers()} == {"cpu"}
        held = [buffer.numpy() for buffer in module.buffers()]
        records.append({"history": history, **harness.state(model), "buffers": held})
    harness.compare("placed_buffers", "model", *records)


def _with_random_layers(second):
    x = keras.Input((6,))
    with pk.place(0):
        y = layers.Dropout(0.3)(layers.Dense(8, activation="tanh")(x))
    with pk.place(second):
        y = layers.Dropout(0.3)(layers.Dense(8, activation="tanh")(y))
    with pk.place(0):
        y = layers.Dense(3, activation="softmax")(layers.Dropout(0.3)(y))
    return keras.Model(x, y)


def test_layers_without_a_seed_draw_what_one_device_draws(devices, monkeypatch):
    monkeypatch.setattr(generators, "_are_of_a_kind", lambda one, other: one.index and other.index)
    monkeypatch.setattr(generators, "_state", lambda device: devices.generators[device])
    monkeypatch.setattr(generators, "_put", _put_into(devices))
    records = []
    for second in (0, 1):  # all on one device, and on two
        arguments = {"optimizer": "adam", "loss": "sparse_categorical_crossentropy"}
        model = harness.make(
            lambda second=second: _with_random_layers(second), arguments, "model=2"
        )
        devices.seed(harness.SEED)
        history = harness.fit(model, **rows.classes(), batch_size=16, epochs=2, verbose=0)
        records.append({"history": history, **harness.state(model)})
    harness.compare("random_without_seeds", "model", *records)
    ran = {device for name, device in devices.ran if name.startswith("aten.bernoulli")}
    assert ran == {"cpu:1", "cpu:2"}


def _put_into(devices):
    def put(state, device):
        devices.generators[device] = state

    return put
