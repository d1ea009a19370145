"""Layer costs against what Keras counts, what optimizers make, and what autograd keeps."""

import inspect

import keras
import pytest
from cost_models import MODELS, Subclassed, lstm, mlp, shared, subclassed, transformer

from parallel_keras.costs import layer_costs
from parallel_keras.costs.slots import slot_bytes, variable_bytes

BATCH = 8


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_every_variable_counts_once(make):
    model = make()
    model.compile("adam", "mse")
    costs = layer_costs(model, BATCH)
    trained = sum(variable_bytes(v) for v in model.trainable_variables)
    assert sum(cost.parameters for cost in costs) == 4 * model.count_params()
    assert sum(cost.gradients for cost in costs) == trained
    assert sum(cost.slots for cost in costs) == 2 * trained
    assert all(cost.output_shape[0] == BATCH for cost in costs)


def measured(model):
    """Bytes of the storages that autograd saves in a forward pass, weights excluded."""
    import torch

    inputs = model.inputs if getattr(model, "inputs", None) else [keras.KerasTensor((1, 32), "int")]
    batch = [
        torch.randint(0, 90, (BATCH, *x.shape[1:]))
        if "int" in x.dtype
        else torch.rand((BATCH, *x.shape[1:]))
        for x in inputs
    ]
    batch = batch if len(batch) > 1 else batch[0]
    model(batch)  # builds what is not built yet
    weights = {v.value.untyped_storage()._cdata for v in model.variables}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(batch, training=True)
    assert outputs is not None
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.backend("torch")
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_activations_are_what_autograd_keeps(make):
    model = make()
    expected = measured(model)
    assert sum(c.activations for c in layer_costs(model, BATCH)) == pytest.approx(expected, 0.01)


# A recurrent layer keeps casts that are not known: its estimate is too low by a fifth.
IN_MIXED_PRECISION = [make for make in MODELS if make is not lstm]


@pytest.mark.backend("torch")
@pytest.mark.parametrize("make", IN_MIXED_PRECISION, ids=lambda make: make.__name__)
def test_activations_in_mixed_precision(make):
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = make()
    expected = measured(model)
    assert sum(c.activations for c in layer_costs(model, BATCH)) == pytest.approx(expected, 0.15)


def optimizers():
    all_of_them = keras.optimizers
    wrappers = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    for name, cls in vars(all_of_them).items():
        if inspect.isclass(cls) and issubclass(cls, all_of_them.Optimizer) and name not in wrappers:
            yield name, cls
            yield f"{name}-ema", lambda cls=cls: cls(use_ema=True, gradient_accumulation_steps=2)
    yield "momentum", lambda: all_of_them.SGD(0.1, momentum=0.9)
    yield "amsgrad", lambda: all_of_them.Adam(amsgrad=True)
    yield "centered", lambda: all_of_them.RMSprop(centered=True, momentum=0.9)
    schedule = all_of_them.schedules.CosineDecay(0.1, 10)
    yield "schedule", lambda: all_of_them.Adam(schedule)
    yield "scaled", lambda: all_of_them.LossScaleOptimizer(all_of_them.Adam())


OPTIMIZERS = dict(optimizers())


def some_variables():
    layers = [keras.Input((5,), dtype="int32"), keras.layers.Embedding(50, 8)]
    layers += [keras.layers.Flatten(), keras.layers.Dense(7)]
    model = keras.Sequential([*layers, keras.layers.Dense(7, dtype="bfloat16")])
    return model.trainable_variables


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slots_are_what_the_optimizer_makes(name):
    variables = some_variables()
    built, empty, asked = (OPTIMIZERS[name]() for _ in range(3))
    built.build(variables)
    empty.build([])
    # Numbers that an optimizer keeps once may take the dtype of the variables.
    numbers = sum(not len(v.shape) for v in empty.variables)
    of_all = [v for v in built.variables if not len(v.shape)][:numbers]
    slots = [v for v in built.variables if not any(v is number for number in of_all)]
    assert sum(slot_bytes(asked, variables)) == sum(variable_bytes(v) for v in slots)
    assert not asked.built


