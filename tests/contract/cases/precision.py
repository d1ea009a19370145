"""Types: mixed precision with loss scaling, policies of single layers, float64.

Tolerances are roundings of the type, of values up to one: parts of a batch are rounded
by themselves, and add up in another order. A float16 near one has steps of 2**-10, a
bfloat16 of 2**-7; a few of them over the steps of a case.
"""

import keras
import models
import numpy as np
import rows
from harness import BACKEND, TOLERANCE
from keras import optimizers

from cases import adam, case, compiled, losses, sgd

HALF, BRAIN, DOUBLE = 2e-3, 2e-2, 1e-12


def under(policy, build=models.mlp):
    """A function that makes a model under a global policy."""

    def make():
        keras.config.set_dtype_policy(policy)
        return build()

    return make


def doubled(make):
    """A function that makes a model, or arguments of `compile`, where all is float64."""

    def doubled():
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        return make()

    return doubled


def smooth(optimizer=sgd, **rest):
    """Without accuracy, which jumps by a row where two kinds are rounded to the same."""
    return compiled(optimizer, metrics=("sparse_categorical_crossentropy",), **rest)


def half(name, optimizer=sgd, model=models.mlp, data=rows.classes, **rest):
    tolerance = rest.pop("tolerance", HALF)
    compile = rest.pop("compile", None) or smooth(optimizer)
    return case(
        f"float16_{name}",
        under("mixed_float16", model),
        data,
        compile,
        tolerance=tolerance,
        **rest,
    )


def scaled(make=sgd, scale=256.0, growth=3):
    """An optimizer that scales the loss, and often changes the scale."""
    return lambda: optimizers.LossScaleOptimizer(
        make(), initial_scale=scale, dynamic_growth_steps=growth
    )


def one_huge_row():
    """Its gradient leaves float16 at all but small scales: on the last replica of a batch."""
    data = rows.regression()
    data["x"][15] *= 300
    return data


def open_ended():
    """Nothing keeps what a huge row gives within bounds."""
    x = keras.Input((6,))
    return keras.Model(x, keras.layers.Dense(1)(keras.layers.Dense(8, activation="relu")(x)))


def one_huge_weight():
    """The loss of one row does."""
    data = rows.classes()
    weights = np.ones(rows.N, "float32")
    weights[15] = 1e5
    return {**data, "sample_weight": weights}


def end_is_frozen():
    """Where the loss is scaled nothing trains."""
    model = models.sequential()
    model.layers[-1].trainable = False
    return model


def start_is_frozen():
    model = models.sequential()
    model.layers[0].trainable = False
    return model


def several(**arguments):
    """An optimizer for kernels, another for all else."""
    return optimizers.MultiOptimizer(
        optimizers.OptimizerMap(optimizers.SGD(0.1), {r".*kernel": adam(1e-3)}), **arguments
    )


def clipped_and_accumulated():
    return optimizers.SGD(
        0.1, momentum=0.9, gradient_accumulation_steps=2, global_clipnorm=0.05, use_ema=True
    )


def one_per_layer():
    """Each of two optimizers updates on one stage, with a global norm of its own."""
    map = {
        r"first/.*": optimizers.SGD(0.1, global_clipnorm=0.05),
        r"last/.*": clipped_and_accumulated(),
    }
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.SGD(0.1), map))


def one_per_type():
    """Both stages have some of each."""
    map = {r".*/kernel": clipped_and_accumulated()}
    return optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.SGD(0.1), map))


def named():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", name="first"),
            keras.layers.Dense(3, activation="softmax", name="last"),
        ]
    )


def policies_of_layers(*policies):
    """Layers with policies of their own in a float32 model, and one of the user's."""

    def make():
        x = y = keras.Input((6,))
        for policy in policies:
            y = keras.layers.Dense(8, activation="tanh", dtype=policy)(y)
        y = models.MeanPenalty(dtype="float32")(y)
        return keras.Model(x, keras.layers.Dense(3, activation="softmax", dtype="float32")(y))

    return make


LONG = {"quick": ()}

# What `make test` runs on TensorFlow too (see harness.grid).
TRACED = {"float16_overflow", "float16_end_is_frozen", "layer_policies_bfloat16", "float64"}

CASES = [
    # Keras puts a loss scale around the optimizer of a float16 model.
    half("scaled_by_keras"),
    half("scaled", scaled()),
    half("overflow", model=open_ended, data=one_huge_row, quick=(2, 3),
         compile=compiled(scaled(scale=2.0**14), loss="mae", metrics=())),
    half(
        "overflow_of_a_weight",
        scaled(lambda: optimizers.SGD(0.1), scale=2.0**14),
        data=one_huge_weight,
    ),
    half("overflow_accumulated", model=open_ended, data=one_huge_row,
         compile=compiled(scaled(clipped_and_accumulated, scale=2.0**14), loss="mae", metrics=())),
    half("end_is_frozen", scaled(growth=2), end_is_frozen),
    half("start_is_frozen", scaled(growth=2), start_is_frozen, **LONG),
    half("nothing_overflows_but_grows", scaled(growth=1), quick=(2,)),
    half("regularized", scaled(), lambda: models.mlp(kernel_regularizer="l2")),
    # On TensorFlow plain Keras does not add a float16 to a float32 loss.
    half("activity", scaled(), models.regularized, backend="torch", **LONG),
    half("add_loss", scaled(), models.added_losses, backend="torch"),
    half("several", lambda: optimizers.LossScaleOptimizer(several()), **LONG),
    half(
        "loss_of_the_batch",
        model=lambda: models.regressor(3),
        data=lambda: rows.regression(outputs=3),
        compile=compiled(
            scaled(lambda: adam(1e-3)), loss=losses.contrastive, metrics=("mae",)
        ),
    ),
    half(
        "loss_of_the_user",
        model=models.regressor,
        data=rows.regression,
        compile=compiled(scaled(), loss=losses.rows_error, metrics=("mae",)),
        **LONG,
    ),
    half("cnn", scaled(), models.cnn, rows.images, fit={"epochs": 1}, **LONG),
    half("embedding", scaled(), models.embedding, rows.tokens, **LONG),
    case("bfloat16_mixed", under("mixed_bfloat16"), compile=smooth(), tolerance=BRAIN),
    case("bfloat16", under("bfloat16"), compile=smooth(), tolerance=BRAIN, **LONG),
    case(
        "bfloat16_loss_of_the_user",
        under("mixed_bfloat16", models.regressor),
        rows.regression,
        compiled(loss=losses.rows_error, metrics=("mae",)),
        tolerance=BRAIN,
        **LONG,
    ),
    case("layer_policies_bfloat16", policies_of_layers("mixed_bfloat16", "bfloat16"),
         compile=smooth(), tolerance=BRAIN, quick=(2, 3)),
    case("layer_policies_float16", policies_of_layers("mixed_float16", "float32"),
         compile=smooth(scaled()), tolerance=HALF),
    case("layer_policies_float64", policies_of_layers("float64", "float32")),
    # On torch Keras's products and means are of float32, whatever their factors are.
    case("float64", doubled(models.mlp), compile=doubled(compiled()),
         tolerance=DOUBLE if BACKEND == "tensorflow" else TOLERANCE),
    case("optimizer_per_layer", named, compile=compiled(one_per_layer)),
    case("optimizer_per_type", named, compile=compiled(one_per_type)),
    case("optimizer_per_type_scaled", named, compile=compiled(scaled(one_per_type, growth=2))),
]  # fmt: skip
