"""Every metric class of Keras, one compile call for each kind of output."""

from functools import partial

import keras
import models
import rows
from keras import metrics, ops

from cases import case, compiled

# A class that is not in one of these lists is found by
# test_cases.test_every_metric_class_has_a_case. Each has its name, since Keras
# would number the second one of a class.
REGRESSION = {
    "mse": metrics.MeanSquaredError,
    "rmse": metrics.RootMeanSquaredError,
    "mae": metrics.MeanAbsoluteError,
    "mape": metrics.MeanAbsolutePercentageError,
    "msle": metrics.MeanSquaredLogarithmicError,
    "cosine": metrics.CosineSimilarity,
    "log_cosh": metrics.LogCoshError,
    "r2": metrics.R2Score,
    "r2_weighted": partial(metrics.R2Score, class_aggregation="variance_weighted_average"),
    "pearson": metrics.PearsonCorrelation,
    "concordance": metrics.ConcordanceCorrelation,
    "poisson": metrics.Poisson,
}
BINARY = {
    "accuracy": metrics.BinaryAccuracy,
    "crossentropy": metrics.BinaryCrossentropy,
    "precision": metrics.Precision,
    "recall": metrics.Recall,
    "tp": metrics.TruePositives,
    "tn": metrics.TrueNegatives,
    "fp": metrics.FalsePositives,
    "fn": metrics.FalseNegatives,
    "roc": metrics.AUC,
    "pr": partial(metrics.AUC, curve="PR", summation_method="minoring"),
    "roc_20": partial(metrics.AUC, num_thresholds=20, summation_method="majoring"),
    "roc_of_thresholds": partial(metrics.AUC, thresholds=[0.3, 0.5, 0.55]),
    "precision_at_recall": partial(metrics.PrecisionAtRecall, 0.5),
    "recall_at_precision": partial(metrics.RecallAtPrecision, 0.5),
    "sensitivity": partial(metrics.SensitivityAtSpecificity, 0.5),
    "specificity": partial(metrics.SpecificityAtSensitivity, 0.5),
    "iou": partial(metrics.BinaryIoU, target_class_ids=[0, 1], threshold=0.5),
    "precision_30": partial(metrics.Precision, thresholds=0.3),
}
MULTI_LABEL = {
    "auc": partial(metrics.AUC, multi_label=True, num_labels=3),
    "auc_weighted": partial(metrics.AUC, multi_label=True, label_weights=[1.0, 2.0, 0.5]),
    "f1": partial(metrics.F1Score, "macro", threshold=0.5),
    "f2": partial(metrics.FBetaScore, "micro", beta=2.0, threshold=0.5),
    "accuracy": metrics.BinaryAccuracy,
}
CATEGORICAL = {
    "accuracy": metrics.CategoricalAccuracy,
    "crossentropy": metrics.CategoricalCrossentropy,
    "hinge": metrics.CategoricalHinge,
    "kl": metrics.KLDivergence,
    "top_2": partial(metrics.TopKCategoricalAccuracy, 2),
    "f1": partial(metrics.F1Score, "weighted"),
    "f_half": partial(metrics.FBetaScore, "macro", beta=0.5),
    "iou": partial(metrics.OneHotIoU, num_classes=3, target_class_ids=[0, 2]),
    "mean_iou": partial(metrics.OneHotMeanIoU, num_classes=3),
    "precision_of_1": partial(metrics.Precision, class_id=1),
    "recall_2": partial(metrics.Recall, top_k=2),
}
SPARSE = {
    "accuracy": metrics.SparseCategoricalAccuracy,
    "crossentropy": metrics.SparseCategoricalCrossentropy,
    "top_2": partial(metrics.SparseTopKCategoricalAccuracy, 2),
    "iou": partial(metrics.IoU, num_classes=3, target_class_ids=[0, 1], sparse_y_pred=False),
    "mean_iou": partial(metrics.MeanIoU, num_classes=3, sparse_y_pred=False),
}
SIGNS = {"hinge": metrics.Hinge, "squared": metrics.SquaredHinge}
# Of an output that takes whole values: its target and prediction can be equal.
ROUNDED = {
    "equal": metrics.Accuracy,
    "wrapped": partial(metrics.MeanMetricWrapper, keras.losses.mean_absolute_error),
}
# These take no pairs of target and prediction: a layer updates them.
OF_LAYERS = {metrics.Mean, metrics.Sum}


