"""What the optimizers share: states, one op call for all parameters of a dtype, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.registry import load_kernels

Group = dict[str, Any]
State = dict[str, Any]


class FusedOptimizer(Optimizer):
    """An optimizer whose step is one op call for each group and dtype.

    Attributes:
        FAMILY: module of `ds_plugin_sdk.ops` with the op.
        STATES: names of the state tensors, in the op's order. Beside them each parameter has ``step``, an int.
    """

    FAMILY: ClassVar[str]
    STATES: ClassVar[tuple[str, ...]]

    def __init__(self, params: ParamsT, defaults: Group) -> None:
        super().__init__(params, defaults)
        self._forget()

    def _forget(self) -> None:
        self._kernels_for: set[str] = set()  # device types
        self._mixed: set[int] = set()  # ids of groups whose parameters are of several dtypes

    def _update(
        self,
        group: Group,
        params: list[Tensor],
        grads: list[Tensor],
        states: list[list[Tensor]],
        steps: list[int],
    ) -> None:
        """Call the op on tensors of one device, one dtype a list; one step number for all, or one each."""
        raise NotImplementedError(f"{type(self).__name__}._update() must call the op")

    def _new_state(self, param: Tensor, group: Group) -> State:
        """The state of a parameter before its first step: zeros."""
        dtype = group["state_dtype"] or param.dtype
        zeros = {
            name: torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format) for name in self.STATES
        }
        return {"step": 0, **zeros}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss again and returns it.

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
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._step_group(group, params)
        return loss

    def _step_group(self, group: Group, params: list[Tensor]) -> None:
        """Step on `params`, in one call if they are of one dtype and device.

        Sorting thousands of parameters by dtype takes as long as the update of small ones, so that is left until an op
        has rejected a mixture, as ops do before they modify anything.
        """
        states = [self.state[param] for param in params]
        for param, state in zip(params, states, strict=True):
            if "step" not in state:
                state.update(self._new_state(param, group))
        if id(group) not in self._mixed:
            try:
                return self._step_bucket(group, params, states)
            except InvalidTensorError:
                if len(self._buckets(params, states)) == 1:
                    raise
                self._mixed.add(id(group))
        for bucket in self._buckets(params, states):
            self._step_bucket(group, *bucket)
        return None

    def _buckets(self, params: list[Tensor], states: list[State]) -> list[tuple[list[Tensor], list[State]]]:
        """Parameters and their states, divided by device and by the dtypes of parameter, gradient and state."""
        buckets: dict[tuple[Any, ...], tuple[list[Tensor], list[State]]] = {}
        for param, state in zip(params, states, strict=True):
            grad, first = param.grad, state[self.STATES[0]]
            assert grad is not None
            key = (param.device, param.dtype, grad.dtype, first.dtype)
            bucket = buckets.setdefault(key, ([], []))
            bucket[0].append(param)
            bucket[1].append(state)
        return list(buckets.values())

    def _step_bucket(self, group: Group, params: list[Tensor], states: list[State]) -> None:
        device_type = params[0].device.type
        if device_type not in self._kernels_for:
            load_kernels(self.FAMILY, device_type)
            self._kernels_for.add(device_type)
        steps = [state["step"] + 1 for state in states]
        grads: list[Any] = [param.grad for param in params]
        tensors = [[state[name] for state in states] for name in self.STATES]
        self._update(group, params, grads, tensors, steps[:1] if len(set(steps)) == 1 else steps)
        for state, step in zip(states, steps, strict=True):
            state["step"] = step

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, here or in the optimizer's namesake in `torch.optim`.

        States keep the dtype they were saved in; torch's own way would round float32 states to the parameters' dtype.
        """
        super().load_state_dict(state_dict)
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for saved_id, param in zip(saved_ids, params, strict=True):
            saved = state_dict["state"].get(saved_id, {})
            for name in self.STATES:
                if name in saved:
                    self.state[param][name] = saved[name].to(param.device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        for values in self.state.values():
            if "step" in values:
                values["step"] = int(values["step"])  # torch.optim keeps a tensor


def check_options(name: str, *, betas: Sequence[float] = (), **numbers: float) -> None:
    """Check the options of an optimizer.

    Raises:
        ValueError: a number is negative, or a beta is not in [0, 1).
    """
    for option, number in numbers.items():
        if not number >= 0:
            raise ValueError(f"{name}: {option}={number}; expected at least 0")
    for i, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"{name}: betas[{i}]={beta}; expected at least 0 and less than 1")
