"""Models taken over by a fresh process: they compute there what they compute here.

The child is no worker of a pool: what is under test is `split` and `join` alone.
"""

import functools
import importlib.util
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import weakref

import cloudpickle
import numpy as np
import pytest

if os.environ.get("KERAS_BACKEND") != "torch":
    pytest.skip("torch's worker processes", allow_module_level=True)

import keras
import shipped_models
import shipping_child
import torch
from keras import ops
from keras.src.optimizers.multi_optimizer import MultiOptimizer, OptimizerMap

from parallel_keras import keras_internals
from parallel_keras.backends.torch import configuration, shipping
from parallel_keras.errors import UnsupportedError

HERE = pathlib.Path(__file__).parent
# As in a script or a notebook cell: nothing of it can be imported elsewhere.
MAIN = {"__name__": "__main__"}
exec((HERE / "shipped_models.py").read_text(), MAIN)

X, Y = shipped_models.X, shipped_models.Y
DATA = {
    "text": (shipped_models.TOKENS, Y),
    "images": (shipped_models.IMAGES, Y),
    "application": (np.zeros((4, 32, 32, 3), "float32") + 0.5, Y[:4]),
    "several": ({"a": X, "b": X}, {"one": Y, "two": Y}),
}
MODELS = (
    *("mlp", "sequential", "unbuilt", "unseeded", "lambdas", "shared", "injected"),
    *("injected_child", "several", "text", "images", "adapted", "application", "long"),
    *("frozen", "lora", "quantized", "Lists", "Nested", "OwnStep"),
)


