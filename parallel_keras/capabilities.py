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


_STEP = "its gradients, logs and variables would not be combined over micro-batches"
_USE_STOCK = (
    "Leave {name} to Keras and express it as a loss, a metric or `add_loss`, or train "
    "this model with strategy='data' or None."
)
_ON_PARTS = "on the first batch what it did to all rows was not what it did to parts of the rows"

FEATURES = {
    "train_step": Feature(
        "a model's own `train_step`", _USE_STOCK.format(name="`train_step`"), _pipeline(_STEP)
    ),
    "test_step": Feature(
        "a model's own `test_step`", _USE_STOCK.format(name="`test_step`"), _pipeline(_STEP)
    ),
    "predict_step": Feature(
        "a model's own `predict_step`",
        _USE_STOCK.format(name="`predict_step`"),
        _pipeline("its rows would not be put together in order"),
    ),
    "compute_loss": Feature(
        "a model's own `compute_loss`",
        _USE_STOCK.format(name="`compute_loss`"),
        _pipeline("how it adds up over the rows is not known"),
    ),
    "compute_metrics": Feature(
        "a model's own `compute_metrics`",
        _USE_STOCK.format(name="`compute_metrics`"),
        _pipeline("how its values add up over the rows is not known"),
    ),
    "step_sum": Feature(
        "a step of the model's own whose gradients are no mean over the rows of the batch",
        "Let each loss be a mean over the rows, of terms that come from one row each, clip "
        "gradients by an argument of the optimizer (`clipnorm=`, `global_clipnorm=`, "
        "`clipvalue=`), and draw random numbers with `keras.random`; or train this model with "
        "strategy=None.",
        _data(_ON_PARTS),
    ),
    "step_control": Feature(
        "a step of the model's own in which it depends on the rows which optimizer is applied",
        "Apply the same optimizers to the same variables in the same order, whatever the rows.",
        _data("the replicas could not be synchronised"),
    ),
    "step_rows": Feature(
        "a step of the model's own that works for one batch size only",
        "Ask for the rows that there are, `keras.ops.shape(x)[0]`, instead of writing their number "
        "down: each replica has a part of them.",
        _data("it failed on parts of the rows of the first batch"),
    ),
    "step_gradients": Feature(
        "a step of the model's own that adds its gradients to those of the step before",
        "Call `self.zero_grad()` before `loss.backward()`, and accumulate with the argument "
        "`gradient_accumulation_steps=` of the optimizer.",
        _data("the shares of the rows may be others by then"),
    ),
    "step_closure": Feature(
        "a `torch.optim` optimizer that is given a closure",
        "Compute the gradients before, and call `step()`.",
        _data("its gradients would come after they are synchronised", ("torch",)),
    ),
    "step_metric": Feature(
        "a metric that a step of the model's own updates in a way that does not add up over the "
        "rows, or computes with",
        "Update it with values of single rows, or with a mean over the rows.",
        _data(_ON_PARTS),
    ),
    "step_state": Feature(
        "a variable or an attribute that a step of the model's own sets to what is no mean over "
        "the rows of the batch",
        "Keep means over the rows in a `keras.Variable` of the model (`self.add_weight`), and "
        "count in it what does not depend on the rows.",
        _data(_ON_PARTS),
    ),
    "step_log": Feature(
        "a value in the logs of a step of the model's own that is neither a mean over the rows "
        "nor the result of a metric",
        "Decorate the step with `@pk.reduce_logs(name='sum')` ('max', 'min'), or return the "
        "`result()` of a metric, after its update.",
        _data(_ON_PARTS),
    ),
    "step_synchronized": Feature(
        "a `synchronized` layer in a model with a training step of its own",
        "Use synchronized=False, or the TensorFlow backend.",
        _data("its gradients would count with the share of the rows of another rank", ("torch",)),
    ),
    "step_output": Feature(
        "a `predict_step` that mixes the rows of the batch",
        "Compute each row's output from that row alone.",
        _data(_ON_PARTS),
    ),
    "foreign_variable": Feature(
        "a variable that a step of the model's own assigns and that is none of the model's",
        "Hold it in an attribute of the model or of one of its layers, as a `keras.Variable`.",
        _data("what the replicas assign would not be brought together"),
    ),
    "branched_apply": Feature(
        "an `optimizer.apply` inside of `tf.cond`, `tf.while_loop` and the like",
        "Apply in the step itself; a loop of Python's own, such as `for _ in range(5)`, may "
        "surround it.",
        _data("replicas cannot wait for each other in a branch", ("tensorflow",)),
    ),
    "eager_attribute": Feature(
        "`run_eagerly=True` with a step of the model's own that sets plain attributes",
        "Leave `run_eagerly` at False, or keep what it sets in a `keras.Variable` of the model.",
        _data("the replicas run one after another, and share the attributes", ("tensorflow",)),
    ),
    "changed_entries": Feature(
        "a step of the model's own that computes with the gradient of a table which it looks up "
        "both by the rows and by places that are the same for all rows",
        "Give the gradient to the optimizer as the tape gives it.",
        _data("which of its entries are one for all replicas cannot be told", ("tensorflow",)),
    ),
    "own_timeline": Feature(
        "`model.timeline()` of what was measured in a model's own `train_step`",
        "Have it predicted: model.timeline(batch_size=...).",
        _data("when its replicas wait for each other is not taken down", ("tensorflow",)),
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
    "loss_state": Feature(
        "a loss that keeps state from batch to batch",
        "Change what it depends on in a callback, between the batches, or use strategy='data'.",
        _pipeline("its state would move with each micro-batch"),
    ),
    "loss_assigns": Feature(
        "a loss that assigns a variable of the model or of its optimizer",
        "Assign it in a layer's `call`, or in a callback.",
        _data("the ranks that do not compute the loss would not see it", ("torch",)),
    ),
    "loss_reads": Feature(
        "a loss that reads a variable of the model or of its optimizer",
        "Add what depends on it with `add_loss` in its layer, or as a regularizer.",
        _pipeline(
            "the gradient would be lost to the stage of the variable, and the logs would have "
            "its value after the step"
        ),
    ),
    "metric_reads": Feature(
        "a metric that reads a weight that trains, or what the optimizer counts",
        "Read it in a callback, or in a metric of `evaluate`.",
        _spread("metrics are updated before the optimizer is applied, and not after"),
    ),
    "penalty_state": Feature(
        "a regularizer that keeps state from call to call",
        "Change what it depends on in a callback, between the batches.",
        _spread("it is not called equally often on all ranks", ("torch",)),
    ),
    "batch_added_loss": Feature(
        "an `add_loss` that is neither a mean nor a sum over the rows of the batch",
        "Add the mean or the sum over the rows, or pass the loss to `compile`.",
        _spread(
            "on the first batch its value on all rows was not to be had from its values on parts "
            "of the rows"
        ),
    ),
    "split_sum": Feature(
        "a layer that adds a sum over the rows to the loss, called on two stages",
        "Place its calls on one stage, use two layers, or add the mean over the rows.",
        _pipeline("which of its terms are sums is not known of its calls"),
    ),
    "batch_state": Feature(
        "a layer of your own whose state is not an average over the rows of the batch",
        "Keep state that is a mean over the rows, or none.",
        _spread(
            "on the first batch its state after all rows differed from the combination of "
            "its states after parts of the rows"
        ),
    ),
    "whole_numbers": Feature(
        "a variable of whole numbers that is set to what depends on the rows",
        "Count in it what is the same for all rows, or keep a mean over the rows in a variable of "
        "floating-point numbers.",
        {
            **_data("the replicas assigned different numbers, of which there is no mean"),
            **_pipeline("the micro-batches assigned different numbers, of which there is no mean"),
        },
    ),
    "batch_output": Feature(
        "a layer or an operation that mixes the rows of the batch",
        "Compute each row's output from that row alone.",
        _spread(
            "on the first batch its outputs for all rows differed from those for parts of the rows"
        ),
    ),
    "batch_size": Feature(
        "a layer or an operation that works for one batch size only",
        "Ask for the rows that there are, `keras.ops.shape(x)[0]`, or leave the first dimension "
        "of `keras.ops.reshape` at -1: each device has a part of the rows.",
        _spread("it failed on parts of the rows of the first batch"),
    ),
    "steps_per_execution": Feature(
        "`steps_per_execution` above 1",
        "Leave `steps_per_execution` at 1.",
        {
            (strategy, "torch"): "Keras's torch backend does not support it"
            for strategy in STRATEGIES
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
    "torch_buffer": Feature(
        "a `torch.nn.Module`, or a layer with a buffer of torch, whose buffers change in training",
        "Build the layer from Keras layers and `keras.ops`.",
        _pipeline("they would move with each micro-batch", ("torch",)),
    ),
    "torch_sync_batch_norm": Feature(
        "a `torch.nn.SyncBatchNorm`",
        "Use `keras.layers.BatchNormalization(synchronized=True)`.",
        _spread("it would look for a process group of its own", ("torch",)),
    ),
    "torch_weight_hook": Feature(
        "a weight that a hook of torch computes anew at each call (`torch.nn.utils.spectral_norm`, "
        "`torch.nn.utils.weight_norm`)",
        "Use `torch.nn.utils.parametrizations`.",
        _spread("the tensor that it leaves behind cannot be sent to the workers", ("torch",)),
    ),
    "torch_untracked_module": Feature(
        "a `torch.nn.Module` that Keras does not see, in a list or a dict of a layer",
        "Make it an attribute of the layer, or put it into a `torch.nn.ModuleList` that is one.",
        _spread("its state is not that of the model", ("torch",)),
    ),
    "raw_variable": Feature(
        "a raw `tf.Variable` in a layer",
        "Make it with `self.add_weight(...)` or `keras.Variable(...)`.",
        {
            **_data("it is not copied to the replicas", ("tensorflow",)),
            **_pipeline("it would be written once for each micro-batch", ("tensorflow",)),
        },
    ),
    "ragged": Feature(
        "ragged or sparse tensors in a batch",
        "Pad to dense tensors.",
        _spread("their rows cannot be sliced yet"),
    ),
    "row_shape": Feature(
        "a batch whose arrays have different numbers of rows",
        "Give every input, target and weight the batch as its first dimension.",
        _spread("it cannot be cut into parts of its rows"),
    ),
    "no_rows": Feature(
        "a batch without rows",
        "Leave such batches out.",
        _spread("there is nothing to cut into parts"),
    ),
    "row_output": Feature(
        "an output without one entry per row",
        "Let every output of the model have the batch as its first dimension.",
        _spread("the outputs of the parts of a batch cannot be put together in order"),
    ),
    "synchronized_batch_norm": Feature(
        "`BatchNormalization(synchronized=True)`",
        "Use synchronized=False.",
        _pipeline("a micro-batch cannot wait for those that follow it"),
    ),
    "synchronized_moments": Feature(
        "`keras.ops.moments(synchronized=True)` in a layer without an attribute `synchronized`",
        "Give the layer an attribute: `self.synchronized = True`.",
        _data("a replica without rows would not take part", ("torch",)),
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
    "moving_weight": Feature(
        "a layer that moves a weight that trains in each `call`",
        "Use one micro-batch, or move it in a callback.",
        _pipeline("it would move with each micro-batch", ("torch",)),
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
