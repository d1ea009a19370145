"""The workers' copies of one model, and whether they are up to date."""

import contextlib
import weakref
from typing import Any

from parallel_keras import features
from parallel_keras.backends.torch import (
    buffers,
    configuration,
    forwarding,
    left_over,
    remote,
    shipping,
)
from parallel_keras.errors import WorkerError


class Shipment:
    """The workers' copies of one model. What they do with it, a strategy adds.

    Args:
        lowering: The model's lowering, which owns this object.
    """

    def __init__(self, lowering):
        self.lowering = weakref.proxy(lowering)
        self.stale = True  # the whole model has to be compared
        self.reseed = True
        self._has_woken = False
        self.events: list = []  # of the last training step, where who took them down is gone
        self.lost()

    # ---- what a strategy adds ----

    def deliver(self, skeleton, tensors, others):
        """Send a model's bytes and numbers to the workers.

        Args:
            skeleton: Bytes.
            tensors: List of tensors.
            others: List of ints, the places in it of those that are of no variable.
        """
        raise NotImplementedError

    def delivered(self):
        """The workers hold the model: make what the caller needs as rank 0."""
        raise NotImplementedError

    @property
    def model(self):
        """The Keras model that is sent."""
        return self.lowering.model

    def collect(self):
        """Bring what only the workers hold to the caller."""

    def refresh(self):
        """A `trainable` flag has changed."""
        raise NotImplementedError

    # ---- life ----

    @contextlib.contextmanager
    def whole_or_ended(self):
        """Whatever ends early what is done here with the workers ends them too.

        Raises:
            WorkerError: In place of an error for which a rank is at fault.
            UnsupportedError: If that rank has refused something.
        """
        try:
            yield
        except BaseException as error:
            pool = self.lowering.pool
            explained = pool.explain(error) if isinstance(error, Exception) else None
            pool.abort()
            note = self.restore()
            if explained is None:
                raise
            raised = explained.for_the_caller(note)
            if raised is error:
                raise
            raise raised from (error if isinstance(raised, WorkerError) else explained)

    def restore(self):
        """The workers have gone: bring the model back to the last numbers that are whole.

        Returns:
            A sentence about it, or `""` where nothing is lost.
        """
        self.lost()
        return ""

    def lost(self):
        """The workers have gone."""
        self.generation: int | None = None
        self.skeleton: bytes = b""
        self.forwarder: Any = None

    def is_current(self):
        """Whether the workers hold some version of the model."""
        pool = self.lowering.pool
        return self.generation is not None and pool.generation == self.generation

    def drop(self):
        """Let the workers forget the model."""
        if self.is_current():
            # One that has died meanwhile has forgotten it too.
            with contextlib.suppress(WorkerError):
                self.lowering.pool.broadcast_message(("drop", self.lowering.key))
        self.lost()

    def ensure(self):
        """Have the workers hold the caller's model, shipping it where it differs."""
        lowering = self.lowering
        # A callback may have run another model with another world meanwhile.
        lowering.pool.want(lowering.world_size, lowering.devices, lowering.strategy.timeout)
        generation = lowering.pool.ready()
        self._bring_home()
        if generation == self.generation:
            self._attributes = self.forwarder.changed_attributes()
            self._has_woken |= self.forwarder.has_woken
            self.forwarder.has_woken = False
            if not self.stale and self._attributes is not None:
                return
        self._configure(lowering.pool, generation)
        if generation == self.generation:
            variables = shipping.variables_of(lowering.model)
            same = self.forwarder.is_same(lowering.model, variables)
            if same and self._attributes is not None and not features.has_user_code(lowering.model):
                self.stale = False
                return
        self.stale = False
        if generation == self.generation:
            self.collect()  # what the workers hold alone would be lost
        with buffers.as_in_training(lowering.model), left_over.taken_away(self._left()):
            skeleton, tensors = shipping.split(lowering.model)
        if generation == self.generation and same and skeleton == self.skeleton:
            return
        if generation == self.generation:
            self.events = lowering.events()
        others = shipping.others(lowering.model, tensors)
        self.deliver(skeleton, tensors, others)
        self.generation, self.skeleton = generation, skeleton
        self.forwarder = forwarding.Forwarder(
            lowering.model,
            shipping.variables_of(lowering.model),
            [shipping.Other(tensors[number]) for number in others],
        )
        self.delivered()
        self._sent_news: object = None
        self._attributes = ()

    def _left(self):
        """What steps and calls for shapes have left in attributes, and cannot be sent."""
        owners = forwarding.that_write_their_own(self.lowering.model)
        left = left_over.of_tracing([vars(owner) for owner in owners])
        if self.forwarder is not None:
            left += left_over.of_steps(self.forwarder.that_write_their_own)
        return left

    def _bring_home(self):
        """Fetch what another model that shares layers has left with the workers.

        In a step they would not answer.
        """
        known = self.forwarder is not None and not self.stale
        variables = (
            self.forwarder.variables if known else shipping.variables_of(self.lowering.model)
        )
        remote.bring_home([v._value for v in variables], self.lowering.model)

    def has_woken(self):
        """Whether what was false when the model was probed is so no more; said once."""
        found, self._has_woken = self._has_woken, False
        return found

    @staticmethod
    def _configure(pool, generation):
        """Let the workers see the caller's settings, as they are now."""
        wanted = generation, configuration.read()
        if pool.configured != wanted:
            pool.broadcast_message(("configure", wanted[1]))
            pool.configured = wanted

    def changes(self, news=None):
        """What the program has changed since the last step.

        Args:
            news: Something more that the workers have to know, sent where it differs
                from the last.

        Returns:
            Numbers of variables, attributes, `trainable` flags, news and a seed.
        """
        attributes, self._attributes = self._attributes, ()
        flags = self.forwarder.changed_flags()
        if flags or any(key == "_trainable" for _, key, _ in attributes):
            self.refresh()
        numbers = self.forwarder.changed_variables()
        changed = news if news != self._sent_news else None
        self._sent_news = news
        # Once per call of fit and the like, in whose course the workers draw on.
        seed, self.reseed = configuration.seed_for_workers() if self.reseed else None, False
        return numbers, attributes, flags, changed, seed
