"""A model as the stages of a pipeline: where it is cut, and how a stage computes."""

import collections

import keras

from parallel_keras import (
    backends,
    balance,
    capabilities,
    features,
    keras_internals,
    layout,
    placement,
    stages,
)
from parallel_keras.errors import UnsupportedError


class Staged:
    """A model cut into stages.

    Args:
        model: A built Keras model.
        strategy: A `PipelineParallel`, for messages.
        inputs: Symbolic inputs in the structure that the model takes.
        training: Bool. What a model's own `call` is traced with.
        choose: List of the stage of each call, or a function of the model's calls that
            gives it.
        first: The model's first `Staged`, which is for training: where a variable lives
            there, it lives in all. Defaults to `None`, where this is the first.

    Attributes:
        graph: The model's `keras_internals.Graph`.
        numbers: List of ints: the stage of each call.
        stages: List of `ComputedStage`. In inference some may have nothing to compute.
        owners: Dict from the id of a variable to the number of the stage where it lives.
    """

    def __init__(self, model, strategy, inputs, training, choose, first=None):
        self.training = training
        self.graph = graph_of(model, strategy, inputs, training)
        self.numbers = choose(self.graph.calls) if callable(choose) else choose
        graph, count = self.graph, None if training else len(first.stages)
        parts = stages.cut(
            graph.calls,
            self.numbers,
            graph.inputs,
            graph.outputs,
            graph.losses,
            count,
            changed=lambda call: call.unmasks,
        )
        self.owners: dict = {} if first is None else first.owners
        self.stages = [ComputedStage(model, part, self.owners, self) for part in parts]
        for stage in self.stages:
            stage.own_the_rest(model, self.owners)
        if training:
            _refuse_shared_state(strategy, self.stages)

    def standardize(self, x):
        """The values of the batch, by their numbers."""
        return dict(zip(self.graph.inputs, self.graph.standardize(x), strict=True))


class ComputedStage:
    """One stage, and the layers and variables in it.

    Attributes:
        part: A `stages.Stage`.
        variables: List of the Keras variables that live here: each lives with the
            first stage that uses it in training.
        borrowed: List of those that it uses and another stage owns.
        layers: List of the layers that compute here, nested ones too.
    """

    def __init__(self, model, part, owners, staged):
        self.model = model
        self.part = part
        self.number = part.number
        self.training = staged.training
        operations = {id(call.operation): call.operation for call in part.calls if not call.enters}
        found: dict = {}
        for operation in operations.values():
            if isinstance(operation, keras.Layer):
                for layer in keras_internals.flatten_layers(operation):
                    found[id(layer)] = layer
        self.layers = list(found.values())
        all_layers = enumerate(keras_internals.flatten_layers(model))
        self._numbered = [(number, layer) for number, layer in all_layers if id(layer) in found]
        # By their numbers among the values: the keys of what the model's own `call` adds.
        self._adds = {n: (0, staged.graph.losses.index(n)) for n in part.adds}
        used = [v for x in self.layers for v in keras_internals.own_variables(x)]
        used += [v for call in part.calls for v in call.variables]
        used = list({id(v): v for v in used}.values())
        self.variables = [v for v in used if owners.setdefault(id(v), self.number) == self.number]
        self.borrowed = [v for v in used if owners[id(v)] != self.number]

    def own_the_rest(self, model, owners):
        """Take over what lives here unused; the first stage has what no stage uses."""
        known = {id(v) for v in self.variables}
        rest = [v for v in model.variables if owners.setdefault(id(v), 0) == self.number]
        self.variables += [v for v in rest if id(v) not in known]

    @property
    def takes_batch(self):
        """Whether it needs the model's inputs."""
        return stages.BATCH in self.part.takes.values()

    @property
    def used(self):
        """All variables that it computes with."""
        return [*self.variables, *self.borrowed]

    def forward(self, values):
        """Compute on the values that the stage takes, and put in those that it makes.

        Args:
            values: Dict from the number of a value to a tensor.

        Returns:
            A dict of scalars: what the layers added to the loss for these rows, with the keys
            of `keras_internals.take_losses`.
        """
        with keras_internals.calling(self.model, self.training):
            for call in self.part.calls:
                call(values, self.training)
            added = keras_internals.take_losses(self._numbered)
        added.update((key, values[number]) for number, key in self._adds.items())
        return {key: keras.ops.sum(loss) for key, loss in added.items()}

    def regularization(self):
        """A list of scalars: the regularizers of the trainable variables that live here."""
        return [
            keras.ops.sum(v.regularizer(v))
            for v in self.variables
            if v.trainable and getattr(v, "regularizer", None) is not None
        ]


def symbol(shape, dtype):
    """A symbolic input for tensors of any number of rows."""
    return keras.KerasTensor((None, *shape[1:]), keras.backend.standardize_dtype(dtype))


def _refuse_shared_state(strategy, parts):
    """State that two stages change in one step has no order."""
    for stage in parts:
        for layer in stage.layers:
            shared = {id(v) for v in keras_internals.own_state(layer)}
            shared |= {id(g.state) for g in keras_internals.seed_generators(layer)}
            if shared & {id(v) for v in stage.borrowed}:
                capabilities.check("shared_state", strategy, backends.name(), f"layer {layer.name}")


# ---- the order of work -----------------------------------------------------------------


def is_loss_of_parts(model, graph):
    """Whether each micro-batch's loss is known by itself.

    It is not where it divides by a number of the whole batch, as that of its unmasked steps.
    """
    return features.adds_up_by_rows(model) and not graph.is_masked