class Child:
    """A process that takes things over."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, shipping_child.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "KERAS_BACKEND": "torch"},
        )

    def ask(self, *message):
        pickle.dump(message, self.process.stdin)
        self.process.stdin.flush()
        good, answer = pickle.load(self.process.stdout)
        assert good, answer
        return answer

    def run(self, model, x, y, steps=2):
        return self.ask("run", *packed(model), x, y, steps)

    def do(self, function, thing):
        return self.ask("do", cloudpickle.dumps(function), *packed(thing))

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=30)


@pytest.fixture(scope="module")
def child():
    child = Child()
    child.ask("configure", configuration.read())
    yield child
    child.close()


def packed(thing):
    """A thing as `split` gives it, with the numbers as arrays."""
    skeleton, tensors = shipping.split(thing)
    arrays = [
        (t.detach().numpy(), t.requires_grad if isinstance(t, torch.nn.Parameter) else None)
        for t in tensors
    ]
    return skeleton, arrays


def make(name, namespace=MAIN):
    keras.utils.set_random_seed(0)
    return namespace[name]()


def compiled(name, optimizer="adam", namespace=MAIN, fitted=True, **arguments):
    """A model in mid-training, with its batch."""
    model = make(name, namespace)
    x, y = DATA.get(name, (X, Y))
    arguments = {"loss": "mse", "metrics": ["mae"], **arguments}
    if isinstance(y, dict):
        arguments["metrics"] = {key: ["mae"] for key in y}
    model.compile(optimizer, **arguments)
    if fitted:
        model.fit(x, y, batch_size=6, epochs=1, verbose=0)
    return model, x, y


def assert_same(here, there):
    assert here.keys() == there.keys()
    for name, value in here.items():
        if value.dtype.kind in "fc":
            np.testing.assert_allclose(there[name], value, rtol=0, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(there[name], value, name)


def assert_travels(child, model, x, y):
    there = child.run(model, x, y)
    shipping_child.check(model)  # it is the caller's as before
    assert_same(shipping_child.outcome(model, x, y), there)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_on_elsewhere(child, name):
    assert_travels(child, *compiled(name, fitted=name != "quantized"))


@pytest.mark.parametrize("name", ("unbuilt", "Lists", "Nested", "injected", "sequential"))
def test_a_model_that_has_not_seen_data(child, name):
    assert_travels(child, *compiled(name, fitted=False))


@pytest.mark.parametrize("name", ("injected", "injected_child", "Lists", "OwnStep"))
def test_classes_of_a_module(child, name):
    assert_travels(child, *compiled(name, namespace=vars(shipped_models)))


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "own": lambda: MAIN["Sgd"](0.1),
    "own schedule": lambda: keras.optimizers.Adam(MAIN["Decay"](0.01)),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "excluded": lambda: _without_decay(keras.optimizers.AdamW(0.01, weight_decay=0.1)),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, centered=True),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.01),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
    "ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulated": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3),
    "clipped": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), global_clipnorm=0.1
    ),
}


def _without_decay(optimizer):
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma"])
    return optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_elsewhere(child, name):
    assert_travels(child, *compiled("mlp", OPTIMIZERS[name]()))


def test_one_optimizer_for_some_layers(child):
    optimizers = OptimizerMap(default_optimizer=keras.optimizers.Adam(0.01))
    optimizers[".*kernel"] = keras.optimizers.SGD(0.1, momentum=0.9)
    assert_travels(child, *compiled("mlp", MultiOptimizer(optimizers)))


def test_losses_and_metrics_of_the_script(child):
    factor = 3.0
    own = {
        "loss": MAIN["Loss"](),
        "metrics": [MAIN["Mae"](), lambda a, b: ops.abs(ops.subtract(a, b)) * factor],
    }
    assert_travels(child, *compiled("mlp", **own))
    assert_travels(child, *compiled("mlp", loss=lambda a, b: (a - b) ** 2 * factor))
    weighted = [keras.metrics.AUC(), keras.metrics.R2Score()]
    assert_travels(child, *compiled("mlp", weighted_metrics=weighted))


@pytest.mark.parametrize("policy", ("mixed_bfloat16", "float16", "float64"))
def test_dtype_policies(child, policy):
    model = MAIN["mlp"](policy)
    model.compile("sgd", "mse")
    assert_travels(child, model, X, Y)


def test_a_parallel_model_is_a_plain_one_there(child):
    import parallel_keras as pk

    model, x, y = compiled("mlp")
    pk.parallelize(model, "data")
    seen = child.do(lambda model: (sorted(vars(model)), type(model).__name__), model)
    assert not set(seen[0]) & set(keras_internals.INSTANCE_OVERRIDES)
    assert seen[1] == type(model).__name__


def test_what_is_shared_stays_shared(child):
    layer = keras.layers.Dense(3)
    layer.build((None, 2))
    thing = {"layer": layer, "again": [layer], "kernel": layer.kernel, "value": layer.kernel._value}
    view = torch.zeros(3, requires_grad=True)
    thing |= {"plain": view, "twin": view}

    def look(thing):
        layer = thing["layer"]
        return [
            layer is thing["again"][0],
            layer.kernel is thing["kernel"],
            layer.kernel._value is thing["value"],
            thing["plain"] is thing["twin"],
        ]

    assert child.do(look, thing) == [True] * 4


def test_a_tensor_is_what_it_was(child):
    tensors = [
        torch.zeros(2, 3, dtype=torch.bfloat16),
        torch.nn.Parameter(torch.zeros(2), requires_grad=False),
        torch.nn.Parameter(torch.zeros(())),
        torch.zeros(2, requires_grad=True),
        torch.zeros(0, 4, dtype=torch.int8),
    ]
    made = shipping.empty(shipping.specs(tensors), "cpu")
    for old, new in zip(tensors, made, strict=True):
        assert (type(new), new.dtype, new.shape) == (type(old), old.dtype, old.shape)
        assert new.requires_grad == old.requires_grad


@pytest.mark.parametrize("name", MODELS)
def test_the_skeleton_changes_only_with_the_model(name):
    model, x, y = compiled(name, fitted=name != "quantized")
    model.train_on_batch(x, y)
    before = shipping.split(model)[0]
    assert shipping.split(model)[0] == before
    model.fit(x, y, epochs=1, verbose=0)
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    assert shipping.split(model)[0] == before
    model.own_attribute = "changed"
    assert shipping.split(model)[0] != before


def test_the_skeleton_holds_no_numbers():
    model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(512)])
    model.compile("adam", "mse")
    model.train_on_batch(np.zeros((1, 512)), np.zeros((1, 512)))
    skeleton, tensors = shipping.split(model)
    assert len(skeleton) < 100_000
    assert sum(t.numel() for t in tensors) >= 3 * 512 * 512


def test_variables_are_named_in_one_order(child):
    model, _, _ = compiled("Lists", OPTIMIZERS["scaled"]())
    variables = shipping.variables_of(model)
    assert len({id(v) for v in variables}) == len(variables)
    known = {id(v) for v in (*model.weights, *model.optimizer.variables)}
    assert known <= {id(v) for v in variables}
    assert not {id(v) for m in model.metrics for v in m.variables} & {id(v) for v in variables}


MODULE = """
import keras