def rows_metric(y_true, y_pred):
    """A metric function that gives a value per row."""
    return ops.max(ops.abs(y_true - y_pred), axis=-1)


def scalar_metric(y_true, y_pred):
    """A metric function that gives the mean over the batch."""
    return ops.mean(ops.square(y_true - y_pred))


class SumOfErrors(metrics.Metric):
    """A metric class of the user's own, whose state adds up over the rows."""

    def __init__(self, name="sum_of_errors"):
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", dtype="int32", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.abs(y_true - y_pred)))
        self.count.assign_add(ops.shape(y_pred)[0])

    def result(self):
        return self.total / ops.cast(ops.maximum(self.count, 1), "float32")


class Largest(metrics.Metric):
    """Its state is a maximum, and a minimum."""

    def __init__(self):
        super().__init__(name="largest")
        self.largest = self.add_variable((), "zeros", name="largest")
        self.smallest = self.add_variable((), "zeros", name="smallest")
        self.reset_state()

    def reset_state(self):
        self.largest.assign(0.0)
        self.smallest.assign(float("inf"))

    def update_state(self, y_true, y_pred, sample_weight=None):
        errors = ops.abs(ops.subtract(y_true, y_pred))
        self.largest.assign(ops.maximum(self.largest, ops.max(errors)))
        self.smallest.assign(ops.minimum(self.smallest, ops.min(errors)))

    def result(self):
        return self.largest - self.smallest


class Extreme(metrics.Metric):
    """Its state is the smallest error (with sign -1 the largest), from infinity on."""

    def __init__(self, sign):
        super().__init__(name="extreme")
        self.sign = sign
        self.value = self.add_variable((), "zeros", name="value")
        self.reset_state()

    def reset_state(self):
        self.value.assign(self.sign * float("inf"))

    def update_state(self, y_true, y_pred, sample_weight=None):
        errors = ops.abs(ops.subtract(y_true, y_pred))
        nearest = ops.minimum if self.sign > 0 else ops.maximum
        of_batch = ops.min(errors) if self.sign > 0 else ops.max(errors)
        self.value.assign(nearest(self.value, of_batch))

    def result(self):
        return ops.copy(self.value)


class Latest(metrics.Metric):
    """Its state is what the last four batches had, in whole numbers and others."""

    def __init__(self):
        super().__init__(name="latest")
        self.errors = self.add_variable((4,), "zeros", name="errors")
        self.rows = self.add_variable((), "zeros", dtype="int32", name="rows")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = ops.mean(ops.abs(y_true - y_pred))
        self.errors.assign(ops.concatenate([self.errors[1:], ops.reshape(error, (1,))]))
        self.rows.assign(ops.shape(y_pred)[0])

    def result(self):
        return ops.max(self.errors) + ops.cast(self.rows, "float32")


class PerBatch(metrics.Metric):
    """The mean over the batches, whatever their sizes, which it counts in a whole number."""

    def __init__(self):
        super().__init__(name="per_batch")
        self.total = self.add_variable((), "zeros", name="total")
        self.batches = self.add_variable((), "zeros", dtype="int32", name="batches")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.mean(ops.square(y_pred)))
        self.batches.assign_add(1)

    def result(self):
        return self.total / ops.cast(ops.maximum(self.batches, 1), "float32")


class Listed(metrics.Metric):
    """Its state is a list, as of a metric around a library."""

    def __init__(self):
        super().__init__(name="listed")
        self.errors = []

    def reset_state(self):
        self.errors = []

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.errors.append(ops.reshape(ops.abs(y_true - y_pred), (-1,)))

    def result(self):
        return ops.median(ops.concatenate(self.errors)) if self.errors else ops.zeros(())


def root_metric(y_true, y_pred):
    """A metric function that is no mean over the rows."""
    return ops.sqrt(ops.mean(ops.square(y_true - y_pred)))


def made(classes):
    return lambda: [make(name=name) for name, make in classes.items()]


def rounded_data():
    labels = rows.classes()
    kind = rows.binary()["y"]
    return {"x": labels["x"], "y": {"label": labels["y"], "kind": kind}}