def schedule_of(model, strategy, graph):
    """The name of the schedule of a training step.

    A loss that needs all micro-batches at once comes between all forward passes and all
    backward passes, as in GPipe.
    """
    return strategy.schedule if is_loss_of_parts(model, graph) else "gpipe"


# ---- where the model is cut ----------------------------------------------------------


def numbers_of(model, strategy, count, calls):
    """The stage of each call of a model, by places, split points or cost."""
    if strategy.split_points is not None:
        return stages.by_split_points([_names(call) for call in calls], strategy.split_points)
    if placement.has_places(model):
        uses = collections.Counter(id(call.operation) for call in calls)
        numbers = stages.by_places(
            calls,
            [_target(model, call, count) for call in calls],
            lambda call: uses[id(call.operation)] > 1,
            lambda call: call.operation.name,
        )
        return numbers
    return stages.by_counts(_counts(model, strategy, count, calls))


def planned(model, strategy, count, inputs, operations):
    """What a training step will do with a list of layers and operations.

    Args:
        operations: In the order in which they run.

    Returns:
        A list with the stage of each, where one that is never called is on the first, and the
        name of the step's schedule.
    """
    graph = graph_of(model, strategy, inputs, training=True)
    numbers = numbers_of(model, strategy, count, graph.calls)
    waiting: dict = {}
    for call, number in zip(graph.calls, numbers, strict=True):
        waiting.setdefault(id(call.operation), []).append(number)
    found = [_next(waiting.get(id(operation))) for operation in operations]
    return found, schedule_of(model, strategy, graph)


def _next(waiting):
    """The next entry of a list, whose last one stays."""
    if not waiting:
        return 0
    return waiting.pop(0) if len(waiting) > 1 else waiting[0]


def numbers_like(other, calls):
    """The stage of each call, with each layer where it is in another graph of the model."""
    operations = [id(call.operation) for call in calls]
    if operations == [id(call.operation) for call in other.graph.calls]:
        return other.numbers
    known: dict = {}
    for call, number in zip(other.graph.calls, other.numbers, strict=True):
        known.setdefault(id(call.operation), number)
    targets = [known.get(operation) for operation in operations]
    return stages.by_places(calls, targets, lambda call: True, lambda call: call.operation.name)


def _counts(model, strategy, count, calls):
    """The number of calls of each stage: of even cost, or as `balance` lists them."""
    if isinstance(strategy.balance, tuple):
        # What only enters a nested model goes with what comes next.
        listed = iter(stages.by_counts(strategy.balance))
        names = [call.operation.name for call in calls if not call.enters]
        stages.check_counts(strategy.balance, names, "each stage")
        counts, waiting, number = [0] * len(strategy.balance), 0, 0
        for call in calls:
            waiting += 1
            if not call.enters:
                number = next(listed)
                counts[number] += waiting
                waiting = 0
        counts[number] += waiting
        return counts
    weights: dict = {}
    for operation, cost in layout.estimated(model):
        weights.setdefault(id(operation), []).append(layout.cost_of(cost, strategy.balance))
    listed_costs = [0 if c.enters else _next(weights.get(id(c.operation))) for c in calls]
    if count > len(calls):
        raise ValueError(
            f"A model of {len(calls)} layers and operations cannot be cut into {count} stages: "
            f"write pk.PipelineParallel({len(calls)}). Received: {count} stages"
        )
    return balance.split(listed_costs, count)


def _target(model, call, count):
    """The stage that a call is placed on, or `None`."""
    inside = placement.inner_places(call.operation) if not call.enters else set()
    for unit in (call.operation, *reversed(call.inside)):
        target = placement.own_place(unit)
        if target is not None:
            break
    else:
        if len(inside) > 1:
            raise ValueError(
                f"The layers inside {call.operation.name!r} are placed on several stages, and a "
                "pipeline is cut between the layers of a functional model, a Sequential, or "
                "those that a model's `call` calls. Place it as a whole, or make it a "
                f"functional model. Received: places {sorted(inside, key=str)}"
            )
        target = inside.pop() if inside else None
    if isinstance(target, str):
        raise ValueError(
            "Under strategy='pipeline' a place is the number of a stage, not a device: write "
            "pk.place(0), and name the devices of the stages with "
            f"pk.PipelineParallel(devices=[...]). Received: place {target!r}"
        )
    if target is not None and target >= count:
        raise ValueError(
            f"{call.operation.name} is placed on stage {target}, and the strategy has {count} "
            f"stages. Give it more, or place the layer on a lower one. Received: place {target}"
        )
    return count - 1 if target == -1 else target


def _names(call):
    """The names by which a split point may mean a call: its layer's or a nested model's."""
    names = [unit.name for unit in (call.operation, *call.inside[1:])]
    path = "/".join(unit.name for unit in (*call.inside[1:], call.operation))
    return tuple(dict.fromkeys([path, getattr(call.operation, "path", None) or path, *names]))


def graph_of(model, strategy, inputs, training):
    try:
        with backends.room("step_scope").traced(model):
            graph = keras_internals.graph_of_model(model, inputs, training)
    except UnsupportedError:
        raise
    except Exception as error:
        capabilities.check(
            "untraceable_call",
            strategy,
            backends.name(),
            f"{type(model).__name__}.call, which raised {type(error).__name__}: {error}",
        )
        raise
    for call in graph.calls:
        # A weight that was read, or a random draw, would stay what it was when it was traced.
        if call.tensors and not call.passes_training:
            capabilities.check(
                "untraceable_call",
                strategy,
                backends.name(),
                f"{call.operation.name} in {type(model).__name__}.call, which is given a tensor "
                "that does not come from the inputs, such as a weight's value or a random draw",
            )
    return graph
