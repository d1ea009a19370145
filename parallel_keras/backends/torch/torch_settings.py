"""torch's global settings, read in the caller and made the same in a worker.

torch has two ways to name the precision of float32 products, and refuses to answer
in the older one where the newer was used. So each setting is asked by itself, what
has no answer is left out, and only what differs is written: first the older names,
in the order in which they set one another, then the newer ones.
"""

import torch


def read():
    """The settings of this process, as a dict of plain values."""
    values = {}
    for name, (get, _) in _SETTINGS.items():
        try:
            values[name] = get()
        except RuntimeError:  # see above
            continue
    return values


def apply(values):
    """Make this process's settings those that `read` gave elsewhere."""
    for name, value in values.items():
        get, write = _SETTINGS[name]
        try:
            same = get() == value
        except RuntimeError:
            same = False
        if not same:
            write(value)


def _attribute(holder, name):
    return lambda: getattr(holder, name), lambda value: setattr(holder, name, value)


def _default_device():
    # By its kind: each rank has its own device of it.
    return torch.get_default_device().type


def _deterministic():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


_cuda, _cudnn, _mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
_matmul = _cuda.matmul

_SETTINGS = {
    "dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "device": (_default_device, torch.set_default_device),
    "deterministic": (
        _deterministic,
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "fill uninitialized": _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
    "anomaly": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "flash attention": (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    "lean attention": (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    "plain attention": (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    "cudnn attention": (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    "cudnn": _attribute(_cudnn, "enabled"),
    "cudnn benchmark": _attribute(_cudnn, "benchmark"),
    "cudnn deterministic": _attribute(_cudnn, "deterministic"),
    "fp16 sums": _attribute(_matmul, "allow_fp16_reduced_precision_reduction"),
    "bf16 sums": _attribute(_matmul, "allow_bf16_reduced_precision_reduction"),
    # The older names.
    "products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "tf32 products": _attribute(_matmul, "allow_tf32"),
    "tf32 cudnn": _attribute(_cudnn, "allow_tf32"),
    # The newer ones, from the general to the special.
    "precision": _attribute(torch.backends, "fp32_precision"),
    "cuda products": _attribute(_matmul, "fp32_precision"),
    "cudnn precision": _attribute(_cudnn, "fp32_precision"),
    "cudnn convolutions": _attribute(_cudnn.conv, "fp32_precision"),
    "cudnn recurrences": _attribute(_cudnn.rnn, "fp32_precision"),
    "cpu precision": _attribute(_mkldnn, "fp32_precision"),
    "cpu products": _attribute(_mkldnn.matmul, "fp32_precision"),
    "cpu convolutions": _attribute(_mkldnn.conv, "fp32_precision"),
    "cpu recurrences": _attribute(_mkldnn.rnn, "fp32_precision"),
}
