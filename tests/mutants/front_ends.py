"""Defects of what DeepSpeed calls on an op: names, order of arguments, what is written in place."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.target import Target
from mutants.mutant import mutant

Function = Callable[..., Any]


def module(target: Target, op: str, name: str, function: Function) -> Target:
    """Put a defective function into the module that DeepSpeed gets for an op.

    Args:
        function: ``function(original, *arguments)``.
    """
    functions = importlib.import_module(f"ds_plugin_sdk.integrations.deepspeed.modules.{op}")
    setattr(functions, name, functools.partial(function, getattr(functions, name)))
    return target


def _copies(tensors: Any) -> Any:
    if isinstance(tensors, Tensor):
        return tensors.clone()
    return [_copies(each) for each in tensors] if isinstance(tensors, list | tuple) else tensors


def _on_copies(original: Function, *arguments: Any) -> Any:
    return original(*_copies(arguments))


# ---- optimizers ------------------------------------------------------------------------------------------------------
@mutant("module.fused_adam_on_copies", "O7.1", "ops", only="/FusedAdam")
def fused_adam_on_copies(target: Target) -> Target:
    """multi_tensor_adam steps copies; DeepSpeed continues with the old parameters."""
    return module(target, "fused_adam", "multi_tensor_adam", _on_copies)


@mutant("module.fused_adam_lists_swapped", "O7.1", "ops", only="/FusedAdam")
def fused_adam_lists_swapped(target: Target) -> Target:
    """multi_tensor_adam expects parameters before gradients."""

    def function(original: Function, chunk: int, flag: Tensor, lists: list[Any], *rest: Any) -> Any:
        return original(chunk, flag, [lists[1], lists[0], *lists[2:]], *rest)

    return module(target, "fused_adam", "multi_tensor_adam", function)


@mutant("module.cpu_adam_forgets_step", "O7.1", "ops", only="/DeepSpeedCPUAdam")
def cpu_adam_forgets_step(target: Target) -> Target:
    """adam_update takes every step for the first."""
    return module(target, "cpu_adam", "adam_update", lambda original, key, step, *rest: original(key, 1, *rest))


@mutant("module.cpu_adagrad_no_decay", "O7.1", "ops", only="/DeepSpeedCPUAdagrad")
def cpu_adagrad_no_decay(target: Target) -> Target:
    """adagrad_update ignores the weight decay."""
    return module(target, "cpu_adagrad", "adagrad_update", lambda original, *a: original(*a[:4], 0.0, *a[5:]))


@mutant("module.fused_lion_missing", "O7.1", "ops", only="/FusedLion")
def fused_lion_missing(target: Target) -> Target:
    """The module has no multi_tensor_lion."""
    del importlib.import_module("ds_plugin_sdk.integrations.deepspeed.modules.fused_lion").multi_tensor_lion
    return target


@mutant("module.lamb_ratio_not_clamped", "O7.1", "ops", only="/FusedLamb")
def lamb_ratio_not_clamped(target: Target) -> Target:
    """lamb lets the trust ratio grow without bound."""
    return module(target, "fused_lamb", "lamb", lambda original, *a: original(*a[:8], 1e9, 0.0, *a[10:]))


@mutant("module.lamb_returns_nothing_useful", "O7.1", "ops", only="/FusedLamb")
def lamb_returns_one(target: Target) -> Target:
    """lamb returns a trust ratio of 1, whatever it used."""

    def function(original: Function, *arguments: Any) -> Tensor:
        return torch.ones_like(original(*arguments))

    return module(target, "fused_lamb", "lamb", function)


# ---- transformer layer -----------------------------------------------------------------------------------------------
@mutant("module.transformer_pre_for_post", "O7.1", "ops", only="post_layer_norm")
def transformer_pre_for_post(target: Target) -> Target:
    """The layer normalizes before its halves, whatever it was created for."""

    def function(original: Function, *arguments: Any) -> Any:
        return original(*arguments[:9], True, *arguments[10:])

    return module(target, "transformer", "create_transformer_layer_fp32", function)


# ---- quantizer, random-LTD, spatial ----------------------------------------------------------------------------------
@mutant("module.quantizer_truncates", "O7.1", "ops", only="/CUDAQuantizer")
def quantizer_truncates(target: Target) -> Target:
    """The stored step is that of a range of 255 instead of 256 steps."""

    def function(original: Function, *arguments: Any) -> Any:
        codes, widths = original(*arguments)
        return [codes, widths * 256 / 255]

    return module(target, "quantizer", "quantize", function)


@mutant("module.nibbles_swapped", "O7.1", "ops", only="/DeQuantizer.4bit")
def nibbles_swapped(target: Target) -> Target:
    """The first of two values is looked for in the low half of the byte."""

    def function(original: Function, codes: Tensor, *rest: Any) -> Any:
        return original((codes << 4) | (codes >> 4), *rest)

    return module(target, "quantizer", "dequantize_int4_to_half_experimental", function)


@mutant("module.tokens_not_sorted", "O7.1", "ops", only="/sample_tokens")
def tokens_not_sorted(target: Target) -> Target:
    """token_sort_ leaves the indices as they were drawn."""
    return module(target, "random_ltd", "token_sort_", lambda original, indices, length: indices)


@mutant("module.tokens_added", "O7.1", "ops", only="/GatherTokens")
def tokens_added(target: Target) -> Target:
    """token_scatter_ adds where it should overwrite."""

    def function(original: Function, everything: Tensor, *rest: Any) -> Tensor:
        before = everything.clone()
        written: Tensor = original(everything, *rest)
        return written.add_(before * (written != before))

    return module(target, "random_ltd", "token_scatter_", function)


@mutant("module.nhwc_second_bias_forgotten", "O7.1", "ops", only="/nhwc_bias_add")
def nhwc_other_forgotten(target: Target) -> Target:
    """nhwc_bias_add_bias_add forgets the second bias."""

    def function(original: Function, x: Tensor, bias: Tensor, other: Tensor, other_bias: Tensor) -> Any:
        return original(x, bias, other, torch.zeros_like(other_bias))

    return module(target, "spatial_inference", "nhwc_bias_add_bias_add", function)


@mutant("module.bytes_copied", "O7.1", "ops", only="/cast_to_byte_tensor")
def bytes_copied(target: Target) -> Target:
    """cast_to_byte_tensor gives a copy, which does not follow the tensor."""
    return module(target, "utils", "cast_to_byte_tensor", lambda original, tensor: original(tensor).clone())


# ---- inference -------------------------------------------------------------------------------------------------------
# ---- files -----------------------------------------------------------------------------------------------------------
def _handle(target: Target, name: str, function: Function) -> Target:
    handle = importlib.import_module("ds_plugin_sdk.integrations.deepspeed.modules.async_io").aio_handle
    original = getattr(handle, name)
    setattr(handle, name, lambda self, *arguments, **named: function(original, self, *arguments, **named))
    return target


@mutant("module.aio_offset_ignored", "O7.1", "ops", only="/aio_handle")
def aio_offset_ignored(target: Target) -> Target:
    """`async_pread` reads from the beginning of the file."""
    return _handle(target, "async_pread", lambda original, self, buffer, file, *_: original(self, buffer, file))


def _aio(change: Callable[[int, int], None]) -> Callable[[Target], Target]:
    def install(target: Target) -> Target:
        handle = importlib.import_module("ds_plugin_sdk.integrations.deepspeed.modules.async_io").aio_handle
        make = handle.__init__

        def made(self: Any, block: int = 1 << 20, depth: int = 128, *a: Any, **named: Any) -> None:
            change(block, depth)
            make(self, block, depth, *a, **named)

        handle.__init__ = made
        return target

    return install


def _has_room(block: int, depth: int) -> None:
    if block * depth > 64 << 30:
        raise MemoryError(f"{depth} blocks of {block} bytes")


@mutant("module.aio_room_for_all", "O7.1", "ops", only="/aio_handle")
def aio_room_for_all(target: Target) -> Target:
    """A handle allocates as many blocks as its queue is deep, whatever it is given to write."""
    return _aio(_has_room)(target)


@mutant("module.fused_adam_counts_calls", "O7.1", "ops", only="/FusedAdam")
def fused_adam_counts_calls(target: Target) -> Target:
    """multi_tensor_adam counts its calls and takes that for the step, as it is with one group."""
    calls: list[int] = []

    def function(original: Function, chunk: int, flag: Tensor, lists: Any, *a: Any) -> Any:
        if a[4] == 1:
            calls.clear()
        calls.append(1)
        return original(chunk, flag, lists, *a[:4], len(calls), *a[5:])

    return module(target, "fused_adam", "multi_tensor_adam", function)


@mutant("module.aio_from_the_storage", "O7.1", "ops", only="/aio_handle")
def aio_from_the_storage(target: Target) -> Target:
    """`sync_pwrite` writes from the beginning of the memory that a tensor is a part of."""

    def whole(tensor: Tensor) -> Tensor:
        return tensor.as_strided(tensor.shape, tensor.stride(), 0)

    return _handle(target, "sync_pwrite", lambda original, self, buffer, *a: original(self, whole(buffer), *a))


@mutant("module.aio_truncates", "O7.1", "ops", only="/aio_handle")
def aio_truncates(target: Target) -> Target:
    """`sync_pwrite` opens a file as if it were new: what was behind the piece that is written is lost."""

    def function(original: Function, self: Any, buffer: Tensor, file: str, offset: int = 0) -> Any:
        result = original(self, buffer, file, offset)
        os.truncate(file, offset + buffer.nbytes)
        return result

    return _handle(target, "sync_pwrite", function)


@mutant("module.aio_waits_for_one", "O7.1", "ops", only="/aio_handle")
def aio_waits_for_one(target: Target) -> Target:
    """`wait` gives 1, however many there were."""
    return _handle(target, "wait", lambda original, self: min(original(self), 1))


@mutant("module.aio_swallows_errors", "O7.1", "ops", only="/aio_handle")
def aio_swallows_errors(target: Target) -> Target:
    """A write that fails gives -1 and says nothing."""

    def quiet(original: Function, self: Any, *arguments: Any) -> Any:
        try:
            return original(self, *arguments)
        except OSError:
            return -1

    return _handle(target, "sync_pwrite", quiet)


def _inference(target: Target, name: str, function: Function) -> Target:
    return module(target, "transformer_inference", name, function)


@mutant("module.residual_returned_only", "O7.1", "ops", only="/ResidualAddOp")
def residual_returned_only(target: Target) -> Target:
    """residual_add_bias returns the sum and leaves the residual as it was."""
    return _inference(target, "residual_add_bias_fp32", _on_copies)


@mutant("module.moe_returned_only", "O7.1", "ops", only="/MoEResMatmulOp")
def moe_returned_only(target: Target) -> Target:
    """moe_res_matmul returns the sum and leaves the output as it was."""
    return _inference(target, "moe_res_matmul", _on_copies)


@mutant("module.gelu_for_relu", "O7.1", "ops", only="/MLPGemmOp")
def gelu_for_relu(target: Target) -> Target:
    """mlp_gemm is GELU whatever activation it is asked for, as with DeepSpeed's own fallback."""

    def function(original: Function, *arguments: Any) -> Any:
        return original(*arguments[:14], 1, *arguments[15:])

    return _inference(target, "mlp_gemm_fp32", function)


