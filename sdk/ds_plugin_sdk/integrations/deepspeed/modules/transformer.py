"""``transformer``: what DeepSpeed's DeepSpeedTransformerLayer calls.

DeepSpeed names its functions after float32 and float16; each of ours takes float32, float16 and bfloat16, as the
tensors have it. Of what ``forward_*`` returns only the first tensor is part of the mathematics. The others come back in
``backward_*``, after DeepSpeed has dropped or replaced those that the layer's options make superfluous; what they are
here is said in `ds_plugin_sdk.ops.transformer.layer.SavedTensors`.
"""

from __future__ import annotations

from torch import Tensor

from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.ops.transformer import layer as transformer_layer
from ds_plugin_sdk.ops.transformer.layer import LayerConfig, SavedTensors, Weights

_layers: dict[int, LayerConfig] = {}


def create_transformer_layer_fp32(
    layer_id: int,
    batch_size: int,
    hidden: int,
    heads: int,
    intermediate: int,
    attn_dropout: float,
    hidden_dropout: float,
    layer_norm_eps: float,
    seed: int,
    pre_layer_norm: bool,
    test_gemm: bool,
    attn_dropout_checkpoint: bool,
    normalize_invertible: bool,
    gelu_checkpoint: bool,
    stochastic_mode: bool,
) -> int:
    """Make a layer known by its number.

    Args:
        layer_id: the number.
        batch_size, hidden, intermediate: not used; the tensors say them.
        heads: of the attention.
        attn_dropout, hidden_dropout: shares that are dropped in training.
        layer_norm_eps: added to the variance in the norms.
        seed: another seed drops other elements. What is dropped also follows torch's default generator, which
            `torch.manual_seed` sets, and which checkpointing of activations restores before it computes a layer again.
        pre_layer_norm, attn_dropout_checkpoint, normalize_invertible, gelu_checkpoint: as in
            `ds_plugin_sdk.ops.transformer.layer.LayerConfig`.
        test_gemm: would choose among matrix products on a GPU; not used.
        stochastic_mode: would not wait for streams on a GPU; not used.

    Returns:
        0.
    """
    _layers[layer_id] = LayerConfig(
        heads,
        attn_dropout,
        hidden_dropout,
        layer_norm_eps,
        pre_layer_norm,
        attn_dropout_checkpoint=attn_dropout_checkpoint,
        normalize_invertible=normalize_invertible,
        gelu_checkpoint=gelu_checkpoint,
        seed=seed,
    )
    return 0


def forward_fp32(
    layer_id: int,
    input: Tensor,
    input_mask: Tensor | None,
    attn_qkvw: Tensor,
    attn_qkvb: Tensor,
    attn_ow: Tensor,
    attn_ob: Tensor,
    attn_nw: Tensor,
    attn_nb: Tensor,
    inter_w: Tensor,
    inter_b: Tensor,
    output_w: Tensor,
    output_b: Tensor,
    norm_w: Tensor,
    norm_b: Tensor,
    training: bool,
    pre_layer_norm: bool,
    attn_dropout_checkpoint: bool,
    normalize_invertible: bool,
    gelu_checkpoint: bool,
) -> list[Tensor]:
    """One layer's result; formula, shapes and errors are those of `ds_plugin_sdk.ops.transformer.layer.forward`.

    Args:
        layer_id: as it was created; its options come from there.
        training: whether to drop anything.

    Returns:
        17 tensors: the result, ``[B, S, H]``, and 16 for `backward_fp32`.

    Raises:
        SdkError: no layer of this number was created.
        InvalidTensorError: the tensors do not fit.
    """
    weights = Weights(
        *(attn_qkvw, attn_qkvb, attn_ow, attn_ob, attn_nw, attn_nb),
        *(inter_w, inter_b, output_w, output_b, norm_w, norm_b),
    )
    layer = _layer(layer_id)
    output, kept = transformer_layer.forward(layer if training else layer.in_evaluation(), input, input_mask, weights)
    masks = (kept.attn_seed, kept.attn_offset, kept.seeds)
    return [
        *(output, kept.normed, kept.qkv, kept.probs, kept.dropped, kept.context, kept.attn_sum, kept.attn_normed),
        *(kept.inter, kept.gelu, *masks, kept.attn_rstd, kept.attn_mean, kept.rstd, kept.mean),
    ]


def backward_fp32(
    layer_id: int,
    grad_output: Tensor,
    output: Tensor,
    inp_norm: Tensor,
    qkv_tf: Tensor,
    soft_inp: Tensor,
    ctx_buf_b: Tensor,
    attn_o_inp: Tensor,
    add_res: Tensor,
    ff1_inp: Tensor,
    gelu_inp: Tensor,
    ff2_inp: Tensor,
    attn_prob_dropout_mask: Tensor,
    attn_output_dropout_mask: Tensor,
    layer_output_dropout_mask: Tensor,
    attn_layer_norm_var: Tensor,
    attn_layer_norm_mean: Tensor,
    layer_norm_var: Tensor,
    layer_norm_mean: Tensor,
    input: Tensor,
    input_mask: Tensor | None,
    *weights: Tensor,
) -> list[Tensor]:
    """The gradients of a layer.

    Args:
        layer_id: as it was created.
        grad_output: of the result, ``[B, S, H]``.
        weights: the 12 weights in the order of `forward_fp32`.

    The other arguments are what `forward_fp32` returned; DeepSpeed puts `inp_norm` for `output` and `input`, or `input`
    for `inp_norm`, `ff1_inp` for `add_res`, `soft_inp` for `ctx_buf_b` and `ff2_inp` for `gelu_inp`, where it has not
    kept them.

    Returns:
        13 tensors: the gradients of the input and of the weights in their order.

    Raises:
        SdkError: no layer of this number was created.
        InvalidTensorError: the tensors do not fit.
    """
    kept = SavedTensors(
        *(qkv_tf, soft_inp, ctx_buf_b, attn_o_inp, add_res, ff1_inp, gelu_inp, ff2_inp, inp_norm),
        *(attn_prob_dropout_mask, attn_output_dropout_mask, layer_output_dropout_mask),
        *(attn_layer_norm_mean, attn_layer_norm_var, layer_norm_mean, layer_norm_var),
    )
    grad_input, grads = transformer_layer.backward(
        _layer(layer_id), grad_output, output, kept, input, input_mask, Weights(*weights)
    )
    return [grad_input, *grads]


def _layer(layer_id: int) -> LayerConfig:
    try:
        return _layers[layer_id]
    except KeyError:
        raise SdkError(
            "a transformer layer was used that does not exist",
            op="transformer",
            why=f"layer {layer_id} was not created in this process",
            hint=f"call create_transformer_layer_fp32({layer_id}, ...) first",
        ) from None


create_transformer_layer_fp16 = create_transformer_layer_fp32
forward_fp16 = forward_fp32
backward_fp16 = backward_fp32