def test_each_variable_has_its_own_slots():
    variables = some_variables()
    adam, sgd = keras.optimizers.Adam(), keras.optimizers.SGD()
    both = keras.optimizers.MultiOptimizer(lambda v: adam if len(v.shape) == 2 else sgd)
    expected = [2 * variable_bytes(v) if len(v.shape) == 2 else 0 for v in variables]
    assert slot_bytes(both, variables) == expected
    # Muon keeps one slot of a matrix, and treats embeddings as Adam does.
    muon = slot_bytes(keras.optimizers.Muon(), variables)
    sizes = [variable_bytes(v) for v in variables]
    assert [a / b for a, b in zip(muon, sizes, strict=True)] == [2, 1, 2, 1, 2]
    assert slot_bytes(None, variables) == [0] * len(variables)


class NoConfig(keras.optimizers.Adam):
    def __init__(self, needed):
        super().__init__(0.1)


def test_an_optimizer_without_a_config():
    variables = some_variables()
    optimizer = NoConfig(1)
    with pytest.raises(ValueError, match="Received: NoConfig"):
        slot_bytes(optimizer, variables)
    optimizer.build(variables)
    assert slot_bytes(optimizer, variables) == [2 * variable_bytes(v) for v in variables]


def test_the_order_is_the_order_of_calls():
    kinds = [cost.kind for cost in layer_costs(subclassed(), BATCH)]
    assert kinds == ["Embedding", "Block", "Block", "Dense"]


def test_a_shared_layer_has_its_variables_at_its_first_call():
    costs = layer_costs(shared(), BATCH)
    assert [cost.kind for cost in costs] == ["Dense"] * 4 + ["Multiply", "Dense"]
    assert sorted(cost.parameters > 0 for cost in costs[:4]) == [False, False, True, True]
    assert costs[0].flops == 2 * BATCH * 16 * 64


def test_flops():
    L = keras.layers
    x = inputs = keras.Input((8, 8, 3))
    x = L.Conv2D(4, 3)(x)
    x = L.DepthwiseConv2D(3)(x)
    x = L.Reshape((16, 4))(x)
    y = L.MultiHeadAttention(2, 3)(x, x)
    y = L.EinsumDense("abc,cd->abd", (16, 6))(y)
    y = L.LSTM(5)(y)
    costs = {c.kind: c.flops for c in layer_costs(keras.Model(inputs, y), 2)}
    assert costs["Conv2D"] == 2 * 2 * 36 * 27 * 4
    assert costs["DepthwiseConv2D"] == 2 * 2 * 16 * 9 * 4
    assert costs["Reshape"] == 0
    projections, scores = 4 * 2 * 2 * 16 * 4 * 6, 2 * 2 * 2 * 2 * 16 * 16 * 3
    assert costs["MultiHeadAttention"] == projections + scores
    assert costs["EinsumDense"] == 2 * 2 * 16 * 4 * 6
    assert costs["LSTM"] == 2 * 2 * 16 * 4 * 5 * (6 + 5)


def test_nothing_of_the_users_is_disturbed():
    def draw(asked):
        keras.utils.set_random_seed(3)
        model = transformer(0.1)
        model.compile("adam", "mse")
        before = [set(layer.__dict__) for layer in model._flatten_layers()]
        if asked:
            layer_costs(model, BATCH)
        assert before == [set(layer.__dict__) for layer in model._flatten_layers()]
        assert not model.optimizer.built
        return keras.ops.convert_to_numpy(keras.random.normal((3,))).tolist()

    assert draw(True) == draw(False)


def test_models_of_unknown_input_shape():
    with pytest.raises(ValueError, match="Received: a Subclassed with built=False"):
        layer_costs(Subclassed(), BATCH)
    given = layer_costs(Subclassed(), BATCH, input_shape=(None, 32))
    assert [c.flops for c in given] == [c.flops for c in layer_costs(subclassed(), BATCH)]
    with pytest.raises(ValueError, match="Received: batch_size=0"):
        layer_costs(mlp(), 0)
    unknown = keras.Sequential([keras.Input((None, 4)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="Received: a shape of"):
        layer_costs(unknown, BATCH)
    assert layer_costs(unknown, BATCH, (None, 6, 4))[0].output_shape == (BATCH, 6, 2)
