"""What the optimizers share: states, one op call for all parameters of a dtype, checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ds_plugin_sdk.errors import CheckpointError, GraphCaptureError, InvalidTensorError, UnsupportedOptionError
from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import is_dtensor
from ds_plugin_sdk.optim._dtensor import local_parts

Group = dict[str, Any]
State = dict[str, Any]

# Options of torch's, DeepSpeed's and apex's optimizers that none here implements, with the value that changes nothing.
_NOT_OFFERED = {
    "amsgrad": False,
    "capturable": False,
    "differentiable": False,
    "grad_averaging": True,
    "lr_decay": 0,
    "maximize": False,
}
_HARMLESS = {"foreach", "fused"}  # how to compute, not what


# Keeps torch.compile out of a step: a graph would hold the step number and the learning rate, and so be compiled again
# at each step, and the op is one call without it. torch.compiler.disable() would import the compiler with this module.
outside_graphs = torch._compile._disable_dynamo


class FusedOptimizer(Optimizer):
    """An optimizer whose step is one op call for each group and dtype.

    Attributes:
        FAMILY: module of `ds_plugin_sdk.ops` with the op.
        STATES: names of the state tensors, in the op's order. Beside them each parameter has ``step``, an int.
        COUNTS_STEPS: whether the result depends on the number of the step.
        ELEMENTWISE: whether an element's update depends on no other element, so that parts of a tensor may step alone.
        RENAMED: state tensors by their names in other optimizers' checkpoints.
    """

    FAMILY: ClassVar[str]
    STATES: ClassVar[tuple[str, ...]]
    COUNTS_STEPS: ClassVar[bool] = True
    ELEMENTWISE: ClassVar[bool] = True
    RENAMED: ClassVar[Mapping[str, str]] = {}

    def __init__(self, params: ParamsT, defaults: Group, options: Mapping[str, Any]) -> None:
        """Make the optimizer.

        Args:
            params: parameters or parameter groups.
            defaults: the groups' options.
            options: options of the namesake in `torch.optim` that change nothing here.

        Raises:
            TypeError: an option that the namesake has not either.
            UnsupportedOptionError: an option that would change the result.
        """
        for name in options:
            if name not in _NOT_OFFERED and name not in _HARMLESS:
                raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument '{name}'")
        self._check_group(options)
        super().__init__(params, defaults)
        self._forget()

    def _forget(self) -> None:
        self._mixed: set[int] = set()  # ids of groups that no one call of the op can step

    def add_param_group(self, param_group: Group) -> None:
        """Add a group of parameters, as in torch.

        Raises:
            UnsupportedOptionError: the group has an option that would change the result.
            ValueError: its states cannot have the dtype that it asks for.
        """
        if isinstance(param_group, dict):
            self._import_group(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        wanted = group.get("state_dtype")
        if any(wanted not in (None, torch.float32, param.dtype) for param in group["params"]):
            self.param_groups.pop()
            raise ValueError(
                f"{type(self).__name__}: state_dtype={wanted!r}; expected torch.float32, or None for the parameters'"
            )

    def _check_group(self, group: Mapping[str, Any]) -> None:
        for name, neutral in _NOT_OFFERED.items():
            if name in group and bool(group[name]) != bool(neutral):
                raise UnsupportedOptionError(
                    f"{type(self).__name__} does not implement {name}",
                    op=self.FAMILY,
                    why=f"{name}={group[name]} would change the result",
                    hint=f"set {name}={neutral}, or use an optimizer of torch.optim",
                )

    def _import_group(self, group: Group) -> None:
        """Check a group that somebody else made, and give its options the names that they have here."""
        self._check_group(group)

    def _export_group(self, group: Group) -> None:
        """Add to a group of a state dict what other optimizers want of it."""

    def _update(
        self,
        group: Group,
        params: list[Tensor],
        grads: list[Tensor],
        states: list[list[Tensor]],
        steps: list[int],
    ) -> Any:
        """Call the op on plain tensors of one device, one dtype a list; one step number for all, or one each.

        Returns:
            What the op returns.
        """
        raise NotImplementedError(f"{type(self).__name__}._update() must call the op")

    def _new_state(self, param: Tensor, group: Group) -> State:
        """The state of a parameter before its first step: zeros."""
        dtype = group["state_dtype"] or param.dtype
        zeros = {
            name: torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format) for name in self.STATES
        }
        return {"step": 0, **zeros}

    def state_dict(self) -> dict[str, Any]:
        """As in torch; a group also has ``step``, where apex looks for it: the largest of its parameters'."""
        # Before the hooks of others, which may return something else.
        ours = self.register_state_dict_post_hook(lambda _, packed: self._export(packed), prepend=True)
        try:
            packed: dict[str, Any] = super().state_dict()
        finally:
            ours.remove()
        return packed

    def _export(self, packed: dict[str, Any]) -> None:
        for group in packed["param_groups"]:
            states = [packed["state"][i] for i in group["params"] if i in packed["state"]]
            if steps := [state["step"] for state in states if "step" in state]:
                group["step"] = max(steps)
            self._export_group(group)

    @outside_graphs
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
            UnsupportedOptionError: a group has been given an option that would change the result; nothing was modified.
            GraphCaptureError: a device graph is being captured.
        """
        for group in self.param_groups:
            self._import_group(group)  # torch's ZeroRedundancyOptimizer puts options into groups by itself
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
        """Step on `params`, in one call if they are plain tensors of one dtype and device.

        Sorting thousands of parameters takes as long as the update of small ones, so that is left until an op has
        rejected a mixture, as ops do before they modify anything. torch's errors for DTensors are RuntimeErrors.
        """
        states = [self.state[param] for param in params]
        for param, state in zip(params, states, strict=True):
            if "step" not in state:
                state.update(self._new_state(param, group))
        if id(group) not in self._mixed:
            try:
                self._step_bucket(group, params, states)
                return
            except RuntimeError as error:
                is_mixture = isinstance(error, InvalidTensorError) and len(self._buckets(params, states)) > 1
                if not is_mixture and not any(map(is_dtensor, params)):
                    raise
                self._mixed.add(id(group))
        for bucket in self._buckets(params, states):
            self._step_bucket(group, *bucket)

    def _buckets(self, params: list[Tensor], states: list[State]) -> list[tuple[list[Tensor], list[State]]]:
        """Parameters and their states, divided by device and by the dtypes of parameter, gradient and state.

        DTensors are in buckets of their own.
        """
        buckets: dict[tuple[Any, ...], tuple[list[Tensor], list[State]]] = {}
        for param, state in zip(params, states, strict=True):
            grad, first = param.grad, state[self.STATES[0]]
            assert grad is not None
            key = (param.device, param.dtype, grad.dtype, first.dtype, is_dtensor(param))
            bucket = buckets.setdefault(key, ([], []))
            bucket[0].append(param)
            bucket[1].append(state)
        return list(buckets.values())

    def _step_bucket(self, group: Group, params: list[Tensor], states: list[State]) -> Any:
        self._reject_capture(params[0].device.type)
        steps = [state["step"] + 1 for state in states]
        lists: list[Any] = [params, [param.grad for param in params]]
        lists += ([state[name] for state in states] for name in self.STATES)
        are_dtensors = id(group) in self._mixed and is_dtensor(params[0])
        parts = local_parts(self.FAMILY, lists, elementwise=self.ELEMENTWISE) if are_dtensors else lists
        try:
            result = self._update(group, parts[0], parts[1], parts[2:], steps[:1] if len(set(steps)) == 1 else steps)
        except InvalidTensorError as error:
            error.hint = error.hint or _way_out(*parts[:2])
            raise
        if are_dtensors:
            _library.mark_modified(params)
        for state, step in zip(states, steps, strict=True):
            state["step"] = step
        return result

    def _reject_capture(self, device_type: str) -> None:
        """A graph would repeat the numbers of the step during which it was captured."""
        is_capturing = getattr(getattr(torch, device_type, None), "is_current_stream_capturing", None)
        if is_capturing is not None and is_capturing():
            raise GraphCaptureError(
                f"a step of {type(self).__name__} is captured in a graph",
                op=self.FAMILY,
                why="the step number and the learning rate are numbers, which a graph would repeat",
                hint="capture forward and backward alone, and call step() after the graph",
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, here or in the namesakes in `torch.optim`, DeepSpeed and apex.

        States that were saved in float32 or in the parameters' dtype keep it; torch's own way would round float32 to
        the latter. Others get the dtype that this optimizer gives to new ones. Where a parameter has no number of its
        last step, its group's counts (apex, older DeepSpeed).

        Raises:
            UnsupportedOptionError: a group has an option that would change the result; nothing was loaded.
            CheckpointError: states are not those of this optimizer, or nothing numbers their step; nothing was loaded.
        """
        given: dict[str, Any] = {}
        before = self.register_load_state_dict_pre_hook(lambda _, last: given.update(last))
        after = self.register_load_state_dict_post_hook(lambda _: self._keep_dtypes(given), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _keep_dtypes(self, given: dict[str, Any]) -> None:
        """Put states that torch has cast back into the dtype of the state dict, if ops take it."""
        ids = chain.from_iterable(group["params"] for group in given["param_groups"])
        params = ((group, param) for group in self.param_groups for param in group["params"])
        for saved_id, (group, param) in zip(ids, params, strict=True):
            saved = self._renamed(given["state"].get(saved_id, {}))
            states = {name: saved[name] for name in self.STATES if name in saved}
            fits = all(state.dtype in (param.dtype, torch.float32) for state in states.values())
            for name, state in states.items():
                dtype = state.dtype if fits else group["state_dtype"] or param.dtype
                self.state[param][name] = state.to(param.device, dtype)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A dict of a state dict has groups and states; one of a pickle has the defaults too. Nothing is changed before
        # everything is known to fit.
        groups = [dict(group) for group in state["param_groups"]]
        parameters = {param for group in groups for param in group["params"]}
        states = {p: self._renamed(values) if p in parameters else values for p, values in state["state"].items()}
        for group in groups:
            self._import_group(group)
            self._number_steps(group, [states[p] for p in group["params"] if states.get(p)])
        super().__setstate__({**state, "param_groups": groups, "state": defaultdict(dict, states)})
        self._forget()
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    def _renamed(self, state: Mapping[str, Any]) -> State:
        return {self.RENAMED.get(name, name): value for name, value in state.items()}

    def _number_steps(self, group: Group, states: list[State]) -> None:
        """Give each state of a group the number of its last step, as an int, and take the group's own away.

        DeepSpeed's FusedAdam and FusedLion count in the group, or in the state of its last parameter alone: there the
        other states have moments and the number 0. What this class has saved gives the group the largest number of its
        states: a number that was set back to 0 stays.
        """
        group_step = group.pop("step", None)
        largest = max((int(state.get("step", 0)) for state in states), default=0)
        latest = max(int(group_step or 0), largest)
        ours = "state_dtype" in group and (group_step is None or int(group_step) == largest)
        for state in states:
            if missing := [name for name in self.STATES if name not in state]:
                raise CheckpointError(
                    f"a state dict is not one of {type(self).__name__}",
                    op=self.FAMILY,
                    why=f"a state has {', '.join(sorted(state))}, and no {', '.join(missing)}",
                )
            step = int(state.get("step", latest))  # torch.optim keeps a tensor
            counts = ours and "step" in state
            if step == 0 and not counts and any(bool(state[name].any()) for name in self.STATES):
                step = latest
                if step == 0 and self.COUNTS_STEPS:
                    raise CheckpointError(
                        f"{type(self).__name__} cannot go on from a state dict",
                        op=self.FAMILY,
                        why="neither its states nor its groups number the steps",
                        hint='set "step" in its "param_groups"',
                    )
            state["step"] = step


def _way_out(params: list[Tensor], grads: list[Tensor]) -> str:
    """What to do about tensors that no op of ours takes."""
    if any(grad.layout != torch.strided for grad in grads):
        return "make embeddings with sparse=False, or give parameters with sparse gradients to torch.optim.SparseAdam"
    if any(param.is_complex() for param in params):
        return (
            "give complex parameters to an optimizer of torch.optim, such as AdamW, or keep real ones "
            "(torch.view_as_real) and compute with torch.view_as_complex of them"
        )
    return ""


def betas_of(group: Group) -> tuple[float, float]:
    """The betas of a group, which may be tensors."""
    beta1, beta2 = group["betas"]
    return float(beta1), float(beta2)


def check_options(name: str, *, betas: Sequence[float | Tensor] = (), **numbers: float | Tensor) -> None:
    """Check the options of an optimizer.

    Raises:
        ValueError: a number is negative, a beta is not in [0, 1), or a tensor does not have one element.
    """
    for option, number in (*numbers.items(), *((f"betas[{i}]", beta) for i, beta in enumerate(betas))):
        if isinstance(number, Tensor) and number.numel() != 1:
            raise ValueError(f"{name}: {option} has shape {list(number.shape)}; expected one element")
    for option, number in numbers.items():
        if not number >= 0:
            raise ValueError(f"{name}: {option}={number}; expected at least 0")
    for i, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"{name}: betas[{i}]={beta}; expected at least 0 and less than 1")
