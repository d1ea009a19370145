"""The update of one stage's variables, by a Keras optimizer that knows those of all.

Each rank applies the optimizer to what lives on it. What Keras does with all variables
at once is kept to these; what looks at all gradients at once, their global norm and
whether they are finite, is added up over the ranks. Of an optimizer around others each
one may update on ranks of its own. Those that have nothing to update get its own numbers,
such as iterations and the loss scale, which so are the same on all ranks after a step.
"""

import contextlib

import keras
import torch

from parallel_keras import keras_internals


class StageOptimizer:
    """Applies an optimizer to the trainable variables of one stage.

    Args:
        optimizer: A Keras optimizer, built for all variables of the model.
        variables: List of the Keras variables that are updated here.
        rank: Int.
        group: The process group of all ranks.
        channel: What carries values to and from the other ranks.
    """

    def __init__(self, optimizer, variables, rank, group, channel):
        self.optimizer = optimizer
        self.variables = variables
        self.rank = rank
        self.group = group
        self.channel = channel
        # Those that wrap others update with them.
        found = keras_internals.with_inner_optimizers([optimizer])
        self.wrappers = [one for one in found if keras_internals.inner_optimizers(one)]
        self.leaves = [one for one in found if one not in self.wrappers and one.built]
        self._places = _places(self.leaves)
        self._teams: list = []  # of the leaves, once it is known who updates
        self._methods: list = []  # pairs of an optimizer and the methods that replace its own

    def apply(self, gradients):
        """Update the variables with their gradients, `None` where there is none."""
        if not self._teams:
            self._agree(gradients)
        if self.rank in self._everyone.ranks:
            with contextlib.ExitStack() as stack:
                for optimizer, methods in self._methods:
                    stack.enter_context(keras_internals.overridden(optimizer, methods))
                self.optimizer.apply(gradients, self.variables)
        for optimizer, team in zip(self.leaves, self._teams, strict=True):
            team.tell_others(keras_internals.own_scalars(optimizer))
        for optimizer in self.wrappers:
            self._everyone.tell_others(keras_internals.own_scalars(optimizer))

    def _agree(self, gradients):
        """Find out which ranks have gradients for which optimizer."""
        flags = torch.zeros((len(self.leaves), self.group.size()))
        for variable, gradient in zip(self.variables, gradients, strict=True):
            # Keras complains about a variable that its optimizer does not know.
            if gradient is not None and id(variable) in self._places:
                flags[self._places[id(variable)], self.rank] = 1
        self.group.allreduce([flags]).wait()
        self._teams = [self._team(of_leaf) for of_leaf in flags]
        self._everyone = self._team(flags.sum(dim=0))
        self._methods = [
            (one, _Part(one, self.variables, team.add_up).methods)
            for one, team in zip(self.leaves, self._teams, strict=True)
        ]
        for optimizer in self.wrappers:
            if hasattr(optimizer, "check_finite"):
                self._methods.append((optimizer, {"check_finite": self._are_finite}))
            else:
                self._methods.append((optimizer, {"apply": self._apply_each}))

    def _team(self, flags):
        return _Team([n for n, one in enumerate(flags.tolist()) if one], self)

    def _are_finite(self, gradients):
        """Whether all gradients on all ranks are."""
        found = [torch.isfinite(g).all() for g in gradients if g is not None]
        return self._everyone.add_up(torch.stack([~one for one in found]).sum().float()) == 0

    def _apply_each(self, gradients, trainable_variables):
        """Apply each of several optimizers to its own. multi_optimizer.py, 3.15.1."""
        chosen: list = [[] for _ in self.leaves]
        for gradient, variable in zip(gradients, trainable_variables, strict=True):
            chosen[self._places[id(variable)]].append((gradient, variable))
        for optimizer, team, pairs in zip(self.leaves, self._teams, chosen, strict=True):
            if self.rank in team.ranks:
                optimizer.apply(*map(list, zip(*pairs, strict=True)))
        for optimizer in self.wrappers:
            if not hasattr(optimizer, "check_finite"):
                optimizer.iterations.assign_add(1)


class _Team:
    """The ranks that update with an optimizer.

    Args:
        ranks: List of ints.
        stage: The `StageOptimizer` of this rank.
    """

    def __init__(self, ranks, stage):
        self.ranks = ranks
        self.rank = stage.rank
        self.channel = stage.channel
        self.others = [n for n in range(stage.group.size()) if n not in ranks]

    def add_up(self, scalar):
        """The sum of a scalar over these ranks, the same on all of them."""
        root, *others = self.ranks
        if self.rank != root:
            self.channel.send(root, [scalar])
            return self.channel.receive(root, 1)[0]
        for other in others:
            scalar = scalar + self.channel.receive(other, 1)[0]
        for other in others:
            self.channel.send(other, [scalar])
        return scalar

    def tell_others(self, variables):
        """The ranks that do not update take over the new numbers of some variables."""
        if not self.ranks:
            return
        if self.rank == self.ranks[0]:
            for other in self.others:
                self.channel.send(other, [v._value for v in variables])
        elif self.rank in self.others:
            values = self.channel.receive(self.ranks[0], len(variables))
            for variable, value in zip(variables, values, strict=True):
                variable._value.copy_(value)


class _Part:
    """The methods that keep one optimizer to its variables of this stage.

    Args:
        optimizer: A Keras optimizer that wraps no other.
        variables: List of the Keras variables that are updated on this rank.
        add_up: Function of a scalar tensor: its sum over the ranks that update.
    """

    def __init__(self, optimizer, variables, add_up):
        self.optimizer = optimizer
        self.add_up = add_up
        self.cls = type(optimizer)
        chosen = {id(v) for v in variables}
        trainables = keras_internals.optimizer_trainables(optimizer)
        self._numbers = [i for i, v in enumerate(trainables) if id(v) in chosen]
        accumulated = keras_internals.accumulated_gradients(optimizer)
        self._accumulators = [accumulated[i] for i in self._numbers if i < len(accumulated)]
        self.methods = {
            "_clip_gradients": self.clip,
            "_backend_reset_gradient_accumulators": self.reset_accumulators,
            "_update_model_variables_moving_average": self._of_own(
                "_update_model_variables_moving_average"
            ),
            "_overwrite_model_variables_with_average_value": self._of_own(
                "_overwrite_model_variables_with_average_value"
            ),
        }

    def reset_accumulators(self):
        for accumulator in self._accumulators:
            if accumulator is not None:
                accumulator._value.zero_()

    def clip(self, gradients):
        limit = self.optimizer.global_clipnorm
        if limit is None or limit <= 0 or self.optimizer.clipnorm or self.optimizer.clipvalue:
            return self.cls._clip_gradients(self.optimizer, gradients)
        # keras/src/optimizers/base_optimizer.py, 3.15.1: clip_by_global_norm.
        squares = [torch.sum(torch.square(g)) for g in gradients if g is not None]
        norm = torch.sqrt(self.add_up(torch.stack(squares).sum()))
        scale = limit * keras.ops.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        return [g if g is None else g * scale for g in gradients]

    def _of_own(self, name):
        method = getattr(self.cls, name)

        def own(variables):
            averages = keras_internals.moving_averages(self.optimizer)
            chosen = [averages[i] for i in self._numbers]
            with keras_internals.with_moving_averages(self.optimizer, chosen):
                method(self.optimizer, [variables[i] for i in self._numbers])

        return own


def _places(optimizers):
    """Dict from the id of a variable to the number of the optimizer that updates it."""
    return {
        id(variable): number
        for number, optimizer in enumerate(optimizers)
        for variable in keras_internals.optimizer_trainables(optimizer)
    }
