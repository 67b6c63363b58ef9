"""Defects of ops: kernels that compute something else, touch too much, or take too much."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk import op_builder
from ds_plugin_sdk.conformance.target import Target
from mutants import front_ends, model_ops  # noqa: F401  # imported to declare their mutants
from mutants.kernels import Kernel, fake, kernel
from mutants.mutant import SIMULATED, mutant, override


# ---- numbers: Adam ---------------------------------------------------------------------------------------------------
@mutant("adam.no_bias_correction", "O1.1", "ops", only="adam_/")
def no_bias_correction(target: Target) -> Target:
    """Adam's moments are used without bias correction."""
    return kernel(target, "adam_", lambda original, *a: original(*a[:-1], False))


@mutant("adam.swapped_betas", "O1.1", "ops", only="adam_/")
def swapped_betas(target: Target) -> Target:
    """Adam's betas change places."""
    return kernel(target, "adam_", lambda original, *a: original(*a[:6], a[7], a[6], *a[8:]))


@mutant("adam.missing_eps", "O1.1", "ops", only="adam_/")
def missing_eps(target: Target) -> Target:
    """Adam divides by the root alone."""
    return kernel(target, "adam_", lambda original, *a: original(*a[:8], 0.0, *a[9:]))


@mutant("adam.l2_for_decoupled", "O1.1", "ops", only="adam_/")
def l2_for_decoupled(target: Target) -> Target:
    """AdamW's decay is added to the gradient."""
    return kernel(target, "adam_", lambda original, *a: original(*a[:10], False, a[11]))


@mutant("adam.no_weight_decay", "O1.1", "ops", only="adam_/")
def no_weight_decay(target: Target) -> Target:
    """Adam forgets the weight decay."""
    return kernel(target, "adam_", lambda original, *a: original(*a[:9], 0.0, *a[10:]))


@mutant("adam.step_off_by_one", "O1.1", "ops", only="adam_/")
def step_off_by_one(target: Target) -> Target:
    """Adam corrects the bias of the step after this one."""
    return kernel(target, "adam_", lambda original, *a: original(*a[:4], [step + 1 for step in a[4]], *a[5:]))


@mutant("adam.dropped_tail", "O1.1", "ops", only="adam_/")
def dropped_tail(target: Target) -> Target:
    """The last element of a tensor that no vector width divides is not updated."""

    def function(original: Kernel, params: list[Tensor], *rest: Any) -> None:
        kept = [(p, p.flatten()[-1].clone()) for p in params if p.numel() % 16 == 1]
        original(params, *rest)
        for p, last in kept:
            p.view(-1)[-1] = last

    return kernel(target, "adam_", function)


@mutant("adam.dropped_tensor", "O1.1", "ops", only="adam_/")
def dropped_tensor(target: Target) -> Target:
    """The last tensor of a list is not updated."""
    return kernel(target, "adam_", lambda original, *a: original(*(each[:-1] for each in a[:4]), *a[4:]))


@mutant("adam.states_through_bfloat16", "O1.1", "ops", only="adam_/")
def states_through_bfloat16(target: Target) -> Target:
    """Moments in float32 are kept to the digits of bfloat16."""

    def function(original: Kernel, *arguments: Any) -> None:
        original(*arguments)
        for state in (*arguments[2], *arguments[3]):
            state.copy_(state.bfloat16())

    return kernel(target, "adam_", function)


@mutant("adam.rollback_forgets_decay", "O1.1", "ops", only="adam_rollback_/")
def rollback_forgets_decay(target: Target) -> Target:
    """A rolled back AdamW step keeps what the decay took."""
    return kernel(target, "adam_rollback_", lambda original, *a: original(*a[:9], 0.0, *a[10:]))


# ---- numbers: Adagrad and Lion ---------------------------------------------------------------------------------------
@mutant("adagrad.eps_in_the_root", "O1.1", "ops", only="adagrad_/")
def eps_in_the_root(target: Target) -> Target:
    """Adagrad divides by the root of sum and eps: zero by zero where nothing has happened yet."""
    return kernel(target, "adagrad_", lambda original, *a: original(*a[:4], 0.0, *a[5:]))


@mutant("lion.sign_of_gradient", "O1.1", "ops", only="lion_/")
def sign_of_gradient(target: Target) -> Target:
    """Lion goes by the gradient's sign, not by that of its average with the moment."""
    return kernel(target, "lion_", lambda original, *a: original(*a[:4], 0.0, *a[5:]))


