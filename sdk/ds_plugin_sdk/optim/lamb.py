"""LAMB."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ds_plugin_sdk.ops._checks import is_dtensor
from ds_plugin_sdk.ops.lamb import lamb_
from ds_plugin_sdk.optim._dtensor import whole
from ds_plugin_sdk.optim._fused import FusedOptimizer, betas_of, check_options, outside_graphs


class FusedLamb(FusedOptimizer):
    """LAMB, DeepSpeed's or the paper's; the formula is that of `ds_plugin_sdk.ops.lamb.lamb_`.

    Args:
        params: parameters or parameter groups, float32, bfloat16 or float16 (float64: reference only).
        lr: learning rate, a number or a tensor of one element.
        betas: decay of the moments.
        eps: added to the denominator.
        weight_decay: decay of the parameters.
        max_grad_norm: if not 0, gradients are scaled down so that the norm of all of them together is no larger. Where
            each rank's optimizer has some of the parameters (torch's ZeroRedundancyOptimizer, ZeRO), that is the norm
            of these alone: give `step` the norm of all, or clip before. Unless `step` is given the norm as a number,
            devices other than CPUs need room for a float32 copy of the gradients of a group: the step does not wait
            for the device to say the norm.
        max_coeff: upper limit of the trust ratio; None is 10, and infinity for the paper's form.
        min_coeff: lower limit of the trust ratio; None is 0.01, and 0 for the paper's form.
        paper: algorithm 2 of You et al. 2020 rather than DeepSpeed's form: moments are corrected before they are
            divided, and the trust ratio has no limits.
        eps_inside_sqrt: add eps to the second moment rather than to its square root.
        bias_correction: correct for the moments' start at zero.
        state_dtype: dtype of the moments: `torch.float32`, or None for that of each parameter.
        options: torch's other options, accepted where they change no result, as ``foreach`` and ``amsgrad=False`` do.

    Raises:
        TypeError: torch's optimizers have no such option either.
        ValueError: an option is out of range.
        UnsupportedOptionError: an option of torch's, here or in a group, would change the result.
    """

    FAMILY: ClassVar[str] = "lamb"
    STATES: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    ELEMENTWISE: ClassVar[bool] = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_grad_norm: float = 0.0,
        max_coeff: float | None = None,
        min_coeff: float | None = None,
        paper: bool = False,
        eps_inside_sqrt: bool = False,
        bias_correction: bool = True,
        state_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        max_coeff = max_coeff if max_coeff is not None else math.inf if paper else 10.0
        min_coeff = min_coeff if min_coeff is not None else 0.0 if paper else 0.01
        check_options("FusedLamb", lr=lr, eps=eps, weight_decay=weight_decay, betas=betas, min_coeff=min_coeff)
        check_options("FusedLamb", max_grad_norm=max_grad_norm)
        if not max_coeff >= min_coeff:
            raise ValueError(f"FusedLamb: max_coeff={max_coeff}; expected at least min_coeff={min_coeff}")
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
            "paper": paper,
            "eps_inside_sqrt": eps_inside_sqrt,
            "bias_correction": bias_correction,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if any(map(_is_flattened, self.param_groups[-1]["params"])):
            warnings.warn(
                "FusedLamb of parameters of FullyShardedDataParallel: each has a trust ratio for a part of it, or for "
                "all that is in one flat tensor; FSDP2's fully_shard() says so by an error, FusedAdam needs no ratio",
                stacklevel=3,
            )

    def _forget(self) -> None:
        super()._forget()
        self._scale = 1.0
        self._grad_norm: float | Tensor | None = None
        self._ratios: dict[Tensor, Tensor] = {}

    @outside_graphs
    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, *, scale: float = 1.0, grad_norm: float | Tensor | None = None
    ) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss again and returns it.
            scale: the loss scale that gradients are divided by.
            grad_norm: L2 norm of all gradients together as they are, loss scale included, if it is known; where a group
                clips and it is not, it is computed in float32 at least, which reads every gradient once more.

        Returns:
            What the closure returned, or None.

        Raises:
            InvalidTensorError: a gradient or state does not fit its parameter; the group's tensors of that dtype were
                not modified.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._ratios.clear()
        # torch.nn.utils.clip_grad_norm_ gives a DTensor, if gradients are DTensors.
        self._scale, self._grad_norm = scale, whole(grad_norm) if isinstance(grad_norm, Tensor) else grad_norm
        super().step()
        return loss

    def get_lamb_coeffs(self) -> list[float]:
        """The trust ratios of the last step, one for each parameter that had a gradient, in the groups' order."""
        params = [param for group in self.param_groups for param in group["params"] if param in self._ratios]
        return [self._ratios[param].item() for param in params]

    def _step_bucket(self, group: dict[str, Any], params: list[Tensor], states: list[dict[str, Any]]) -> Tensor:
        ratios: Tensor = super()._step_bucket(group, params, states)
        self._ratios.update(zip(params, ratios.unbind(), strict=True))
        return ratios

    def _update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        states: list[list[Tensor]],
        steps: list[int],
    ) -> Tensor:
        exp_avgs, exp_avg_sqs = states
        grads, grad_scale = self._clipped(group["max_grad_norm"], grads)
        return lamb_(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            steps,
            lr=float(group["lr"]),
            betas=betas_of(group),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            min_coeff=group["min_coeff"],
            max_coeff=group["max_coeff"],
            grad_scale=grad_scale,
            eps_inside_sqrt=group["eps_inside_sqrt"],
            bias_correction=group["bias_correction"],
            correct_inside=group["paper"],
        )

    def _clipped(self, max_grad_norm: float, grads: list[Tensor]) -> tuple[list[Tensor], float]:
        """Gradients, and what they are to be divided by so that the norm of all does not exceed the largest."""
        if max_grad_norm == 0:
            return grads, self._scale
        norm = self._grad_norm
        if norm is None:
            params = [param for group in self.param_groups for param in group["params"]]
            norm = _total_norm([param.grad for param in params if param.grad is not None])
        if isinstance(norm, Tensor) and _is_read_at_once(norm):
            norm = float(norm)
        self._grad_norm = norm
        # The 1e-6 is that of DeepSpeed's front end.
        clip = (norm / self._scale + 1e-6) / max_grad_norm
        if isinstance(clip, Tensor):
            return _divided(grads, self._scale * torch.where(clip > 1, clip, torch.ones_like(clip))), 1.0
        return grads, self._scale * max(1.0, clip)


