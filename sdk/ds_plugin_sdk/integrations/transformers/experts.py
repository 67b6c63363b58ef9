"""The experts of a layer: each token's products with the weights of those that the router has chosen for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_plugin_sdk.integrations.transformers import decoder
from ds_plugin_sdk.integrations.transformers.as_found import Place, Snapshot
from ds_plugin_sdk.integrations.transformers.decoder import Ops, ops_for
from ds_plugin_sdk.integrations.transformers.replacement import Replacement
from ds_plugin_sdk.integrations.transformers.understood import (
    NotUnderstoodError,
    check_only_its_class,
    check_parameter,
    is_plain_inference,
    name_of,
    same_code,
)
from ds_plugin_sdk.integrations.transformers.watch import Watch
from ds_plugin_sdk.integrations.transformers.weights import Contents, Looks, Samples, Weights, bits_of, quantize

try:
    from transformers.integrations import moe
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
except ImportError:  # the oldest releases have experts of other kinds
    moe = None

# transformers' functions for experts that compute what this file does, and its names for a class's own code.
_FUNCTIONS: dict[str | None, Any] = {
    name: getattr(moe, f"{name}_experts_forward", None) for name in ("batched_mm", "grouped_mm")
}
_OWN = (None, "eager")


def is_experts(module: nn.Module) -> bool:
    """Whether the module's forward is that which calls a function of transformers' registry for experts."""
    forward = type(module).forward
    code = getattr(forward, "__code__", None)
    if moe is None or code is None or code is not Qwen3MoeExperts.forward.__code__:
        return False
    cells = dict(zip(code.co_freevars, forward.__closure__ or (), strict=True))
    registry = cells.get("experts_interface")  # some classes have one of their own
    return registry is None or registry.cell_contents is moe.ALL_EXPERTS_FUNCTIONS


class _Copy(NamedTuple):
    """Of an expert's weights: levels and scales of both products, and what they were made of."""

    products: list[tuple[Tensor, Tensor]]
    samples: Samples
    looks: Looks


def _has_known_code(kind: type[Any]) -> bool:
    """Whether the forward that the registry's stands for is that of Qwen 3's experts, as of most families."""
    default = getattr(kind, "_apply_gate", None) is moe._default_apply_gate
    return default and same_code(kind.forward.__wrapped__, Qwen3MoeExperts.forward.__wrapped__)