@mutant("module.norm_without_bias", "O7.1", "ops", only="/QKVGemmOp")
def norm_without_bias(target: Target) -> Target:
    """qkv_gemm normalizes without the shift."""

    def function(original: Function, *arguments: Any) -> Any:
        return original(*arguments[:5], torch.zeros_like(arguments[5]), *arguments[6:])

    return _inference(target, "qkv_gemm_fp32", function)


@mutant("module.cache_not_remembered", "O7.1", "ops", only="/SoftmaxContextOp")
def cache_not_remembered(target: Target) -> Target:
    """Every call of softmax_context restarts the cache."""

    def function(original: Function, *arguments: Any) -> Any:
        importlib.import_module("ds_plugin_sdk.integrations.deepspeed.modules.transformer_inference").reset_cache()
        return original(*arguments)

    return _inference(target, "softmax_context_fp32", function)


@mutant("module.weights_not_transposed", "O7.1", "ops", only="/LinearOp")
def weights_not_transposed(target: Target) -> Target:
    """linear_layer takes [out, in] weights for [in, out]."""

    def function(original: Function, *arguments: Any) -> Any:
        return original(*arguments[:6], False, *arguments[7:])

    return _inference(target, "linear_layer_fp32", function)


@mutant("module.cache_never_reset", "O7.1", "ops", only="/SoftmaxContextOp")
def cache_never_reset(target: Target) -> Target:
    """reset_cache forgets nothing."""
    return _inference(target, "reset_cache", lambda original: None)


@mutant("module.int8_scales_ignored", "O7.1", "ops", only="/VectorMatMulOp")
def int8_scales_ignored(target: Target) -> Target:
    """vector_matmul_int8 gives every part of the weights the first part's scale."""

    def function(original: Function, *arguments: Any) -> Any:
        scale = arguments[3]
        return original(*arguments[:3], scale[:1].expand_as(scale), *arguments[4:])

    return _inference(target, "vector_matmul_int8", function)


@mutant("module.rotary_starts_at_zero", "O7.1", "ops", only="/apply_rotary_pos_emb")
def rotary_starts_at_zero(target: Target) -> Target:
    """apply_rotary_pos_emb takes the first token for the first of its sequence."""
    return _inference(target, "apply_rotary_pos_emb", lambda original, *a: original(*a[:3], 0, *a[4:]))
