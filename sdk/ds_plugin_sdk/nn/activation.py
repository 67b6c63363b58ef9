"""Activations of transformers' feed-forward layers, in one pass forward and one backward."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk.nn._fused import Fused
from ds_plugin_sdk.nn.linear import is_autocast
from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._activations import Activation, activate, number_of


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """`torch.nn.functional.gelu`.

    One op computes it, and one its gradient, where the device has a kernel; the input is kept for the backward pass.
    All other calls are torch's, as in `ds_plugin_sdk.nn.rms_norm`.

    Args:
        input: any shape.
        approximate: ``none``, by the error function, or ``tanh``.

    Returns:
        Input's shape and dtype.

    Raises:
        RuntimeError: `approximate` is something else, or the dtype is not a floating-point one (torch's errors).
    """
    traced = not isinstance(input, Tensor)  # by torch.fx: it has no device to ask
    if approximate in ("none", "tanh") and not traced and not is_autocast(input.device.type):
        return GELU(input, approximate=approximate)
    return functional.gelu(input, approximate=approximate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` (Shazeer 2020), as LLaMA's feed-forward layers have it.

    One op computes it, and one its gradients, where the device has a kernel; gate and up are kept for the backward
    pass, and nothing else. All other calls are torch's ``silu`` and product, as in `ds_plugin_sdk.nn.rms_norm`; so is
    one whose up wants a gradient and whose gate does not.

    Args:
        gate: ``[..., columns]``, a floating-point dtype.
        up: the shape and dtype of gate; what broadcasts with it is torch's product.

    Returns:
        The shape and dtype of gate.

    Raises:
        RuntimeError: the shapes do not broadcast (torch's error).
    """
    return GATE(gate, up, activation="silu")


def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """``gelu(gate) * up`` (Shazeer 2020), as Gemma's feed-forward layers have it; arguments as in `swiglu`, `gelu`.

    Returns:
        The shape and dtype of gate.

    Raises:
        ValueError: `approximate` is neither ``none`` nor ``tanh``.
        RuntimeError: the shapes do not broadcast (torch's error).
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"geglu: approximate={approximate!r}; expected 'none' or 'tanh'")
    return GATE(gate, up, activation="gelu" if approximate == "none" else "gelu_tanh")


def _gelu_forward(input: Tensor, approximate: str) -> tuple[Tensor, tuple[Tensor]]:
    return _library.call("fused_bias_gelu", input, None, approximate == "tanh"), (input,)


def _gelu_backward(grad: Tensor, input: Tensor, approximate: str) -> tuple[Tensor]:
    return (_library.call("fused_bias_gelu_backward", grad, input, None, approximate == "tanh")[0],)


def _gate_forward(gate: Tensor, up: Tensor, activation: Activation) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    number = number_of("activation_and_mul", activation)
    return _library.call("activation_and_mul", gate, up, number), (gate, up)


def _gate_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    number = number_of("activation_and_mul", activation)
    found: tuple[Tensor, Tensor] = _library.call("activation_and_mul_backward", grad, gate, up, number)
    return found


def _are_alike(gate: Tensor, up: Tensor) -> bool:
    return gate.shape == up.shape and gate.dtype == up.dtype


def _keeps_what_torch_keeps(gate: Tensor, up: Tensor) -> bool:
    """Whether checkpointing would notice that one of its two passes was torch's, because of a mode. Of a gate without
    a gradient it would not: torch keeps the activation where the op keeps the gate.
    """
    return gate.requires_grad or not up.requires_grad


# Others keep their layout by torch's functions.
GELU = Fused(
    "fused_bias_gelu",
    "transformer",
    lambda input: input.dim() > 0 and input.is_contiguous(),
    _gelu_forward,
    _gelu_backward,
    lambda input, approximate: functional.gelu(input, approximate=approximate),
)
GATE = Fused(
    "activation_and_mul",
    "transformer",
    lambda gate, up: (
        gate.dim() > 0
        and _are_alike(gate, up)
        and gate.is_contiguous()
        and up.is_contiguous()
        and _keeps_what_torch_keeps(gate, up)
    ),
    _gate_forward,
    _gate_backward,
    lambda gate, up, activation: activate(gate, activation) * up,
)

__all__ = ["GATE", "GELU", "geglu", "gelu", "swiglu"]
