"""What runs where: one table that drives the checks, the docs and the tests.

A feature is something that a model, its `compile` or its data may ask for. For
each strategy and backend it either runs exactly, or is refused with a sentence.
`features.py` reads off a model which features it asks for.
"""

from parallel_keras.errors import UnsupportedError

STRATEGIES = ("single", "data", "model", "pipeline")
BACKENDS = ("tensorflow", "torch")

RUNS = None  # the entry of what is exact


class Feature:
    """One line of the table.

    Args:
        title: What is asked for, as a noun, for messages and docs.
        change: What to do instead where it is refused, as a sentence.
        refused: Dict from `(strategy, backend)` to the reason. What is not
            named runs.
    """

    def __init__(self, title, change="", refused=None):
        self.title = title
        self.change = change
        self.refused = refused or {}

    def reason(self, strategy, backend):
        """Why it is refused, or `None` where it runs."""
        return self.refused.get((strategy, backend), RUNS)


def _data(reason, backends=BACKENDS):
    return {("data", backend): reason for backend in backends}


def _pipeline(reason, backends=BACKENDS):
    return {("pipeline", backend): reason for backend in backends}


def _spread(reason, backends=BACKENDS):
    """Refused wherever a batch is cut: over replicas or into micro-batches."""
    return {**_data(reason, backends), **_pipeline(reason, backends)}


_STEP = "its gradients, logs and variables would not be combined over the parts of a batch"
_USE_STOCK = (
    "Leave {name} to Keras and express it as a loss, a metric or `add_loss`, or train "
    "this model with strategy=None."
)

