"""What the caller's program changes between steps, found and sent to the workers.

Callbacks are live objects in the caller: they set weights, a learning rate, a
`trainable` flag, or a plain attribute such as `model.beta`. All ranks walk the
model in one order, so a change is named by two numbers. Looking costs
microseconds; an object that takes another's place (an activation, an optimizer,
the constraint of a weight) has the whole model compared. What is not looked at (a
container's contents, globals that a function reads) is caught when that is done
anyhow, at the borders of epochs and calls.
"""

import keras
from keras import tree

from parallel_keras import features, keras_internals
from parallel_keras.backends.torch import buffers, remote
from parallel_keras.backends.torch.reducers import BOOKKEEPING
from parallel_keras.backends.torch.shipping import broadcast

_PLAIN = (int, float, bool, str, type(None))
# Which of the attributes that every layer has decide what it computes.
_OF_EVERY_LAYER = ("_trainable", "activity_regularizer")


class Forwarder:
    """Watches one model, in the caller.

    Args:
        model: The model.
        variables: List of Keras variables in the order of all ranks.
        others: List of `shipping.Other` in that order.

    Attributes:
        variables: The two lists as one.
        has_woken: Bool. Whether an attribute that had been zero, false or `None` until then
            has got another value: what is multiplied with it, or done if it is true, has
            not been seen yet. Set to `False` by whoever has looked; once for each attribute.
    """

    def __init__(self, model, variables, others):
        self.variables = [*variables, *others]
        self._of_model = variables
        self.holders = holders(model)
        base = set(vars(keras.layers.Layer())) | set(vars(keras.Model()))
        self._plain = []
        self._woken: set = set()  # numbers of holders, and attributes, that were false at first
        self.has_woken = False
        self._objects: list = []  # known by identity only
        self._objects_of_users: list = []  # the same, where a step may write them too
        for number, holder in enumerate(self.holders):
            objects = self._objects_of_users if _writes_its_own(holder) else self._objects
            for key, value in vars(holder).items():
                own = key not in base and key not in keras_internals.INSTANCE_OVERRIDES
                if key in BOOKKEEPING or not (own or key in _OF_EVERY_LAYER):
                    continue
                if isinstance(value, _PLAIN):
                    self._plain.append([number, key, vars(holder), value])
                else:
                    objects.append([vars(holder), key, value])
        # Their attributes, and what these are when the workers get the model.
        self.that_write_their_own = [
            (vars(holder), dict(vars(holder))) for holder in self.holders if _writes_its_own(holder)
        ]
        self._objects += [
            [vars(v), key, vars(v)[key]] for v in model.variables for key in keras_internals.RULES
        ]
        self._sizes = [len(vars(holder)) for holder in self.holders]
        self._flags = [v.trainable for v in self.variables]
        self._values = [v._value for v in self.variables]
        self._buffers = [n for n, v in enumerate(variables) if isinstance(v, buffers.Buffer)]
        self.taken()

    def taken(self):
        """All ranks hold what the caller holds now."""
        self._versions = remote.versions(self._values)
        for entry in self._objects_of_users:  # the step itself may have put others there
            entry[2] = entry[0].get(entry[1])
        self._marks = {n: buffers.mark(self.variables[n]) for n in self._buffers}

    def taken_of(self, variables):
        """The same for some variables only: others may have been written meanwhile."""
        chosen = {id(v) for v in variables}
        for number, version in enumerate(remote.versions(self._values)):
            if id(self.variables[number]) in chosen:
                self._versions[number] = version

    def is_same(self, model, variables):
        """Whether the model consists of the very objects that all ranks know."""
        found = holders(model)
        return (
            [id(holder) for holder in found] == [id(holder) for holder in self.holders]
            and [len(vars(holder)) for holder in found] == self._sizes
            and [id(v) for v in variables] == [id(v) for v in self._of_model]
            and all(v._value is value for v, value in zip(variables, self._values, strict=False))
            and self._has_same_objects()
        )

    def _has_same_objects(self):
        return all(
            members.get(key) is value
            for objects in (self._objects, self._objects_of_users)
            for members, key, value in objects
        )

    def changed_variables(self):
        """Numbers of the variables that were written since the last step."""
        return [
            number
            for number, (now, version) in enumerate(
                zip(remote.versions(self._values), self._versions, strict=True)
            )
            if now != version and number not in self._marks
        ] + [
            number
            for number, marked in self._marks.items()
            if buffers.is_written(self.variables[number], marked)
        ]

    def changed_attributes(self):
        """Plain attributes that were written since the last look, as (holder, key, value).

        `None` where one of them is no longer a plain value, where there is another object or a
        buffer is another tensor: the model has to be compared whole.
        """
        if not self._has_same_objects():
            self.has_woken = True  # what has come in its place has not been looked at
            return None
        if any(self.variables[n]._value is not tensor for n, (tensor, _) in self._marks.items()):
            return None
        changed = []
        for entry in self._plain:
            number, key, members, value = entry
            now = members.get(key)
            if now is not value and not (now == value and type(now) is type(value)):
                if not isinstance(now, _PLAIN):
                    return None
                if now and not value and (number, key) not in self._woken:
                    self._woken.add((number, key))
                    self.has_woken = True
                entry[3] = now
                changed.append((number, key, now))
        return changed

    def changed_flags(self):
        """Numbers of the variables whose `trainable` was written, with the new value."""
        flags = [v.trainable for v in self.variables]
        changed = [
            (number, flag)
            for number, (flag, old) in enumerate(zip(flags, self._flags, strict=True))
            if flag != old
        ]
        self._flags = flags
        return changed


