"""The loss of a causal language model in training, computed by its last layer: logits are never held.

While the model's own code runs, its last layer gives the loss in the place of logits, and its loss function hands that
on. So the layer's parameters are used within its own forward, where ZeRO 3 has gathered them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.opt.modeling_opt import OPTForCausalLM
from transformers.utils import ModelOutput

from ds_plugin_sdk.integrations.transformers.replacement import Replacement, forward_in_place, is_replaced
from ds_plugin_sdk.integrations.transformers.understood import (
    TORCHS_CROSS_ENTROPY,
    NotUnderstoodError,
    check_as_written,
    check_called,
    check_class_forward,
    check_no_other_forward,
    has_other_hooks,
    name_of,
    same_code,
)
from ds_plugin_sdk.nn import linear_cross_entropy
from ds_plugin_sdk.ops._watched import is_watched

_KNOWN = (LlamaForCausalLM, GPT2LMHeadModel, OPTForCausalLM)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LossReplacement(Replacement):
    """A model whose code is a base, a last layer and transformers' loss for causal language models."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        super().__init__(model)
        self._model = model
        self._check()
        self._signature = inspect.signature(self.forward)

    def is_in(self, forward: object) -> bool:
        """Also where it was wrapped by its function, as accelerate does for mixed precision."""
        wrapped = getattr(forward, "__func__", None)
        while wrapped is not None and wrapped is not self.forward.__func__:
            wrapped = getattr(wrapped, "__wrapped__", None)
        return wrapped is not None

    def holds(self) -> bool:
        return self._why_not() is None

    @property
    def why_not(self) -> str:
        return self._why_not() or "it was changed after accelerate()"

    def _why_not(self) -> str | None:
        try:
            self._check()
        except NotUnderstoodError as why:
            return str(why)
        return None

    def _check(self) -> None:
        """Raise `NotUnderstoodError` unless the model's code and its loss are known, and nobody looks at logits."""
        model = self._model
        if not is_replaced(model):
            check_no_other_forward(model)
        check_class_forward(type(model))
        if not any(same_code(type(model).forward, known.forward) for known in _KNOWN):
            raise NotUnderstoodError(f"the code of {name_of(model)} is not known")
        if model.loss_function is not ForCausalLMLoss:
            raise NotUnderstoodError("its loss is not transformers' for causal language models")
        check_called(ForCausalLMLoss, "its loss")
        if nn.functional.cross_entropy is not TORCHS_CROSS_ENTROPY:
            raise NotUnderstoodError("torch.nn.functional has another cross_entropy than torch's own")
        head = model.lm_head
        if type(head) is not nn.Linear:
            raise NotUnderstoodError(f"its last layer is {name_of(head)}, no plain linear layer")
        if not is_replaced(head):
            check_no_other_forward(head)
        check_as_written(head)
        if has_other_hooks(head):
            raise NotUnderstoodError("its last layer has hooks")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._given(args, kwargs)
        if given is None:
            return self.own(*args, **kwargs)
        call = _Call(self._model.lm_head, self._model.config.vocab_size, **given)
        with call.in_place(self._model):
            output = self.own(*args, **kwargs)
        return output if call.loss is None else _without_logits(output)

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """What the loss depends on next to hidden states; None if the model's own code is to run."""
        model = self._model
        if not self.is_on or not model.training or not torch.is_grad_enabled():
            return None
        if is_watched(operators=False):
            return None
        try:
            named = self._signature.bind(*args, **kwargs).arguments
        except TypeError:
            return None  # the model's own code says what is wrong
        keep = named.get("logits_to_keep", 0)
        if type(named.get("labels")) is not Tensor or type(keep) is not int or keep != 0 or not self.holds():
            return None
        options = named.get("kwargs", {})
        found = {
            name: options[name] for name in ("num_items_in_batch", "ignore_index", "shift_labels") if name in options
        }
        return {"labels": named["labels"], **found}


class _Call:
    """One call of a model: its last layer computes the loss.

    Attributes:
        loss: what it gave, or None if it gave logits.
    """

    def __init__(
        self,
        head: nn.Linear,
        columns: int,
        labels: Tensor,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
    ) -> None:
        self.loss: Tensor | None = None
        self._head = head
        self._columns = columns
        self._items = num_items_in_batch
        self._ignored = ignore_index
        shifted = (
            nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
        )
        self._targets = shifted

    @contextmanager
    def in_place(self, model: transformers.PreTrainedModel) -> Iterator[None]:
        """The last layer's forward and the model's loss are this object's."""
        before = vars(model).get("_loss_function")  # set by hand
        model.loss_function = self._hand_on
        try:
            with forward_in_place(self._head, self._forward):
                yield
        finally:
            del model._loss_function
            if before is not None:
                model._loss_function = before

    def _forward(self, input: Tensor) -> Tensor:
        head = self._head
        if not self._serves(input, head.weight, head.bias):
            return nn.functional.linear(input, head.weight, head.bias)
        self.loss = linear_cross_entropy(
            input,
            head.weight,
            self._targets.to(input.device),
            linear_bias=head.bias,
            ignore_index=self._ignored,
            reduction="mean" if self._items is None else "sum",
        )
        if self._items is not None:
            items = self._items
            self.loss = self.loss / (items.to(self.loss.device) if isinstance(items, Tensor) else items)
        return self.loss

    def _serves(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        cast = torch.is_autocast_enabled(input.device.type)
        return (
            type(input) is Tensor
            and input.dtype in _DTYPES
            and isinstance(weight, nn.Parameter)
            and weight.shape == (self._columns, input.shape[-1])
            and weight.device == input.device
            and (cast or weight.dtype == input.dtype)
            and (bias is None or cast or bias.dtype == input.dtype)
            and self._targets.shape == input.shape[:-1]
            and self._targets.dtype == torch.int64
        )

    def _hand_on(self, logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
        if self.loss is not None:
            return logits  # the loss, as hooks of the last layer have left it: ZeRO 3 learns by it when to gather again
        loss: Tensor = ForCausalLMLoss(logits, labels, vocab_size, **options)
        return loss


def _without_logits(output: Any) -> Any:
    """What a model has returned, whose logits are the loss once more."""
    if isinstance(output, ModelOutput):
        return type(output)(**{name: value for name, value in output.items() if name != "logits"})
    return (output[0], *output[2:])


__all__ = ["LossReplacement"]
