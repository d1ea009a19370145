"""Which rank holds which variable of a model that is cut into stages."""

from parallel_keras import keras_internals


class Homes:
    """The ranks of a model's and its optimizer's variables.

    Args:
        model: A built Keras model.
        cuts: List of its `Staged`: the first one, for training, and others.
        variables: List of Keras variables, in the order of all ranks.

    Attributes:
        variables: That list.
    """

    def __init__(self, model, cuts, variables):
        self.variables = variables
        self._owners: dict = {}
        self._borrowers: dict = {}
        for stage in cuts[0].stages:
            for variable in stage.variables:
                self._owners[id(variable)] = stage.number
        self._state: set = set()
        for stage in (stage for cut in cuts for stage in cut.stages):
            for layer in stage.layers:
                self._state.update(map(id, keras_internals.own_state(layer)))
            for variable in stage.borrowed:
                self._borrowers.setdefault(id(variable), set()).add(stage.number)
        optimizer = keras_internals.compiled_optimizer(model)
        if optimizer is not None and optimizer.built:
            for one in keras_internals.with_inner_optimizers([optimizer]):
                for slot, reference in keras_internals.slots(one):
                    self._owners[id(slot)] = self._owners.get(id(reference), 0)

    def owner(self, variable):
        """The rank where a variable changes; `None` for what each rank has for itself."""
        return self._owners.get(id(variable))

    def ranks(self, variable):
        """The ranks that hold a variable, or `None` for all."""
        owner = self.owner(variable)
        return None if owner is None else {owner, *self._borrowers.get(id(variable), ())}

    def suit(self, cut):
        """Whether each rank holds what its stage of a `Staged` computes with."""
        return all(
            self.owner(v) == cut.owners[id(v)] and stage.number in self.ranks(v)
            for stage in cut.stages
            for v in stage.used
        )

    def of(self, rank):
        """The variables that change on a rank."""
        return [v for v in self.variables if self.owner(v) == rank]

    def state_of(self, rank):
        """Those of them that a forward pass may change, be it in inference."""
        return [v for v in self.of(rank) if id(v) in self._state]

    def of_all(self):
        """The variables that each rank has for itself: iterations, the learning rate."""
        return [v for v in self.variables if self.owner(v) is None]

    def chosen(self, numbers, rank):
        """The tensors, of the variables with these numbers, that a rank holds."""
        variables = [self.variables[number] for number in numbers]
        ranks = [self.ranks(v) for v in variables]
        return [
            v._value
            for v, held in zip(variables, ranks, strict=True)
            if held is None or rank in held
        ]