FACTOR = {factor}

def helper(x):
    return x * FACTOR

class Times(keras.layers.Layer):
    def call(self, x):
        return helper(x)
"""


def _load(path, factor, name):
    path.write_text(MODULE.format(factor=float(factor)))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _times(module, loss="mse"):
    model = keras.Sequential([keras.Input((6,)), module.Times(), keras.layers.Dense(2)])
    model.compile("sgd", loss)
    return model


def test_a_module_that_only_the_caller_can_import(child, tmp_path):
    module = _load(tmp_path / "anywhere.py", 2, "loaded_from_a_path")
    by_value = cloudpickle.list_registry_pickle_by_value()
    assert_travels(child, _times(module), X, Y)
    assert cloudpickle.list_registry_pickle_by_value() == by_value
    # A function of the script that names the module itself.
    loss = eval("lambda a, b: module.helper((a - b) ** 2)", {**MAIN, "module": module})
    assert_travels(child, _times(module, loss), X, Y)
    del sys.modules["loaded_from_a_path"]


def test_a_module_that_was_loaded_anew(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "loaded_anew.py"
    path.write_text(MODULE.format(factor=2.0))
    module = importlib.import_module("loaded_anew")
    child = Child()
    try:
        child.ask("configure", configuration.read())
        assert_travels(child, _times(module), X, Y)
        path.write_text(MODULE.format(factor=0.125))  # another size: Python's cache sees it
        assert importlib.reload(module).FACTOR == 0.125
        assert_travels(child, _times(module), X, Y)
    finally:
        child.close()


def test_views_stay_views():
    base = torch.arange(12.0).reshape(3, 4)
    thing = {"rows": base[1:], "turned": base.T, "bits": base.view(torch.int32), "other": base + 1}
    thing["lone"] = torch.ones(1).expand(5)
    skeleton, tensors = shipping.split(thing)
    made = shipping.empty(shipping.specs(tensors), "cpu")
    for new, old in zip(made, tensors, strict=True):
        new.copy_(old)
    there = shipping.join(skeleton, made)
    for name, value in thing.items():
        assert torch.equal(there[name], value), name
    there["turned"][0, 2] = -1.0
    assert there["rows"][1, 0] == -1.0
    assert there["other"][2, 0] == 9.0


def test_functions_inside_of_importable_ones_go_by_name(child):
    layer = keras.layers.Dense(2)
    predicate = layer._tracker.config["trainable_variables"][0]
    skeleton, _ = shipping.split(predicate)
    assert len(skeleton) < 300
    seen = child.do(lambda f: (f.__module__, f(1)), predicate)
    assert seen == (predicate.__module__, False)


# ---- what cannot travel ----

LOCK = threading.Lock()
REFUSED = {
    "lock": (threading.Lock(), "cannot pickle"),
    "file": (open(os.devnull), "belongs to its process"),  # noqa: SIM115
    "sparse": (torch.eye(2).to_sparse(), "sparse"),
    "meta": (torch.empty(2, device="meta"), "without numbers"),
    "generator": ((number for number in range(2)), "cannot pickle"),
    "weak": (weakref.ref(Child), "cannot pickle"),
}


class _Slots:
    __slots__ = ("inner",)


def _attribute(model, thing):
    model.layers[-1].handle = thing
    return "Functional.layers[4].handle"


def _listed(model, thing):
    model.layers[1].things = [1, {"key": thing}]
    return "Functional.layers[1].things[1]['key']"


def _in_slots(model, thing):
    model.slots = _Slots()
    model.slots.inner = thing
    return "Functional.slots.inner"


def _captured(model, thing):
    model.compile("sgd", lambda a, b: (a - b) ** 2 if thing else a)
    return "Functional.loss (variable 'thing')"


def _global(model, thing):
    loss = eval("lambda a, b: (a - b) ** 2 if THING else a", {**MAIN, "THING": thing})
    model.compile("sgd", loss)
    return "Functional.loss (global 'THING')"


def _bound(model, thing):
    model.compile("sgd", functools.partial(lambda extra, a, b: (a - b) ** 2, thing))
    return "Functional.loss.args[0]"


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("put", (_attribute, _listed, _in_slots, _captured, _global, _bound))
def test_what_cannot_travel_is_named(put, kind):
    thing, reason = REFUSED[kind]
    model = make("frozen")
    path = put(model, thing)
    with pytest.raises(UnsupportedError) as caught:
        shipping.split(model)
    message = str(caught.value)
    assert f"because of {path} = " in message, message
    assert reason in message and type(thing).__name__ in message, message


def test_the_standard_output_is_the_workers_own(child):
    assert child.do(lambda file: file is sys.stdout, sys.stdout)


# ---- the configuration ----


@pytest.fixture
def changed_settings(tmp_path, monkeypatch):
    """A caller that has changed everything that can be changed."""
    before = configuration.read()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "mine"))
    monkeypatch.setenv("OWN_VARIABLE", "1")
    keras.config.set_floatx("float64")
    keras.config.set_epsilon(1e-5)
    keras.config.set_image_data_format("channels_first")
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.config.disable_flash_attention()
    keras.config.disable_traceback_filtering()
    keras.utils.set_random_seed(7)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.float64)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.enable_flash_sdp(False)
    yield
    configuration.apply(before, 0)


def settings(_):
    """What a process has set."""
    import warnings

    import keras
    import torch

    from parallel_keras.backends.torch import torch_settings

    return {
        "floatx": keras.config.floatx(),
        "epsilon": keras.config.epsilon(),
        "format": keras.config.image_data_format(),
        "policy": keras.config.dtype_policy().name,
        "flash": keras.config.is_flash_attention_enabled(),
        "filtering": keras.config.is_traceback_filtering_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precision": torch_settings.read(),
        "dtype": str(torch.get_default_dtype()),
        "benchmark": torch.backends.cudnn.benchmark,
        "cudnn": torch.backends.cudnn.deterministic,
        "tf32": torch.backends.cudnn.allow_tf32,
        "path": list(sys.path),
        "directory": os.getcwd(),
        "variable": os.environ.get("OWN_VARIABLE"),
        "warnings": len(warnings.filters),
    }


def test_a_child_sees_the_callers_settings(changed_settings):
    fresh = Child()
    try:
        fresh.ask("configure", configuration.read())
        assert fresh.do(settings, None) == settings(None)
    finally:
        fresh.close()


def test_custom_objects_are_known_by_name(child):
    def known(_):
        return [keras.saving.get_registered_object(name) is not None for name in ("t>A", "b", "c")]

    cls = type("A", (MAIN["Scale"],), {"__module__": "__main__"})
    keras.saving.register_keras_serializable("t")(cls)
    try:
        with keras.saving.custom_object_scope({"b": lambda x: x}):
            child.ask("configure", configuration.read())
            assert child.do(known, None) == known(None) == [True, True, False]
        child.ask("configure", configuration.read())
        assert child.do(known, None) == known(None) == [True, False, False]
        cls.lock = LOCK
        with pytest.raises(UnsupportedError, match=r"custom object.*\['t>A'\]\.lock"):
            configuration.read()
    finally:
        del keras.saving.get_custom_objects()["t>A"]


def test_environment_and_directory_are_the_callers_now(monkeypatch, tmp_path):
    fresh = Child()
    try:
        monkeypatch.setenv("FIRST", "1")
        fresh.ask("configure", configuration.read())
        assert fresh.do(lambda _: os.environ.get("FIRST"), None) == "1"
        monkeypatch.delenv("FIRST")
        gone = tmp_path / "gone"
        gone.mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        fresh.ask("configure", configuration.read())  # has no directory to give
        assert fresh.do(lambda _: os.environ.get("FIRST"), None) is None
    finally:
        fresh.close()