FEATURES = {
    "train_step": Feature(
        "a model's own `train_step`", _USE_STOCK.format(name="`train_step`"), _spread(_STEP)
    ),
    "test_step": Feature(
        "a model's own `test_step`", _USE_STOCK.format(name="`test_step`"), _spread(_STEP)
    ),
    "predict_step": Feature(
        "a model's own `predict_step`",
        _USE_STOCK.format(name="`predict_step`"),
        _spread("its rows would not be put together in order"),
    ),
    "compute_loss": Feature(
        "a model's own `compute_loss`",
        _USE_STOCK.format(name="`compute_loss`"),
        _spread("how it adds up over the rows is not known"),
    ),
    "compute_metrics": Feature(
        "a model's own `compute_metrics`",
        _USE_STOCK.format(name="`compute_metrics`"),
        _spread("how its values add up over the rows is not known"),
    ),
    "own_train_function": Feature(
        "a model's own `make_train_function`, `make_test_function` or `make_predict_function`",
        _USE_STOCK.format(name="the makers of step functions"),
        _spread("the strategy makes these functions"),
    ),
    "loss_none": Feature(
        "a loss with reduction='none'",
        "Use reduction='sum_over_batch_size' (Keras's default).",
        {
            ("data", "torch"): "plain Keras on torch takes no gradient of a vector",
            **_pipeline("it leaves a vector of unknown weight"),
        },
    ),
    "batch_loss": Feature(
        "a loss that is not a mean over the rows of the batch",
        "Return one value per row, or the mean over the rows.",
        _pipeline(
            "on the first batch its value on all rows differed from the combination of its "
            "values on parts of the rows"
        ),
    ),
    "batch_added_loss": Feature(
        "an `add_loss` that is not a mean over the rows of the batch",
        "Add the mean over the rows, or pass the loss to `compile`.",
        _spread(
            "on the first batch its value on all rows differed from the combination of its "
            "values on parts of the rows"
        ),
    ),
    "batch_state": Feature(
        "a layer of your own whose state is not an average over the rows of the batch",
        "Keep state that is a mean over the rows, or none.",
        _spread(
            "on the first batch its state after all rows differed from the combination of "
            "its states after parts of the rows"
        ),
    ),
    "batch_output": Feature(
        "a layer or an operation that mixes the rows of the batch",
        "Compute each row's output from that row alone.",
        _spread(
            "on the first batch its outputs for all rows differed from those for parts of the rows"
        ),
    ),
    "steps_per_execution": Feature(
        "`steps_per_execution` above 1",
        "Leave `steps_per_execution` at 1.",
        {
            **_data("batch logs and callbacks would be skipped on some replicas"),
            ("single", "torch"): "Keras's torch backend does not support it",
            ("model", "torch"): "Keras's torch backend does not support it",
            **_pipeline("batch logs and callbacks would be skipped for some batches"),
        },
    ),
    "jit_compile": Feature(
        "`jit_compile=True`",
        "Use jit_compile='auto' (Keras's default) or False.",
        {
            ("data", "tensorflow"): "XLA cannot compile a step over several devices",
            ("data", "torch"): "a compiled step cannot take part in the all-reduce",
            ("model", "tensorflow"): "XLA compiles for one device",
            ("model", "torch"): "a compiled step does not move from device to device",
            ("pipeline", "tensorflow"): "XLA compiles for one device",
            ("pipeline", "torch"): "a compiled step does not go from process to process",
        },
    ),
    "run_eagerly": Feature(
        "`run_eagerly=True`",
        "Leave `run_eagerly` at False, or debug with strategy=None.",
        _pipeline("stages overlap in the graph of a step", ("tensorflow",)),
    ),
    "eager_entries": Feature(
        "`run_eagerly=True` with a table that is looked up (an embedding)",
        "Leave `run_eagerly` at False, or debug with strategy=None.",
        _data(
            "how its gradient falls into entries is read off the graph of a step", ("tensorflow",)
        ),
    ),
    "overwrite_with_gradient": Feature(
        "weights that are overwritten with their gradient (float8 training)",
        "Train in float32, bfloat16 or float16.",
        _spread("the maxima of the parts of a batch are not combined"),
    ),
    "torch_module": Feature(
        "a `torch.nn.Module` as a layer",
        "Build the layer from Keras layers and `keras.ops`.",
        {
            **_data("its buffers would drift apart on the replicas", ("torch",)),
            **_pipeline("its buffers would move with each micro-batch", ("torch",)),
        },
    ),
    "raw_variable": Feature(
        "a raw `tf.Variable` in a layer",
        "Make it with `self.add_weight(...)` or `keras.Variable(...)`.",
        _data("it is not copied to the replicas", ("tensorflow",)),
    ),
    "ragged": Feature(
        "ragged or sparse tensors in a batch",
        "Pad to dense tensors.",
        _spread("their rows cannot be sliced yet", ("tensorflow",)),
    ),
    "row_shape": Feature(
        "a batch whose arrays have different numbers of rows",
        "Give every input, target and weight the batch as its first dimension.",
        _spread("it cannot be cut into parts of its rows"),
    ),
    "row_output": Feature(
        "an output without one entry per row",
        "Let every output of the model have the batch as its first dimension.",
        _spread("the outputs of the parts of a batch cannot be put together in order"),
    ),
    "synchronized_batch_norm": Feature(
        "`BatchNormalization(synchronized=True)`",
        "Use synchronized=False.",
        {
            **{
                (strategy, "torch"): "Keras refuses to make the layer on this backend"
                for strategy in STRATEGIES
            },
            ("pipeline", "tensorflow"): "a micro-batch cannot wait for those that follow it",
        },
    ),
    "batch_renorm": Feature(
        "`BatchNormalization(renorm=True)`",
        "Use renorm=False.",
        _pipeline("its state would move with each micro-batch"),
    ),
    "stateful_rnn": Feature(
        "a recurrent layer with `stateful=True`",
        "Use stateful=False.",
        _spread("its state is that of the rows of a whole batch"),
    ),
    "assigned_weight": Feature(
        "a layer that assigns a weight that trains in its `call` (SpectralNormalization)",
        "Use strategy='model', or the torch backend.",
        _spread("its gradient would be another", ("tensorflow",)),
    ),
    "layer_metric": Feature(
        "a metric inside a layer",
        "Pass it to `compile(metrics=...)`, or track the value as an output.",
        _pipeline("its state would move with each micro-batch, on one stage"),
    ),
    "shared_state": Feature(
        "a layer with state (moving averages, a seed) that is called on two stages",
        "Place its calls on one stage, or use two layers.",
        _pipeline("in which order the stages would change it is not known"),
    ),
    "wrapped_optimizer": Feature(
        "an optimizer around others (loss scaling, MultiOptimizer)",
        "Train in float32 or bfloat16, with one optimizer.",
        _pipeline("each stage updates its own variables", ("torch",)),
    ),
    "own_update": Feature(
        "an optimizer of your own that looks at the gradients of all variables together",
        "Override `update_step` and keep state for each variable, or use strategy='model'.",
        _pipeline("each stage updates its own variables", ("torch",)),
    ),
    "untraceable_call": Feature(
        "a `call` that cannot be traced with symbolic inputs",
        "Let `call` use layers and `keras.ops` on its inputs only, put weights and random draws "
        "into layers of their own, or use strategy='model'.",
        _pipeline("where it can be cut is read off the graph of its layers"),
    ),
    "measured_timeline": Feature(
        "a measured timeline",
        "Train under strategy='pipeline' or 'data', or have it predicted: "
        "model.timeline(batch_size=...).",
        {
            (strategy, backend): "its step is Keras's own, in which nothing is timed"
            for strategy in ("single", "model")
            for backend in BACKENDS
        },
    ),
}


def check(feature, strategy, backend, received=""):
    """Raise an `UnsupportedError` where a feature is refused.

    Args:
        feature: String, a key of `FEATURES`.
        strategy: A `Strategy`, whose `name` is looked up.
        backend: `"tensorflow"` or `"torch"`.
        received: What exactly was met, for the end of the message.
    """
    line = FEATURES[feature]
    reason = line.reason(strategy.name, backend)
    if reason is not RUNS:
        raise UnsupportedError(
            f"strategy={strategy.name!r} on the {backend} backend does not support "
            f"{line.title}: {reason}. {line.change} Received: {received or line.title}"
        )


def as_markdown():
    """The table of the docs."""
    columns = [(s, b) for s in STRATEGIES for b in BACKENDS]
    rows = [
        "| feature | " + " | ".join(f"{s}, {b}" for s, b in columns) + " | why |",
        "|---|" + "---|" * (len(columns) + 1),
    ]
    for line in FEATURES.values():
        reasons = [line.reason(*column) for column in columns]
        cells = ["runs" if reason is RUNS else "refused" for reason in reasons]
        why = "; ".join(dict.fromkeys(reason for reason in reasons if reason is not RUNS))
        rows.append(f"| {line.title} | " + " | ".join([*cells, why]) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(as_markdown())
