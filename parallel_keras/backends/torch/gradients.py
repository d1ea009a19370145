"""Gradients of the global batch from those of the ranks.

`DistributedDataParallel` gathers the gradients in buckets while the backward pass goes on,
and reduces them with NCCL on GPUs; between processes of one machine's CPU they go through
`SharedSums`. Where DDP cannot (the first step, when it is not known yet which weights the
loss reaches; a rank without rows; between the updates of gradient accumulation) they are
reduced in one piece afterwards. Never both.
"""

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from parallel_keras.backends.torch.shared_sums import rounded


class GradientReducer:
    """Forward, backward and all-reduce of a list of parameters.

    Args:
        rank, world_size, group: This rank's place among the ranks.
        dynamic: Bool. Whether the parameters that the loss reaches may differ
            from step to step.
    """

    def __init__(self, rank, world_size, group, dynamic):
        self.rank, self.world_size, self.group = rank, world_size, group
        self.dynamic = dynamic
        self.parameters: list = []
        self.reached: list = []  # empty: not known yet
        self._ddp: Any = None

    def bind(self, parameters, forward):
        """Use these parameters from now on; `forward(*data)` gives loss and outputs."""
        self.parameters = parameters
        self._module = _LossModule(parameters, forward)
        # Of as many buckets as there may be, one for `never_used` among them.
        self._nbytes = rounded(1) + sum(rounded(p.numel() * p.element_size()) for p in parameters)
        self._ddp = None
        self.reached = []

    def forget_gradients(self):
        """Let no parameter have one."""
        for parameter in self.parameters:
            parameter.grad = None

    def forward(self, data, overlapped):
        """Loss and outputs; through DDP where the reduction shall overlap."""
        if overlapped and self.reached and self.parameters:
            if self._ddp is None:
                self._ddp = self._wrap()
            if self.group.sums is not None:
                self.group.sums.begin(self._nbytes)
            return self._ddp(*data)
        return self._module(*data)

    def backward(self, loss, share, overlapped, computed):
        """Leave `share` times the gradient of `loss` in each parameter's `.grad`.

        Args:
            loss: Scalar tensor.
            share: Float.
            overlapped: Bool. Whether the gradients shall be reduced meanwhile.
            computed: Called when this rank's own gradients are there.
        """
        if overlapped and self._ddp is not None and self.reached:
            if self.group.sums is None:
                # DDP divides the sum of the gradients by the number of ranks.
                share *= self.world_size
            loss = loss * share
            # Called in the order in which they were queued: DDP queues its wait for the
            # other ranks later, when the last gradient is there.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            loss.register_hook(lambda _: queue(computed))
            loss.backward()
        else:
            (loss * share).backward()
            computed()

    def gradients(self, reduced, held=None):
        """The gradients of the global batch, `None` where no rank has one.

        Args:
            reduced: Bool. Whether the step asked DDP to reduce them.
            held: List of tensors or `None`: what this rank has accumulated in
                earlier steps and adds now.
        """
        if reduced and self._ddp is not None and self.reached:
            if self.group.sums is not None:
                self.group.sums.finish()
            return [parameter.grad for parameter in self.parameters]
        return self._reduce(held or [None] * len(self.parameters))

    def local_gradients(self):
        """This rank's own part of the gradients; zeros where it had no rows."""
        gradients = [parameter.grad for parameter in self.parameters]
        if all(gradient is None for gradient in gradients):
            return [torch.zeros_like(parameter) for parameter in self.parameters]
        return gradients

    def _reduce(self, held):
        self.reached = self._reached_anywhere()
        result = [None] * len(self.parameters)
        for dtype in dict.fromkeys(parameter.dtype for parameter in self.parameters):
            chosen = [
                index
                for index, parameter in enumerate(self.parameters)
                if parameter.dtype == dtype and self.reached[index]
            ]
            if not chosen:
                continue
            flat = torch.cat([self._local(index, held[index]).reshape(-1) for index in chosen])
            self.group.add_up(flat)
            sizes = [self.parameters[index].numel() for index in chosen]
            for index, part in zip(chosen, flat.split(sizes), strict=True):
                result[index] = part.view_as(self.parameters[index])
        return result

    def _reached_anywhere(self):
        present = torch.tensor(
            [parameter.grad is not None for parameter in self.parameters],
            dtype=torch.float32,
            device=self.parameters[0].device,
        )
        self.group.allreduce([present]).wait()
        return (present > 0).tolist()

    def _local(self, index, held):
        parameter = self.parameters[index]
        if parameter.grad is None:
            return torch.zeros_like(parameter) if held is None else held
        return parameter.grad if held is None else parameter.grad + held

    def _wrap(self):
        looks = self.dynamic or not all(self.reached)
        if looks:
            # torch warns each user of a search for unused parameters that
            # finds none: here is one to find.
            self._module.register_parameter(
                "never_used", torch.nn.Parameter(torch.zeros(1, device=self.parameters[0].device))
            )
        ddp = DistributedDataParallel(
            self._module,
            process_group=self.group.of_torch,
            # The parameters are equal already: the caller's were sent.
            init_sync=False,
            gradient_as_bucket_view=True,
            # Parameters that no rank's loss reaches keep no gradient, as in
            # Keras; telling them apart walks the graph each step.
            find_unused_parameters=looks,
        )
        if self.group.sums is not None:
            ddp.register_comm_hook(self.group.sums, _put)
        return ddp


def _put(sums, bucket):
    """In the place of DDP's all-reduce: a bucket of gradients is complete."""
    gradients = bucket.buffer()
    sums.put(gradients)
    done = torch.futures.Future()
    done.set_result(gradients)  # its own ones, until `finish`
    return done


class _LossModule(torch.nn.Module):
    """What DDP wraps: exactly the trainable parameters, and a forward to the loss.

    The Keras model itself is not a submodule: its parameters appear in it many
    times over, and all its state would be taken for parameters.
    """

    _compute: Any

    def __init__(self, parameters, forward):
        super().__init__()
        self.parameters_in_order = torch.nn.ParameterList()
        for index, parameter in enumerate(parameters):
            # Not through the list's own setter, which would wrap it anew.
            self.parameters_in_order.register_parameter(str(index), parameter)
        object.__setattr__(self, "_compute", forward)

    def forward(self, *data):
        return self._compute(*data)