def _is_flattened(param: Tensor) -> bool:
    """Whether it is FSDP1's: a flat tensor of several, or one that lies in such a tensor, by torch's own marks."""
    return bool(getattr(param, "_is_flat_param", False) or getattr(param, "_fsdp_flattened", False))


def _is_read_at_once(x: Tensor) -> bool:
    """Whether the value is there without waiting for a device."""
    return x.device.type == "cpu"


def _divided(grads: list[Tensor], divisor: Tensor) -> list[Tensor]:
    """Gradients divided by a number that only the device knows, in float32 at least."""
    if not all(_is_real(grad) for grad in grads):
        return grads
    wide = [grad if grad.dtype == torch.float64 else grad.float() for grad in grads]
    return list(torch._foreach_div(wide, divisor.to(wide[0].device)))


def _is_real(grad: Tensor) -> bool:
    """Whether the op takes such a gradient. It rejects others with an error."""
    return grad.layout == torch.strided and grad.is_floating_point()


def _total_norm(grads: list[Tensor]) -> Tensor:
    """The L2 norm of all gradients together, in float32 at least: that of float16 gradients is often beyond float16."""
    real = [grad for grad in grads if _is_real(grad)]
    if not real:
        return torch.zeros(())
    dtype = torch.float64 if any(grad.dtype == torch.float64 for grad in real) else torch.float32
    divided = [grad for grad in real if is_dtensor(grad)]
    norms = [whole(torch.linalg.vector_norm(grad, dtype=dtype)) for grad in divided]
    if len(real) > len(divided):
        norms += torch._foreach_norm([grad for grad in real if not is_dtensor(grad)], 2, dtype=dtype)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total
