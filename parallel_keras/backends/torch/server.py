"""What a worker does with the caller's messages.

`workers.py` delivers the messages; each is a method's name and its arguments.
A worker holds a replica of each model that the caller has trained lately.
"""

import warnings

import torch

from parallel_keras import keras_internals
from parallel_keras.backends.torch import configuration, forwarding, shipping
from parallel_keras.backends.torch.metrics import WorkerMetrics
from parallel_keras.backends.torch.own_caller import publish
from parallel_keras.backends.torch.own_step import OwnStep, trains_by_itself
from parallel_keras.backends.torch.replica import Replica, fold_accumulators, forget_accumulated
from parallel_keras.backends.torch.stage_server import ServedStage, read_batch
from parallel_keras.backends.torch.structures import leaves


class Server:
    """Serves the steps of one rank.

    Args:
        context: The worker's rank, world size, group, buffers and board.
    """

    def __init__(self, context):
        self.context = context
        self.models = {}

    def handle(self, message):
        """Serve one message: a tuple of a method's name and its arguments."""
        name, *arguments = message
        getattr(self, f"on_{name}")(*arguments)

    def on_configure(self, values):
        """See what the caller sees: Keras's and torch's settings, the import path."""
        configuration.apply(values, self.context.rank)
        # The caller gives this warning already, for the same weights.
        warnings.filterwarnings("ignore", message="Gradients do not exist for variables")

    def on_ship(self, key, skeleton, specs, others, has_user_layers):
        """Take a model over, with its weights and its optimizer's state."""
        self.models.pop(key, None)  # not two copies at once
        tensors = shipping.empty(specs, self.context.device)
        for tensor in tensors:
            shipping.broadcast(tensor, self.context.group)
        model = shipping.join(skeleton, tensors)
        held = [shipping.Other(tensors[number]) for number in others]
        self.models[key] = _Served(model, self.context, has_user_layers, held)

    def on_drop(self, key):
        """Forget a model."""
        self.models.pop(key, None)

    def on_ship_stage(self, key, skeleton, specs, present, others, cuts):
        """Take over a model of which this rank computes one stage."""
        self.models.pop(key, None)
        tensors = shipping.empty(specs, self.context.device)
        shipping.receive([tensors[number] for number in present], 0, self.context.group)
        model = shipping.join(skeleton, tensors)
        held = [shipping.Other(tensors[number]) for number in others]
        self.models[key] = ServedStage(model, self.context, cuts, held)

    def on_cut(self, key, attributes, *cut):
        """Get to know how a model is cut for inputs of another kind, or as it is now."""
        self.models[key].cut_anew(attributes, *cut)

    def on_step(self, key, number, kind, work, changes):
        """One train, test or predict step."""
        self.models[key].step(number, kind, work, changes)

    def on_own_step(self, key, number, kind, work, changes):
        """A train, test or predict step that is the model's own."""
        self.models[key].own_step(number, kind, work, changes)

    def on_collect(self, key, of_inference):
        """Hand the caller the variables that change here."""
        self.models[key].collect(of_inference)

    def on_events(self, key):
        """Tell when the last training step's pieces of work began and ended."""
        self.context.send(("events", self.models[key].events()))

    def on_fold(self, key):
        """Hand what has been accumulated since the last update to the caller."""
        model = self.models[key].model
        fold_accumulators(
            keras_internals.compiled_optimizer(model), self.context.rank, self.context.group
        )


class _Served:
    """A model in a worker."""

    def __init__(self, model, context, has_user_layers, others):
        self.model = model
        self.context = context
        self.variables = [*shipping.variables_of(model), *others]
        forwarding.offset_seeds(model, range(len(self.variables)), self.variables, context.rank)
        self.accumulates = not trains_by_itself(model)
        self._forget_accumulated()
        self.metrics = WorkerMetrics(model)
        self.averaged = ()
        self.of_own_steps = {}
        self.replica = Replica(
            *(model, context.rank, context.world_size, context.group),
            *(context.device, has_user_layers),
        )
        ranks = context.world_size, context.group, context.device
        self.own = OwnStep(model, *ranks, self.replica.laps)

    def step(self, number, kind, work, changes):
        """One step on this rank's rows; see `data.py` for the arguments."""
        self.take_over(changes)
        context = self.context
        structure, layout, rows, total, all_have_rows = work
        data = read_batch(context, structure, layout)
        share = rows / total

        def publish():
            if not rows:
                self.metrics.reset()  # computed on a row of another
            context.board.publish(number, self.metrics.change(self.averaged, share))

        self.metrics.reset()
        if kind == "train":
            self.model.train()
            self.replica.train(data, rows, total, all_have_rows, publish)
            keras_internals.clear_losses(self.model)
            return
        self.replica.laps.interrupt()
        self.model.eval()
        with torch.no_grad():
            if kind == "test":
                self.replica.test(data, rows, total)
                publish()
            else:
                outputs = leaves(self.replica.predict(data[0], rows, total))
                if rows:
                    layout = context.outbound.write(0, [output.cpu() for output in outputs])
                    context.send(("result", number, layout))

    def own_step(self, number, kind, work, changes):
        """The model's own step on this rank's rows; see `own_caller.py`."""
        self.take_over(changes)
        context = self.context
        structure, layout, rows, total, _ = work
        data, share = read_batch(context, structure, layout), rows / total
        averaged, steady = self.of_own_steps.get(kind, ((), frozenset()))
        self.metrics.reset()
        self.model.train(kind == "train")
        result = self.own.run(kind, data, share, steady)
        keras_internals.clear_losses(self.model)
        if kind != "predict":
            publish(context.board, number, self.metrics.change(averaged, share), result)
        elif rows:
            layout = context.outbound.write(0, [output.detach().cpu() for output in leaves(result)])
            context.send(("result", number, layout))

    def events(self):
        return self.replica.laps.read()

    def _forget_accumulated(self):
        if self.accumulates:
            forget_accumulated(keras_internals.compiled_optimizer(self.model))

    def take_over(self, changes):
        """Make the caller's changes since the last step."""
        numbers, attributes, flags, news, seed = changes
        if seed is not None:  # a call of fit or the like begins
            self.replica.laps.interrupt()
            configuration.seed_everything(seed + self.context.rank)
        if forwarding.apply(self.model, self.variables, attributes, flags):
            self.replica.refresh()
        if news is not None:
            self.averaged, self.replica.summed, self.replica.of_the_batch, self.of_own_steps = news
        if numbers:
            rank = self.context.rank
            forwarding.send_values(self.variables, numbers, self.context.group)
            forwarding.offset_seeds(self.model, numbers, self.variables, rank)
            written = {id(self.variables[number]) for number in numbers}
            optimizer = keras_internals.compiled_optimizer(self.model)
            if any(id(v) in written for v in keras_internals.accumulators(optimizer)):
                self._forget_accumulated()