def holders(model):
    """The objects whose plain attributes are watched, in one order on all ranks."""
    layers = keras_internals.flatten_layers(model)
    optimizers = keras_internals.with_inner_optimizers(keras_internals.optimizers_of(model))
    rules = [getattr(layer, "activity_regularizer", None) for layer in layers]
    rules += [vars(v)[key] for v in model.variables for key in keras_internals.RULES]
    rules += [keras_internals.schedule_of(optimizer) for optimizer in optimizers]
    metrics = keras_internals.every_metric(model)
    metrics += [one for container in metrics for one in getattr(container, "metrics", ())]
    found = [*layers, *optimizers, *(rule for rule in rules if hasattr(rule, "__dict__"))]
    found += metrics
    found += [loss for loss in features.user_losses(model) if isinstance(loss, keras.losses.Loss)]
    return list({id(holder): holder for holder in found}.values())


def that_write_their_own(model):
    """Those of the `holders` of a model into whose attributes a step may put other objects."""
    return [holder for holder in holders(model) if _writes_its_own(holder)]


def _writes_its_own(holder):
    """Whether a step may put other objects into the attributes of one."""
    return not features.is_keras(holder) or isinstance(holder, keras.Metric)


def apply(model, variables, attributes, flags):
    """Make the caller's changes in a worker.

    Returns:
        Bool. Whether a `trainable` flag was among them.
    """
    objects = holders(model)
    for number, key, value in attributes:
        if key == "_trainable":
            objects[number].trainable = value
        else:
            setattr(objects[number], key, value)
    for number, flag in flags:
        variables[number].trainable = flag
    return bool(flags) or any(key == "_trainable" for _, key, _ in attributes)


def send_values(variables, numbers, group):
    """Give all ranks the caller's values of some variables."""
    for number in numbers:
        broadcast(variables[number]._value, group)


def offset_seeds(model, numbers, variables, rank):
    """Give a worker's seed states their own stream: the same in each run, other for each rank."""
    if not rank:
        return
    chosen = {id(variables[number]) for number in numbers}
    for layer in keras_internals.flatten_layers(model):
        for generator in keras_internals.seed_generators(layer):
            if id(generator.state) in chosen:
                keras_internals.offset_seed(generator.state, rank)


def row_count(data):
    """The rows of a global batch: the first dimension that all its arrays share.

    Returns:
        Int, or `None` where they differ.
    """
    counts = {
        leaf.shape[0] if getattr(leaf, "shape", ()) else None
        for leaf in tree.flatten(data)
        if leaf is not None
    }
    return counts.pop() if len(counts) == 1 else None