# ---- layouts, emptiness, values that are not finite ------------------------------------------------------------------
@mutant("layout.no_write_back", "O1.2", "ops", only="adam_/")
def no_write_back(target: Target) -> Target:
    """Tensors with gaps are copied to contiguous ones, and never copied back."""
    return kernel(
        target, "adam_", lambda original, *a: original(*([t.contiguous() for t in each] for each in a[:4]), *a[4:])
    )


@mutant("layout.gaps_read", "O1.2", "ops", only="lion_/")
def gaps_read(target: Target) -> Target:
    """Gradients are read as if they had no gaps."""

    def dense(tensor: Tensor) -> Tensor:
        return torch.as_strided(tensor, tensor.shape, torch.empty(tensor.shape, device="meta").stride())

    return kernel(target, "lion_", lambda original, p, g, *rest: original(p, [dense(t) for t in g], *rest))


@mutant("empty.rejected", "O1.3", "ops", only="adagrad_/")
def empty_rejected(target: Target) -> Target:
    """A tensor without elements is an error."""

    def function(original: Kernel, params: list[Tensor], *rest: Any) -> None:
        if any(p.numel() == 0 for p in params):
            raise RuntimeError("invalid configuration argument")
        original(params, *rest)

    return kernel(target, "adagrad_", function)


@mutant("nan.swallowed", "O1.4", "ops", only="adam_/")
def nan_swallowed(target: Target) -> Target:
    """A NaN in a gradient counts as zero."""
    return kernel(target, "adam_", lambda original, p, g, *rest: original(p, [t.nan_to_num(0.0) for t in g], *rest))


@mutant("inf.clamped", "O1.4", "ops", only="lion_/")
def inf_clamped(target: Target) -> Target:
    """An infinite gradient counts as a very large one."""
    return kernel(target, "lion_", lambda original, p, g, *rest: original(p, [t.clamp(-1e4, 1e4) for t in g], *rest))


@mutant("noise.in_the_last_place", "O1.5", "ops", only="lion_")
def noise_in_the_last_place(target: Target) -> Target:
    """Two calls differ in the last digits, as with sums in the order in which threads come."""

    def function(original: Kernel, params: list[Tensor], *rest: Any) -> None:
        original(params, *rest)
        for p in params:
            p.mul_(1 + torch.randint(-1, 2, p.shape) * 2e-7)

    return kernel(target, "lion_", function)


# ---- what an op touches ----------------------------------------------------------------------------------------------
@mutant("touch.works_on_copies", "O2.1", "ops", only="adagrad_")
def works_on_copies(target: Target) -> Target:
    """The step is done on copies, and the caller's tensors stay as they were."""
    return kernel(
        target, "adagrad_", lambda original, *a: original(*([t.clone() for t in each] for each in a[:3]), *a[3:])
    )


@mutant("touch.clears_gradients", "O2.2", "ops", only="adam_")
def clears_gradients(target: Target) -> Target:
    """The gradients are zero after the step."""

    def function(original: Kernel, *arguments: Any) -> None:
        original(*arguments)
        for gradient in arguments[1]:
            gradient.zero_()

    return kernel(target, "adam_", function)


@mutant("touch.decays_gradients", "O2.2", "ops", only="adagrad_")
def decays_gradients(target: Target) -> Target:
    """The decay is added to the caller's gradient."""

    def function(original: Kernel, params: list[Tensor], grads: list[Tensor], *rest: Any) -> None:
        for p, g in zip(params, grads, strict=True):
            g.add_(p, alpha=0.1)
        original(params, grads, *rest)

    return kernel(target, "adagrad_", function)


# ---- what an op rejects ----------------------------------------------------------------------------------------------
def _lion_unchecked(_: Kernel, params: list[Tensor], *rest: Any) -> None:
    """Lion as a kernel that trusts its caller: as many elements as the first tensor has, whatever the others are."""
    grads, moments, lr, beta1, beta2, decay = rest
    for p, g, m in zip(params, grads, moments, strict=True):
        count = min(p.numel(), g.numel(), m.numel())
        param, grad, moment = (t.reshape(-1)[:count].float() for t in (p, g, m))
        direction = (beta1 * moment + (1 - beta1) * grad).sign()
        p.view(-1)[:count] = (param - lr * (direction + decay * param)).to(p.dtype)
        m.view(-1)[:count] = (beta2 * moment + (1 - beta2) * grad).to(m.dtype)


