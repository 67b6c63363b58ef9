"""Parameters that are DTensors, as FSDP2 and tensor parallelism make them: each rank steps on its part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.ops._checks import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def whole(x: Tensor) -> Tensor:
    """A tensor as it is without a division among ranks."""
    result: Tensor = x.full_tensor() if is_dtensor(x) else x  # type: ignore[attr-defined]  # DTensors have it
    return result


def local_parts(op: str, lists: list[list[DTensor]], *, elementwise: bool) -> list[list[Tensor]]:
    """This rank's parts of parameters, gradients and states.

    A gradient that is divided in another way, or that is yet to be added up, is brought into its parameter's.

    Args:
        op: what errors name.
        lists: parameters, gradients, and a list for each state.
        elementwise: whether parts can be updated each by itself.

    Raises:
        InvalidTensorError: the parts do not fit together, or do not suffice; nothing was modified.
    """
    params, _, *states = lists
    for tensors in zip(*lists, strict=True):
        _check(op, *tensors, elementwise=elementwise)
    grads = [_laid_out_as(param, grad) for param, grad in zip(*lists[:2], strict=True)]
    return [[_local(x) for x in tensors] for tensors in (params, grads, *states)]


def _check(op: str, param: DTensor, grad: DTensor, *states: DTensor, elementwise: bool) -> None:
    if any(placement.is_partial() for placement in param.placements):
        why = f"it is {param.placements}: ranks have summands of it, not its elements"
        raise InvalidTensorError("a parameter cannot be updated", op=op, why=why, hint="redistribute it")
    if not elementwise and _is_divided(param):
        raise InvalidTensorError(
            f"a parameter of shape {list(param.shape)} is divided among ranks",
            op=op,
            why=f"the update needs norms of the whole of it, and it is {param.placements}",
            hint="use an elementwise optimizer such as FusedAdam, or keep the parameters whole, as DDP does",
        )
    if not is_dtensor(grad) or grad.device_mesh != param.device_mesh:
        raise InvalidTensorError(
            "a gradient is not on the mesh of its parameter",
            op=op,
            why=f"the parameter is a DTensor on {param.device_mesh}, and the gradient {_text(grad)}",
            hint="distribute the gradient over the parameter's mesh",
        )
    for state in states:
        if not is_dtensor(state) or (state.device_mesh, state.placements) != (param.device_mesh, param.placements):
            raise InvalidTensorError(
                "a state is not divided as its parameter",
                op=op,
                why=f"the parameter is {_text(param)}, and the state {_text(state)}",
                hint="load states by torch.distributed.checkpoint.state_dict.set_optimizer_state_dict",
            )


def _is_divided(param: DTensor) -> bool:
    """Whether a rank has less than the whole."""
    return any(
        param.device_mesh.size(dim) > 1 and not placement.is_replicate()
        for dim, placement in enumerate(param.placements)
    )


def _laid_out_as(param: DTensor, grad: DTensor) -> DTensor:
    return grad if grad.placements == param.placements else grad.redistribute(placements=param.placements)


def _local(x: DTensor) -> Tensor:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    # to_local() gives another tensor of a parameter, with a version of its own: autograd would not see the step.
    local: Tensor = x._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _text(x: Tensor) -> str:
    return f"{x.placements} on {x.device_mesh}" if is_dtensor(x) else "no DTensor"  # type: ignore[attr-defined]  # a DTensor has them
