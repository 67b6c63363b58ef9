"""A transformer layer for training."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ds_plugin_sdk.nn.linear import check_untransformed
from ds_plugin_sdk.ops._derived_once import derived_once
from ds_plugin_sdk.ops.transformer import layer as transformer_layer
from ds_plugin_sdk.ops.transformer.layer import LayerConfig, SavedTensors, Weights


class TransformerLayer(nn.Module):
    """Self-attention and feed-forward with norms, dropout and residuals, as BERT's and GPT's layers have them.

    The formulas are those of `ds_plugin_sdk.ops.transformer.layer.forward`. Parameters have the names and shapes of
    DeepSpeed's DeepSpeedTransformerLayer, so that state dicts fit both: normally distributed weights, biases of 0.

    In training, dropout follows torch's default generator of the input's device: `torch.manual_seed` repeats it, and a
    layer that `torch.utils.checkpoint` computes again drops the same elements. No dropout mask is kept.

    Under `torch.autocast` the layer computes in autocast's dtype, and so is its result; gradients have the parameters'
    dtype. Float64 stays float64.

    Args:
        hidden_size: H.
        num_heads: of the attention; divides `hidden_size`.
        intermediate_size: of the feed-forward, I; 4 H if None.
        attn_dropout: share of the attention's weights that is dropped.
        hidden_dropout: share that is dropped of what attention and feed-forward add.
        layer_norm_eps: added to the variance in the norms.
        pre_layer_norm: norms stand before attention and feed-forward (GPT-2), or after (BERT).
        approximate: form of gelu: ``tanh``, or ``none`` for that with the error function.
        initializer_range: standard deviation of the weights at first.
        attn_dropout_checkpoint: keep the attention's weights once instead of twice, for a second dropout in the
            backward pass.
        normalize_invertible: do not keep the inputs of norms, but regain them from the outputs. No element of a norm's
            weight may become 0.
        gelu_checkpoint: do not keep the output of gelu, but compute it again.
        device, dtype: of the parameters: float32, bfloat16, float16, float64.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        intermediate_size: int | None = None,
        *,
        attn_dropout: float = 0.1,
        hidden_dropout: float = 0.1,
        layer_norm_eps: float = 1e-12,
        pre_layer_norm: bool = True,
        approximate: str = "tanh",
        initializer_range: float = 0.02,
        attn_dropout_checkpoint: bool = False,
        normalize_invertible: bool = False,
        gelu_checkpoint: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or hidden_size % num_heads:
            raise ValueError(f"TransformerLayer: num_heads={num_heads}; expected a divisor of {hidden_size}")
        for name, p in (("attn_dropout", attn_dropout), ("hidden_dropout", hidden_dropout)):
            if not 0 <= p < 1:
                raise ValueError(f"TransformerLayer: {name}={p}; expected at least 0 and less than 1")
        if approximate not in ("tanh", "none"):
            raise ValueError(f"TransformerLayer: approximate={approximate!r}; expected 'tanh' or 'none'")
        self.layer = LayerConfig(
            num_heads,
            attn_dropout,
            hidden_dropout,
            layer_norm_eps,
            pre_layer_norm,
            approximate == "tanh",
            attn_dropout_checkpoint=attn_dropout_checkpoint,
            normalize_invertible=normalize_invertible,
            gelu_checkpoint=gelu_checkpoint,
        )
        self.initializer_range = initializer_range
        hidden, inter = hidden_size, intermediate_size or 4 * hidden_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.attn_qkvw, self.attn_qkvb = parameter(3 * hidden, hidden), parameter(3 * hidden)
        self.attn_ow, self.attn_ob = parameter(hidden, hidden), parameter(hidden)
        self.attn_nw, self.attn_nb = parameter(hidden), parameter(hidden)
        self.inter_w, self.inter_b = parameter(inter, hidden), parameter(inter)
        self.output_w, self.output_b = parameter(hidden, inter), parameter(hidden)
        self.norm_w, self.norm_b = parameter(hidden), parameter(hidden)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weights normally distributed, those of norms 1, biases 0."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=self.initializer_range)
            else:
                parameter.fill_(float(name in ("attn_nw", "norm_w")))

    def extra_repr(self) -> str:
        """What `print` shows of the layer."""
        return f"hidden_size={self.attn_ow.shape[0]}, intermediate_size={self.inter_b.shape[0]}, {self.layer}"

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The layer's result.

        Args:
            hidden_states: ``[B, S, H]``, the parameters' dtype, any under autocast; any sequence length S.
            attention_mask: added to the attention's scores: 0 for what may be attended to and a large negative number
                for the rest, the dtype of hidden_states; broadcasts to ``[B, heads, S, S]``, mostly ``[B, 1, 1, S]``.
                It gets no gradient.

        Returns:
            ``[B, S, H]``.

        Raises:
            InvalidTensorError: shapes or dtypes do not fit, or a norm that is to be inverted has a weight of 0.
            SdkError: under `torch.func`.
        """
        check_untransformed("transformer_layer")
        weights = [getattr(self, name) for name in Weights._fields]
        layer = self.layer if self.training else self.layer.in_evaluation()
        result: Tensor = _Function.apply(  # type: ignore[no-untyped-call, unused-ignore]  # before 2.15 torch gives it no type
            layer, hidden_states, attention_mask, *weights
        )
        return result


class _Function(torch.autograd.Function):
    """The layer for autograd: it keeps what `SavedTensors` says and nothing else."""

    @staticmethod
    def forward(ctx: Any, layer: LayerConfig, input: Tensor, mask: Tensor | None, *weights: Tensor) -> Tensor:
        output, kept = transformer_layer.forward(layer, input, mask, Weights(*weights))
        ctx.layer = layer
        inverted = layer.normalize_invertible
        ctx.save_for_backward(
            output if inverted and not layer.pre_layer_norm else None,
            None if inverted and layer.pre_layer_norm else input,
            mask,
            *weights,
            *kept,
        )
        return output

    @staticmethod
    @functools.partial(derived_once, "transformer_layer", nonlinear=True)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        check_untransformed("transformer_layer", grads[0])
        output, input, mask, *rest = ctx.saved_tensors
        weights, kept = Weights(*rest[: len(Weights._fields)]), SavedTensors(*rest[len(Weights._fields) :])
        grad_input, weight_grads = transformer_layer.backward(ctx.layer, grads[0], output, kept, input, mask, weights)
        return None, grad_input, None, *weight_grads