class ExpertsReplacement(Replacement):
    """Experts whose weights are in one parameter for each product, ``[experts, out, in]``.

    transformers' functions go over all experts, or copy the weights of those that are chosen; here each is one call of
    our op, for its tokens alone, which reads the weights where they are, or copies of them in 8 or 4 bits.

    Raises:
        NotUnderstoodError: its weights lie otherwise, or it is not on the host.
    """

    def __init__(self, module: nn.Module, weights: Weights) -> None:
        super().__init__(module)
        self._own: Any = module
        self._weights = weights
        self._doubted = False
        check_only_its_class(module)
        self._check()
        if not self._is_chosen():
            chosen = getattr(module.config, "_experts_implementation", None)
            raise NotUnderstoodError(f"the code of its experts is not known: {chosen!r}")
        self._watch = Watch.alone(module)

    def put_on(self) -> None:
        self._pack()
        super().put_on()

    def holds(self) -> bool:
        trains = self._weights is not None and self.module.training  # `Matrix.rounded` says why
        known = not trains and self._watch.holds() and not self._own._is_expert_parallel and self._is_chosen()
        return known and self._follow()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on:
            return self.own(*args, **kwargs)
        if torch.is_grad_enabled():
            self._doubted = self._weights is not None
        elif len(args) == 3 and not kwargs and is_plain_inference(args[0]) and self.holds():
            result = self._run(*args)
            if result is not None:
                return result
        return self.own(*args, **kwargs)

    def _is_chosen(self) -> bool:
        """Whether code would run that computes the same: one of transformers' functions, or the class's own."""
        chosen = self._own.config._experts_implementation
        if chosen in _OWN:
            return _has_known_code(type(self.module)) and "_apply_gate" not in vars(self.module)
        function = _FUNCTIONS.get(chosen)
        written = getattr(function, "__module__", None) == moe.__name__ and not hasattr(function, "__wrapped__")
        return written and moe.ALL_EXPERTS_FUNCTIONS.get(chosen) is function

    def _run(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor | None:
        """Results are added in the order, and rounded, as by transformers' functions.

        Args:
            hidden: ``[tokens, hidden]``.
            chosen, shares: of each token's experts, ``[tokens, experts of a token]``.
        """
        fits = hidden.dim() == chosen.dim() == 2 and chosen.shape == shares.shape and len(chosen) == len(hidden)
        if not fits or not chosen.numel() or chosen.dtype != torch.int64:
            return None
        if hidden.dtype != self._dtype or hidden.device.type != "cpu":
            return None
        experts, order = chosen.reshape(-1).sort(stable=True)
        counts = torch.bincount(experts.clamp(min=0)).tolist()
        if len(counts) > self._experts or experts[0] < 0:
            return None
        its = [(expert, count) for expert, count in enumerate(counts) if count]
        if self._weights is not None:
            self._compare(expert for expert, _ in its)
        ops, each, module = ops_for(hidden.dtype), chosen.shape[-1], self._own
        inner = self._products(ops, 0, hidden[order // each], its)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        results = self._products(ops, 1, inner, its) * shares.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        return results[back].view(hidden.shape[0], each, -1).sum(dim=1).to(hidden.dtype)

    def _products(self, ops: Ops, which: int, inputs: Tensor, its: list[tuple[int, int]]) -> Tensor:
        """The first ones or the second ones, of each expert with its rows of the inputs, one after the other."""
        parts = torch.split_with_sizes(inputs, [count for _, count in its])
        found = [
            decoder.product(ops, self._contents(which, expert), part)
            for (expert, _), part in zip(its, parts, strict=True)
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _contents(self, which: int, expert: int) -> Contents:
        """Views of the parameters, or the copies that were made of them."""
        weight, bias = self._parameters()[which]
        own = None if bias is None else bias.detach()[expert]
        if self._weights is None:
            return Contents(weight.detach()[expert], own)
        levels, scales = self._copies[expert].products[which]
        return Contents(levels, own, scales)

    # ------------------------------------------------------------------ weights
    def _parameters(self) -> list[tuple[Any, Any]]:
        """Weights and biases, or None, of both products."""
        names, own = ("gate_up_proj" if self._own.has_gate else "up_proj", "down_proj"), self._own._parameters
        return [(own[name], own[f"{name}_bias"] if self._own.has_bias else None) for name in names]

    def _check(self) -> None:
        module = self._own
        try:
            if module.is_transposed or module.has_post_expert_norm or module._is_expert_parallel:
                raise NotUnderstoodError("its weights lie by columns or on several ranks, or its experts have norms")
            found = self._parameters()
        except (AttributeError, KeyError) as why:
            raise NotUnderstoodError(f"it is not as in the releases of transformers that are known: {why}") from why
        for weight, bias in found:
            for parameter in (weight, bias) if bias is not None else (weight,):
                check_parameter(parameter, f"a parameter of {name_of(module)}")
                if parameter.dtype != found[0][0].dtype:
                    raise NotUnderstoodError("its parameters are of several dtypes")
                if parameter.device.type != "cpu" or not parameter.is_contiguous():
                    raise NotUnderstoodError("its parameters are not contiguous in the host's memory")
            if weight.dim() != 3 or weight.numel() == 0 or (bias is not None and bias.shape != weight.shape[:2]):
                raise NotUnderstoodError(f"its weights are {list(weight.shape)}")
        if len(found[0][0]) != len(found[1][0]):
            raise NotUnderstoodError("its products have several numbers of experts")
        self._dtype, self._experts = found[0][0].dtype, len(found[0][0])

    def _pack(self) -> None:
        copied = self._weights is not None
        names = [name for name, parameter in self.module._parameters.items() if parameter is not None]
        self._held = Snapshot(Place(self.module._parameters, name, moved=True, counted=copied) for name in names)
        self._shapes = [each.shape for each in self._held.moved]
        self._copies = [self._copy(expert) for expert in range(self._experts if copied else 0)]
        self._doubted = False

    def _copy(self, expert: int) -> _Copy:
        assert self._weights is not None
        rows = self._rows(expert)
        with torch.inference_mode(False), torch.no_grad():
            products = [quantize(each, bits_of(each.shape[1], self._weights)) for each in rows]
        return _Copy(products, Samples(rows), Looks())

    def _rows(self, expert: int) -> list[Tensor]:
        """Its weights, ``[out, in]``."""
        return [weight.detach()[expert] for weight, _ in self._parameters()]

    def _compare(self, experts: Iterable[int]) -> None:
        """Copy those again of whose weights a sample is another one. What is a prompt, the other layers' inputs say:
        these have no sequences any more.
        """
        for expert in experts:
            copy = self._copies[expert]
            if copy.samples.differ(self._rows(expert), copy.looks.at(tokens=1)):
                self._copies[expert] = self._copy(expert)

    def _follow(self) -> bool:
        """As `Matrix.follow`; each call compares the weights of the experts that were chosen."""
        same = self._held.holds() and [each.shape for each in self._held.moved] == self._shapes
        if self._doubted or not same:
            try:
                self._check()
            except NotUnderstoodError:
                # What cannot serve any more is kept by nobody.
                self._held, self._shapes, self._copies, self._doubted = Snapshot(), [], [], True
                return False
            self._pack()
        return True


__all__ = ["ExpertsReplacement", "is_experts"]