@mutant("reject.no_dtype", "O3.1", "ops", only="lion_")
def no_dtype_rejected(target: Target) -> Target:
    """Integers are taken for gradients."""
    return kernel(target, "lion_", _lion_unchecked)


@mutant("reject.no_shape", "O3.2", "ops", only="lion_")
def no_shape_rejected(target: Target) -> Target:
    """A gradient of another shape is taken."""
    return kernel(target, "lion_", _lion_unchecked)


@mutant("reject.after_writing", "O3.2", "ops", only="adam_")
def rejected_after_writing(target: Target) -> Target:
    """The last tensor is found wrong when the others have been written."""

    def function(original: Kernel, *arguments: Any) -> None:
        original(*(each[:-1] for each in arguments[:4]), *arguments[4:])
        original(*arguments)

    return kernel(target, "adam_", function)


@mutant("reject.other_error", "O3.1", "ops", only="adagrad_")
def rejected_by_another_error(target: Target) -> Target:
    """What cannot be worked on is rejected without saying which argument and why."""

    def function(original: Kernel, *arguments: Any) -> None:
        try:
            original(*arguments)
        except ValueError as error:
            raise RuntimeError("unsupported") from error

    return kernel(target, "adagrad_", function)


@mutant("reject.no_device", "O3.3", "ops", only="lion_")
def no_device_rejected(target: Target) -> Target:
    """Where tensors are is not looked at."""
    return fake(target, "lion_", lambda *arguments: None)


@mutant("reject.moves_them", "O3.3", "ops", target=SIMULATED, only="/lion_")
def moves_them(target: Target) -> Target:
    """Tensors that are elsewhere are moved to the device of the first."""

    def function(original: Kernel, params: list[Tensor], *rest: Any) -> None:
        device = params[0].device if params else None
        original(params, *([t.to(device) for t in each] if isinstance(each, list) else each for each in rest))

    return kernel(target, "lion_", function)


@mutant("reject.no_overlap", "O3.4", "ops", only="lion_")
def no_overlap_rejected(target: Target) -> Target:
    """An expanded tensor is written."""
    return kernel(target, "lion_", lambda original, p, *rest: original([t.clone() for t in p], *rest))


@mutant("reject.rows_in_turn", "O3.6", "ops", only="residual_add_bias_")
def rows_in_turn(target: Target) -> Target:
    """A row is read when those before it have been written."""

    def function(original: Kernel, residual: Tensor, hidden: Tensor, attention: Tensor | None, *rest: Any) -> None:
        rows = [residual, hidden, residual if attention is None else attention]
        for row, added, attended in zip(*(tensor.view(-1, tensor.shape[-1]) for tensor in rows), strict=True):
            original(row, added, None if attention is None else attended, *rest)

    return kernel(target, "residual_add_bias_", function)


@mutant("reject.keys_first", "O3.6", "ops", only="cached_attention")
def keys_first(target: Target) -> Target:
    """Keys are in the cache before the queries are read."""

    def function(original: Kernel, query: Tensor, key: Tensor, *rest: Any) -> Any:
        _, cache, _, past, *_ = rest
        cache[:, :, past : past + key.shape[2]] = key
        return original(query, key, *rest)

    return kernel(target, "cached_attention", function)


# ---- what is native --------------------------------------------------------------------------------------------------
@mutant("native.nothing_registered", "O6.1", "ops")
def nothing_registered(target: Target) -> Target:
    """A library loads and registers no kernel."""
    builders = {cls.NAME: cls for cls in target.builders().values() if issubclass(cls, op_builder.OpBuilder)}
    for cls in builders.values():
        cls.build_spec = _empty_library  # type: ignore[method-assign]  # the defect of this mutant
    return target


@mutant("native.wrong_name", "O6.2", "ops")
def wrong_name(target: Target) -> Target:
    """The builder of the norms' kernels calls itself ``norms``."""
    return override(target, op_builders="mutants.misnamed")


def _empty_library(self: op_builder.OpBuilder, portable: bool = False) -> Any:
    import tempfile
    from pathlib import Path

    from ds_plugin_sdk.jit import BuildSpec, Source

    folder = Path(tempfile.mkdtemp())
    (folder / "empty.cpp").write_text("// no kernel\n", encoding="utf-8")
    return BuildSpec(name="empty", owner="mutant", sources=(Source(folder / "empty.cpp"),))
