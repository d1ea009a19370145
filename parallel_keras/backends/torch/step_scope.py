"""What torch adds to the run of a model's own step: its optimizers, its random draws."""

import contextlib
import copy

import torch
from torch.overrides import TorchFunctionMode

from parallel_keras import keras_internals
from parallel_keras.backends.torch import buffers, raw_optimizers


@contextlib.contextmanager
def synchronizing(hook):
    """Have a function see each update of the weights, by optimizers of Keras and of torch.

    Args:
        hook: As in `keras_internals.synchronizing`.
    """
    with keras_internals.synchronizing(hook), raw_optimizers.synchronizing(hook):
        yield


@contextlib.contextmanager
def running(kind):
    """Surrounds a step as Keras's own function of that kind does."""
    with torch.set_grad_enabled(kind == "train"):
        yield


@contextlib.contextmanager
def gradients_scaled(model, factor):
    """Have autograd give the gradients of a model's weights times a factor."""
    hooks = []
    if factor != 1:
        parameters = [parameter for parameter in _parameters(model) if parameter.requires_grad]
        hooks = [parameter.register_hook(lambda g: g * factor) for parameter in parameters]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def kept_gradient(gradient):
    """A gradient that stays what it is when the step goes on."""
    return gradient.detach().clone()


def leave_gradients(model, gradients):
    """Have these gradients left from a step before, or none."""
    parameters = _parameters(model)
    gradients = gradients or [None] * len(parameters)
    for parameter, gradient in zip(parameters, gradients, strict=False):
        parameter.grad = None if gradient is None else gradient.clone()


def gradients_left(model):
    """What a step has left in the `.grad` of the weights, one entry for each; `[]` without."""
    return [
        None if parameter.grad is None else kept_gradient(parameter.grad)
        for parameter in _parameters(model)
    ]


def other_state(model):
    """State that is in no Keras variable, as objects with `path`, `dtype` and `assign`."""
    return buffers.buffers_of(model)


def is_variable(leaf):
    """Whether a tensor is what a Keras variable holds, and no copy: all of them are parameters."""
    return isinstance(leaf, torch.nn.Parameter)


def _parameters(model):
    return [v._value for v in model.variables if v._value is not None]


class Kept:
    """What torch holds of a model beside its variables, to be put back.

    Args:
        model: A Keras model.
    """

    def __init__(self, model):
        self._gradients = [(parameter, parameter.grad) for parameter in _parameters(model)]
        self._random = torch.get_rng_state()
        self._of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._states, self._tensors = [], []
        self._buffers = buffers.Held(model)
        for layer in keras_internals.flatten_layers(model):
            for value in vars(layer).values():
                if isinstance(value, torch.Tensor):
                    self._tensors.append((value, value.detach().clone()))
                # Optimizers, schedules of learning rates, a GradScaler.
                elif hasattr(value, "load_state_dict") and not isinstance(value, torch.nn.Module):
                    self._states.append((value, copy.deepcopy(value.state_dict())))

    def has_drawn(self):
        """Whether torch has drawn random numbers since."""
        return not torch.equal(torch.get_rng_state(), self._random) or any(
            not torch.equal(now, then)
            for now, then in zip(
                torch.cuda.get_rng_state_all() if self._of_gpus else [], self._of_gpus, strict=True
            )
        )

    def restore(self):
        """Put it back."""
        torch.set_rng_state(self._random)
        if self._of_gpus:
            torch.cuda.set_rng_state_all(self._of_gpus)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._buffers.restore()
        with torch.no_grad():
            for tensor, value in self._tensors:
                tensor.copy_(value)
        for holder, state in self._states:
            holder.load_state_dict(copy.deepcopy(state))


@contextlib.contextmanager
def traced(model):
    """Surrounds a call for shapes only, in which a module computes with its buffers all the same.

    Args:
        model: A Keras model.
    """
    held = buffers.Held(model)
    try:
        yield
    finally:
        held.restore()


@contextlib.contextmanager
def draws_at_rest(rest):
    """Have torch's own draws be the same for each row, and its statistics not be taken.

    Args:
        rest: A `resting.Rest`.
    """
    with _Draws(rest):
        yield


layers_at_rest = draws_at_rest


class _Draws(TorchFunctionMode):
    def __init__(self, rest):
        super().__init__()
        self.rest = rest

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if self.rest.is_awake:
            return function(*args, **kwargs)
        if function in (torch.rand, torch.randn):
            shape = kwargs.pop("size", None) or args
            shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
            return self._one_row(function, (), shape, kwargs)
        if function is torch.randint:
            *bounds, shape = args if "size" not in kwargs else (*args, kwargs.pop("size"))
            return self._one_row(function, bounds, shape, kwargs)
        if function in (torch.rand_like, torch.randn_like):
            with self.rest.awake():
                return self._one_row_like(function, *args, **kwargs)
        if function is torch.nn.functional.batch_norm:
            return _normalized(*args, **kwargs)
        if function is torch.nn.functional.dropout:
            return args[0] if args else kwargs["input"]
        if function is torch.bernoulli:
            return torch.round(args[0])
        if function is torch.randperm:
            return torch.arange(args[0] - 1, -1, -1, **_without_generator(kwargs))
        return function(*args, **kwargs)

    def _one_row(self, function, bounds, shape, kwargs):
        shape = tuple(shape)
        one = (1, *shape[1:]) if shape else ()
        kwargs = _without_generator(kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        generator = torch.Generator(device=kwargs.get("device") or torch.get_default_device())
        generator.manual_seed(self.rest.next_seed())
        drawn = function(*bounds, one, generator=generator, **kwargs)
        return drawn.expand(shape).clone().requires_grad_(requires_grad)

    def _one_row_like(self, function, tensor, **kwargs):
        stock = {torch.rand_like: torch.rand, torch.randn_like: torch.randn}[function]
        kwargs = {"dtype": tensor.dtype, "device": tensor.device, **kwargs}
        kwargs.pop("memory_format", None)
        return self._one_row(stock, (), tensor.shape, kwargs)


def _normalized(x, running_mean, running_var, weight=None, bias=None, training=False, *args, **kw):
    """As `torch.nn.functional.batch_norm` does in inference."""
    mean = x.new_zeros(x.shape[1]) if running_mean is None else running_mean
    variance = x.new_ones(x.shape[1]) if running_var is None else running_var
    return torch.nn.functional.batch_norm(x, mean, variance, weight, bias, False, *args, **kw)


def _without_generator(kwargs):
    return {key: value for key, value in kwargs.items() if key != "generator"}
