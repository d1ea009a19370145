"""Every optimizer, and what Keras lets one do with gradients."""

import models
import rows
from keras import optimizers
from keras.optimizers import schedules

from cases import adam, case, compiled, sgd


def optimizer(name, make, **rest):
    return case(f"optimizer_{name}", compile=compiled(make), **rest)


LONG = {"quick": ()}

# What `make test` runs on TensorFlow too (see harness.grid).
TRACED = {
    "optimizer_adam",
    "optimizer_muon",
    "optimizer_adafactor",
    "global_clipnorm",
    "accumulation_embedding",
    "ema_overwrite",
}

CASES = [
    optimizer("sgd", lambda: optimizers.SGD(0.1)),
    optimizer("sgd_nesterov", lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True)),
    optimizer("adam", adam, quick=(2, 3)),
    optimizer("adam_amsgrad", lambda: optimizers.Adam(0.01, amsgrad=True), **LONG),
    optimizer("adamw", lambda: optimizers.AdamW(0.01, weight_decay=0.1)),
    optimizer("rmsprop", lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True)),
    optimizer("lion", lambda: optimizers.Lion(0.003)),
    optimizer("lamb", lambda: optimizers.Lamb(0.01, weight_decay=0.01)),
    optimizer("adafactor", lambda: optimizers.Adafactor(0.01)),
    optimizer("muon", lambda: optimizers.Muon(0.01)),
    optimizer("nadam", lambda: optimizers.Nadam(0.01), **LONG),
    optimizer("adamax", lambda: optimizers.Adamax(0.01), **LONG),
    optimizer("adagrad", lambda: optimizers.Adagrad(0.1), **LONG),
    optimizer("adadelta", lambda: optimizers.Adadelta(1.0), **LONG),
    optimizer("ftrl", lambda: optimizers.Ftrl(0.1), **LONG),
    # On TensorFlow plain Keras makes its variables inside the traced step, where the copies
    # of the weights that it averages start from zeros: another run of plain Keras's own.
    optimizer(
        "schedule_free_adamw", lambda: optimizers.ScheduleFreeAdamW(0.01), built=True, **LONG
    ),
    optimizer(
        "muon_two_decays",
        lambda: optimizers.Muon(0.01, weight_decay=0.1, adam_weight_decay=0.05),
        **LONG,
    ),
    optimizer(
        "of_several",
        lambda: optimizers.MultiOptimizer(
            optimizers.OptimizerMap(optimizers.SGD(0.1), {r".*kernel": adam()})
        ),
        **LONG,
    ),
    # Clipping has to see the global gradient: norms small enough that it always acts.
    case("clipnorm", compile=compiled(lambda: optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05))),
    case("clipvalue", compile=compiled(lambda: optimizers.SGD(0.1, momentum=0.9, clipvalue=0.02))),
    case(
        "global_clipnorm",
        compile=compiled(lambda: optimizers.Adam(0.01, global_clipnorm=0.1)),
        quick=(2, 3),
    ),
    # 8 steps in cycles of 3: training ends in the middle of one.
    case(
        "accumulation",
        compile=compiled(lambda: optimizers.Adam(0.01, gradient_accumulation_steps=3)),
        quick=(2, 3),
    ),
    case(
        "accumulation_clipped",
        compile=compiled(
            lambda: optimizers.SGD(
                0.1, momentum=0.9, gradient_accumulation_steps=3, global_clipnorm=0.05
            )
        ),
    ),
    case(
        "accumulation_embedding",
        models.embedding,
        rows.tokens,
        compile=compiled(lambda: optimizers.Adam(0.01, gradient_accumulation_steps=2)),
    ),
    case("ema", compile=compiled(lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7))),
    case(
        "ema_overwrite",
        compile=compiled(
            lambda: optimizers.Adam(0.01, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=3)
        ),
    ),
    case(
        "ema_accumulation",
        compile=compiled(
            lambda: optimizers.Adam(
                0.01,
                use_ema=True,
                ema_momentum=0.7,
                ema_overwrite_frequency=2,
                gradient_accumulation_steps=2,
            )
        ),
    ),
    case(
        "schedule_exponential",
        compile=compiled(
            lambda: optimizers.SGD(schedules.ExponentialDecay(0.2, 3, 0.5, staircase=True))
        ),
    ),
    case(
        "schedule_cosine",
        compile=compiled(
            lambda: optimizers.Adam(
                schedules.CosineDecay(0.001, 8, warmup_target=0.02, warmup_steps=3)
            )
        ),
        fit={"epochs": 3},
    ),
    case(
        "schedule_piecewise_accumulation",
        compile=compiled(
            lambda: optimizers.SGD(
                schedules.PiecewiseConstantDecay([2, 4], [0.2, 0.1, 0.05]),
                gradient_accumulation_steps=2,
            )
        ),
        **LONG,
    ),
    case("optimizer_by_name", compile=compiled(lambda: "rmsprop"), **LONG),
    case(
        "loss_scale_float32",
        compile=compiled(lambda: optimizers.LossScaleOptimizer(sgd(), dynamic_growth_steps=3)),
    ),
    case(
        "loss_scale_accumulation",
        compile=compiled(
            lambda: optimizers.LossScaleOptimizer(
                optimizers.Adam(0.01, gradient_accumulation_steps=3), dynamic_growth_steps=3
            )
        ),
        **LONG,
    ),
]