def three(builder):
    return lambda: builder(outputs=3)


# What `make test` runs on TensorFlow too (see harness.grid).
TRACED = {
    "metrics_weighted",
    "metric_class",
    "metrics_of_the_batch",
    "metric_largest",
    "metric_per_batch",
}

CASES = [
    case(
        "metrics_regression",
        three(models.regressor),
        three(rows.regression),
        compiled(loss="mse", metrics=made(REGRESSION)),
        quick=(2, 3),
    ),
    case(
        "metrics_binary",
        models.sigmoid,
        rows.binary,
        compiled(loss="binary_crossentropy", metrics=made(BINARY)),
        quick=(2, 3),
    ),
    case(
        "metrics_multi_label",
        three(models.sigmoid),
        three(rows.binary),
        compiled(loss="binary_crossentropy", metrics=made(MULTI_LABEL)),
    ),
    case(
        "metrics_categorical",
        data=rows.one_hot,
        compile=compiled(loss="categorical_crossentropy", metrics=made(CATEGORICAL)),
    ),
    case("metrics_sparse", compile=compiled(metrics=made(SPARSE))),
    case(
        "metrics_signs",
        models.signs,
        rows.signs,
        compiled(loss="hinge", metrics=made(SIGNS)),
    ),
    case(
        "metrics_rounded",
        models.rounded_output,
        rounded_data,
        compiled(
            loss={"label": "sparse_categorical_crossentropy", "kind": None},
            metrics=lambda: {"kind": made(ROUNDED)()},
        ),
    ),
    case(
        "metrics_weighted",
        models.sigmoid,
        lambda: rows.weighted(rows.binary()),
        compiled(
            loss="binary_crossentropy",
            metrics=made({"plain_precision": metrics.Precision, "plain_auc": metrics.AUC}),
            weighted_metrics=made(
                {name: BINARY[name] for name in ("accuracy", "recall", "roc", "pr", "iou", "tp")}
            ),
        ),
    ),
    case(
        "metrics_weighted_all",
        models.sigmoid,
        lambda: rows.weighted(rows.binary()),
        compiled(loss="binary_crossentropy", metrics=None, weighted_metrics=made(BINARY)),
        quick=(),
    ),
    case(
        "metrics_weighted_regression",
        three(models.regressor),
        lambda: rows.weighted(rows.regression(outputs=3)),
        compiled(loss="mse", metrics=(), weighted_metrics=made(REGRESSION)),
        quick=(),
    ),
    case(
        "metric_functions",
        three(models.regressor),
        three(rows.regression),
        compiled(loss="mse", metrics=(rows_metric, scalar_metric)),
        quick=(2, 3),
    ),
    case(
        "metric_class",
        three(models.regressor),
        three(rows.regression),
        compiled(loss="mse", metrics=lambda: [SumOfErrors()]),
    ),
    case(
        "metric_per_batch",
        three(models.regressor),
        three(rows.regression),
        compiled(loss="mse", metrics=lambda: [PerBatch()]),
        quick=(2, 3),
    ),
    case(
        "metrics_of_the_batch",
        three(models.regressor),
        lambda: rows.with_validation(rows.regression(outputs=3)),
        compiled(loss="mse", metrics=lambda: [Largest(), Latest(), root_metric, "mae"]),
        quick=(2, 3),
    ),
    *(
        case(
            name,
            three(models.regressor),
            three(rows.regression),
            compiled(loss="mse", metrics=lambda sign=sign: [Extreme(sign)]),
            quick=(2, 3),
        )
        for name, sign in (("metric_smallest", 1.0), ("metric_largest", -1.0))
    ),
    case(
        "metric_list",
        three(models.regressor),
        three(rows.regression),
        compiled(loss="mse", metrics=lambda: [Listed()]),
        quick=(2, 3),
        backend="torch",
    ),
    case(
        "metrics_masked",
        models.masked_steps,
        rows.weighted_padded,
        compiled(
            metrics=made({"plain": metrics.SparseCategoricalAccuracy}),
            weighted_metrics=made(
                {
                    "accuracy": metrics.SparseCategoricalAccuracy,
                    "crossentropy": metrics.SparseCategoricalCrossentropy,
                }
            ),
        ),
    ),
]
