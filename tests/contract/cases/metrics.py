"""Every metric class of Keras, one compile call for each kind of output."""

import keras
import models
import rows
from cases import case, compiled
from keras import metrics, ops

# A class that is not in one of these lists is found by
# test_cases.test_every_metric_class_has_a_case.
REGRESSION = (
    metrics.MeanSquaredError,
    metrics.RootMeanSquaredError,
    metrics.MeanAbsoluteError,
    metrics.MeanAbsolutePercentageError,
    metrics.MeanSquaredLogarithmicError,
    metrics.CosineSimilarity,
    metrics.LogCoshError,
    metrics.R2Score,
    metrics.PearsonCorrelation,
    metrics.ConcordanceCorrelation,
    metrics.Poisson,
)
BINARY = (
    metrics.BinaryAccuracy,
    metrics.BinaryCrossentropy,
    metrics.Precision,
    metrics.Recall,
    metrics.TruePositives,
    metrics.TrueNegatives,
    metrics.FalsePositives,
    metrics.FalseNegatives,
    lambda: metrics.AUC(name="roc"),
    lambda: metrics.AUC(curve="PR", summation_method="minoring", name="pr"),
    lambda: metrics.AUC(num_thresholds=20, summation_method="majoring", name="roc_20"),
    lambda: metrics.PrecisionAtRecall(0.5),
    lambda: metrics.RecallAtPrecision(0.5),
    lambda: metrics.SensitivityAtSpecificity(0.5),
    lambda: metrics.SpecificityAtSensitivity(0.5),
    lambda: metrics.BinaryIoU(target_class_ids=[0, 1], threshold=0.5),
    lambda: metrics.Precision(thresholds=0.3, name="precision_30"),
)
MULTI_LABEL = (
    lambda: metrics.AUC(multi_label=True, num_labels=3, name="auc"),
    lambda: metrics.AUC(multi_label=True, label_weights=[1.0, 2.0, 0.5], name="auc_weighted"),
    lambda: metrics.F1Score("macro", threshold=0.5, name="f1"),
    lambda: metrics.FBetaScore("micro", beta=2.0, threshold=0.5, name="f2"),
    lambda: metrics.BinaryAccuracy(),
)
CATEGORICAL = (
    metrics.CategoricalAccuracy,
    metrics.CategoricalCrossentropy,
    metrics.CategoricalHinge,
    metrics.KLDivergence,
    lambda: metrics.TopKCategoricalAccuracy(2),
    lambda: metrics.F1Score("weighted"),
    lambda: metrics.FBetaScore("macro", beta=0.5),
    lambda: metrics.OneHotIoU(num_classes=3, target_class_ids=[0, 2]),
    lambda: metrics.OneHotMeanIoU(num_classes=3),
    lambda: metrics.Precision(class_id=1, name="precision_of_1"),
    lambda: metrics.Recall(top_k=2, name="recall_2"),
)
SPARSE = (
    metrics.SparseCategoricalAccuracy,
    metrics.SparseCategoricalCrossentropy,
    lambda: metrics.SparseTopKCategoricalAccuracy(2),
    lambda: metrics.IoU(num_classes=3, target_class_ids=[0, 1], sparse_y_pred=False),
    lambda: metrics.MeanIoU(num_classes=3, sparse_y_pred=False),
)
SIGNS = (metrics.Hinge, metrics.SquaredHinge)
# Of an output that takes whole values: its target and prediction can be equal.
ROUNDED = (
    metrics.Accuracy,
    metrics.Mean,
    metrics.Sum,
    lambda: metrics.MeanMetricWrapper(keras.losses.mean_absolute_error, name="wrapped"),
)


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


def made(classes):
    return lambda: [make() for make in classes]


def rounded_data():
    labels = rows.classes()
    kind = rows.binary()["y"]
    return {"x": labels["x"], "y": {"label": labels["y"], "kind": kind}}


def three(builder):
    return lambda: builder(outputs=3)


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
            metrics=made(BINARY[:4]),
            weighted_metrics=lambda: [
                metrics.AUC(name="auc"),
                metrics.BinaryAccuracy(name="weighted_accuracy"),
                metrics.Recall(name="weighted_recall"),
            ],
        ),
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
]
