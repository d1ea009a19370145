"""A model in a worker that computes one of its stages."""

from typing import Any

import numpy as np
import torch

from parallel_keras import keras_internals, schedule
from parallel_keras.backends.staged import Staged, symbol
from parallel_keras.backends.torch import configuration, forwarding, shipping
from parallel_keras.backends.torch.channel import Channel
from parallel_keras.backends.torch.links import LinkedChannel
from parallel_keras.backends.torch.stage import StageRank
from parallel_keras.backends.torch.stage_homes import Homes
from parallel_keras.backends.torch.structures import fill, leaves


class ServedStage:
    """A model of which this worker holds one stage's numbers.

    Args:
        model: The Keras model.
        context: The worker's rank, group, buffers and board.
        cuts: The strategy, the cuts, the first of which is for training, and the paths of
            links.
        others: List of `shipping.Other`.
    """

    def __init__(self, model, context, cuts, others):
        self.model = model
        self.context = context
        self.strategy, described, paths = cuts
        self._first: Any = None
        self._cuts: dict = {}
        if paths:
            # A peer that dies or hangs is noticed by the caller, which then ends this process:
            # it is the first to lose its patience, and knows who is to blame.
            patience = 2 * self.strategy.timeout
            channel: Any = LinkedChannel(context.rank, paths, patience, lambda: None)
        else:
            channel = Channel(context.group, context.device)
        self.rank = StageRank(
            model, context.rank, context.group, context.device, channel, self.strategy
        )
        known = [self.add_cut(*one) for one in described]
        self.homes = Homes(model, known, [*shipping.variables_of(model), *others])

    def add_cut(self, number, structure, specs, training, numbers):
        """Cut the model as the caller does; returns the `Staged`."""
        waiting = iter(specs)
        symbols = [symbol(*next(waiting)) if has else None for has in leaves(structure)]
        symbols = fill(structure, symbols)
        self._cuts[number] = Staged(
            self.model, self.strategy, symbols, training, numbers, self._first
        )
        self._first = self._first or self._cuts[number]
        return self._cuts[number]

    def cut_anew(self, attributes, *cut):
        """Cut a model whose `call` may read attributes that the program has changed."""
        forwarding.apply(self.model, self.homes.variables, attributes, [])
        self.add_cut(*cut)

    def step(self, number, kind, work, changes):
        """One step on the micro-batches of a batch; see `pipeline.py` for the arguments."""
        self.take_over(changes)
        cut, structure, layout, total, microbatches, summed, name, by_parts = work
        staged = self._cuts[cut]
        data = read_batch(self.context, structure, layout)
        data = (*data, None, None)[:3]

        def see(added, outputs):
            if outputs is not None:
                self._send(number, outputs)
            self.context.board.publish(number, np.array([added, self.rank.has_assigned]))

        if kind == "train":
            self.model.train()
            order = schedule.order(name, len(staged.stages), microbatches)[self.rank.rank]
            self.rank.train(staged, data, total, microbatches, summed, order, by_parts, see)
        else:
            self.model.eval()
            see(*self.rank.infer(staged, data, total, microbatches, summed))

    def events(self):
        return self.rank.events

    def _send(self, number, outputs):
        masks = [keras_internals.keras_mask(output) for output in outputs]
        tensors = [t.detach().cpu() for t in (*outputs, *(m for m in masks if m is not None))]
        layout = self.context.outbound.write(0, tensors)
        self.context.send(("result", number, layout, [m is not None for m in masks]))

    def take_over(self, changes):
        """Make the caller's changes since the last step."""
        numbers, attributes, flags, _, seed = changes
        if seed is not None:
            configuration.seed_everything(seed + self.context.rank)
        if forwarding.apply(self.model, self.homes.variables, attributes, flags):
            self.rank.refresh()
        shipping.receive(self.homes.chosen(numbers, self.context.rank), 0, self.context.group)

    def collect(self, of_inference):
        """Hand the caller the variables that change here, or those that do so in inference."""
        rank = self.context.rank
        variables = self.homes.state_of(rank) if of_inference else self.homes.of(rank)
        shipping.send([v._value for v in variables], 0, self.context.group)


def read_batch(context, structure, layout):
    """The arrays of a batch that the caller has written, in their structure."""
    arrays = iter(context.inbound.read(layout))
    data = fill(structure, [next(arrays) if has else None for has in leaves(structure)])
    return shipping.to_device(data, torch.device(context.device))
