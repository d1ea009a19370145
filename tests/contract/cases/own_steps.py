"""Steps of the model's own: `train_step`, `test_step`, `predict_step` and what they call."""

import keras
import rows
import step_models
from keras import optimizers

from cases import case, compiled, metrics, precision


def adam():
    """A large epsilon: some gradients here are zero in exact arithmetic."""
    return optimizers.Adam(0.01, epsilon=1e-3)


def still():
    """Weights stay what they are, whatever the gradients."""
    return optimizers.SGD(0.0)


def only_x():
    return {"x": rows.classes()["x"]}


def gan(d_optimizer=adam, g_optimizer=adam):
    def arguments():
        return {
            "d_optimizer": d_optimizer(),
            "g_optimizer": g_optimizer(),
            "loss_fn": keras.losses.BinaryCrossentropy(from_logits=True),
        }

    return arguments


def nothing():
    """The step has its own loss."""
    return {"optimizer": adam()}


def classifier(name, optimizer=adam, data=rows.classes, **rest):
    return case(name, step_models.Classifier, data, compiled(optimizer), **rest)


TRACED = {"own_vae", "own_gan", "own_compute_loss"}

CASES = [
    case("own_vae", step_models.VAE, only_x, nothing, quick=(2, 3)),
    case("own_gan", step_models.GAN, step_models.latent, gan(), quick=(2, 3)),
    case("own_gan_clipped", lambda: step_models.GAN(3, 0.2), step_models.latent, gan()),
    case(
        "own_gan_optimizers",
        step_models.GAN,
        step_models.latent,
        gan(
            lambda: optimizers.SGD(0.05, momentum=0.9, clipnorm=0.3),
            lambda: optimizers.RMSprop(0.01, epsilon=1e-3, use_ema=True),
        ),
    ),
    case("own_wgan_gradient_penalty", step_models.Penalized, step_models.latent, gan()),
    case("own_compute_loss_distillation", step_models.Distiller, compile=compiled(adam)),
    case("own_target_network", step_models.Target, rows.classes, nothing, quick=(2, 3)),
    case("own_compute_loss", step_models.OwnLoss, compile=compiled(adam)),
    case(
        "own_compute_loss_weighted",
        step_models.OwnLoss,
        lambda: rows.weighted(rows.classes()),
        compiled(adam, weighted_metrics=("accuracy",)),
    ),
    case("own_compute_metrics", step_models.OwnMetrics, compile=compiled(adam)),
    case(
        "own_train_step_per_batch",
        step_models.Classifier,
        compile=compiled(adam, metrics=lambda: [metrics.PerBatch()]),
    ),
    case("own_test_predict", step_models.OwnTest, compile=compiled(adam, metrics=None)),
    classifier("own_train_step", quick=(2, 3)),
    classifier("own_train_step_clipped", lambda: optimizers.SGD(0.3, global_clipnorm=0.05)),
    classifier(
        "own_train_step_accumulated",
        lambda: optimizers.Adam(
            0.01, epsilon=1e-3, gradient_accumulation_steps=3, use_ema=True, ema_momentum=0.9
        ),
        quick=(2, 3),
    ),
    classifier(
        "own_train_step_scaled",
        lambda: optimizers.LossScaleOptimizer(adam(), dynamic_growth_steps=3),
    ),
    case(
        "own_train_step_float16",
        precision.under("mixed_float16", step_models.Classifier),
        compile=precision.smooth(precision.scaled(adam)),
        tolerance=precision.HALF,
    ),
    classifier("own_train_step_several_optimizers", precision.several),
    classifier(
        "own_train_step_small_batches", data=lambda: rows.classes(11), fit={"batch_size": 2}
    ),
    classifier("own_train_step_one_row", data=lambda: rows.classes(5), fit={"batch_size": 1}),
    case(
        "own_foreign_draws",
        step_models.ForeignDraws,
        compile=compiled(adam),
        backend="torch",
        quick=(2,),
    ),
    *(
        case(
            f"own_torch_{kind.lower()}",
            lambda kind=kind: step_models.RawTorch(kind),
            rows.classes,
            dict,
            backend="torch",
            quick=(2, 3),
        )
        for kind in ("SGD", "Adam")
    ),
]
