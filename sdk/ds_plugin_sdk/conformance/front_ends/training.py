"""DeepSpeed's front ends of training beside the optimizers: LAMB, the transformer layer, random-LTD, quantizer."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk.conformance.front_ends.front_end import FrontEnd, Result


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- LAMB ------------------------------------------------------------------------------------------------------------
def _lamb(device: torch.device) -> Iterator[Result]:
    """You et al. 2020 as DeepSpeed's kernel has it: the bias correction is in the step size, the ratio is clamped."""
    cls = importlib.import_module("deepspeed.ops.lamb").FusedLamb
    lr, beta1, beta2, eps, decay, lowest, highest = 1e-2, 0.9, 0.99, 1e-8, 0.1, 0.01, 0.3
    for shape in ((1003,), (7, 19)):
        start, grads = _numbers(*shape), [_numbers(*shape, seed=seed) for seed in range(1, 5)]
        param = torch.nn.Parameter(start.clone().to(device))
        options = {
            "betas": (beta1, beta2),
            "eps": eps,
            "weight_decay": decay,
            "max_coeff": highest,
            "min_coeff": lowest,
        }
        optimizer = cls([param], lr=lr, **options)
        p, m, v, ratio = start.double(), torch.zeros(shape).double(), torch.zeros(shape).double(), math.nan
        for step, grad in enumerate(grads, 1):
            param.grad = grad.to(device)
            optimizer.step()
            g = grad.double()
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            update = m / (v.sqrt() + eps) + decay * p
            size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
            ratio = min(max(float(p.norm() / update.norm()), lowest), highest)
            p = p - size * ratio * update
        yield Result(f"a parameter of shape {list(shape)}", param.detach(), p, 1e-5)
        found = torch.tensor(optimizer.get_lamb_coeffs(), dtype=torch.float64)
        yield Result("get_lamb_coeffs()", found, torch.tensor([ratio], dtype=torch.float64), 1e-5)


# ---- the transformer layer -------------------------------------------------------------------------------------------
_BATCH, _LENGTH, _HIDDEN, _HEADS, _INNER = 2, 13, 32, 4, 64


def _layer(pre_layer_norm: bool, stochastic: bool, device: torch.device) -> Iterator[Result]:
    """Output and gradients of one layer without dropout, with a padding mask."""
    mask = torch.zeros(_BATCH, 1, 1, _LENGTH)
    mask[1, ..., 9:] = -10000.0
    for result in _layer_in(torch.float32, _LENGTH, mask, pre_layer_norm, stochastic, device):
        yield Result(*result, 1e-4 if result[0] == "the output" else 1e-3)


def _half_layer(device: torch.device) -> Iterator[Result]:
    """The same in float16, with a padding mask and without, where a device may have other kernels for attention."""
    mask = torch.zeros(_BATCH, 1, 1, _LENGTH)
    mask[1, ..., 9:] = -10000.0
    for length, given in ((_LENGTH, mask), (16, None)):
        for what, actual, expected in _layer_in(torch.float16, length, given, True, False, device):
            which = f"{what} {'without' if given is None else 'with'} a mask"
            yield Result(which, actual, expected, 5e-3 * float(expected.abs().max()))


def _layer_in(
    dtype: torch.dtype, length: int, mask: Tensor | None, pre_layer_norm: bool, stochastic: bool, device: torch.device
) -> Iterator[tuple[str, Tensor, Tensor]]:
    module = importlib.import_module("deepspeed.ops.transformer")
    config = module.DeepSpeedTransformerConfig(
        batch_size=_BATCH,
        hidden_size=_HIDDEN,
        intermediate_size=_INNER,
        heads=_HEADS,
        attn_dropout_ratio=0.0,
        hidden_dropout_ratio=0.0,
        num_hidden_layers=1,
        initializer_range=0.2,
        fp16=dtype == torch.float16,
        pre_layer_norm=pre_layer_norm,
        stochastic_mode=stochastic,
        training=True,
        seed=1,
    )
    torch.manual_seed(0)
    layer = module.DeepSpeedTransformerLayer(config).to(device, dtype)
    x, cotangent = (_numbers(_BATCH, length, _HIDDEN, seed=seed).to(dtype) for seed in range(2))
    given = x.clone().to(device).requires_grad_()
    output = layer(given, None if mask is None else mask.to(device, dtype))
    output = output[0] if isinstance(output, tuple) else output
    torch.autograd.backward(output, cotangent.to(device))

    weights = {name: p.detach().cpu().double().requires_grad_() for name, p in layer.named_parameters()}
    exact = x.double().requires_grad_()
    wanted = _bert_layer(exact, torch.zeros(1) if mask is None else mask.double(), weights, pre_layer_norm)
    torch.autograd.backward(wanted, cotangent.double())
    yield "the output", output.detach(), wanted.detach()
    yield "the gradient of the input", _gradient(given), _gradient(exact)
    for name, parameter in layer.named_parameters():
        yield f"the gradient of {name}", _gradient(parameter), _gradient(weights[name])


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _bert_layer(x: Tensor, mask: Tensor, w: dict[str, Tensor], pre_layer_norm: bool) -> Tensor:
    """Vaswani et al. 2017 with GELU by tanh, as DeepSpeed's kernels compute it."""

    def norm(value: Tensor, name: str) -> Tensor:
        return functional.layer_norm(value, (_HIDDEN,), w[f"{name}w"], w[f"{name}b"], 1e-12)

    def attention(value: Tensor) -> Tensor:
        q, k, v = (value @ w["attn_qkvw"].T + w["attn_qkvb"]).view(*x.shape[:2], 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(_HIDDEN // _HEADS) + mask, dim=-1)
        context: Tensor = (weights @ v).transpose(1, 2).reshape(x.shape)
        return context @ w["attn_ow"].T + w["attn_ob"]

    def inner(value: Tensor) -> Tensor:
        hidden = functional.gelu(value @ w["inter_w"].T + w["inter_b"], approximate="tanh")
        return hidden @ w["output_w"].T + w["output_b"]

    if pre_layer_norm:
        x = x + attention(norm(x, "norm_"))
        return x + inner(norm(x, "attn_n"))
    x = norm(x + attention(x), "attn_n")
    return norm(x + inner(x), "norm_")


# ---- random-LTD ------------------------------------------------------------------------------------------------------
def _sampling(device: torch.device) -> Iterator[Result]:
    utils = importlib.import_module("deepspeed.ops.random_ltd.dropping_utils")
    mask = _numbers(2, 1, 16, 16).to(device)
    for sample, rows in ((utils.gpt_sample_tokens, None), (utils.bert_sample_tokens, 2)):
        indices, kept = sample(5, 16, 2, layers=3, device=device, attn_mask=mask)
        host = indices.cpu().double()
        yield Result(f"the order of the tokens of {sample.__name__}", indices, host.sort(dim=-1).values, 0.0)
        if rows is None:
            yield Result("the mask for GPT", kept, mask[:, :, :5, :5].cpu().double(), 0.0)
            continue
        for layer in range(3):
            chosen = [
                mask[b].cpu()[:, indices[layer, b].cpu().long()][:, :, indices[layer, b].cpu().long()] for b in (0, 1)
            ]
            yield Result("a mask for BERT", kept[layer], torch.stack(chosen).double(), 0.0)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _length_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous()


def _tokens(device: torch.device) -> Iterator[Result]:
    utils = importlib.import_module("deepspeed.ops.random_ltd.dropping_utils")
    indices = torch.tensor([[1, 4, 5], [0, 2, 6]], dtype=torch.int32)
    rows = indices.long()[:, :, None].expand(-1, -1, 8)
    for batch_first in (True, False):
        everything, part = _numbers(2, 7, 8), _numbers(2, 3, 8, seed=1)
        turn = _same if batch_first else _length_first
        all_, some = (turn(t).clone().to(device).requires_grad_() for t in (everything, part))
        _, gathered = utils.GatherTokens.apply(all_, indices.to(device), batch_first)
        yield Result("gathered tokens", gathered.detach(), turn(everything.gather(1, rows)).double(), 0.0)
        scattered = utils.ScatterTokens.apply(all_, some, indices.to(device), batch_first)
        yield Result("scattered tokens", scattered.detach(), turn(everything.scatter(1, rows, part)).double(), 0.0)
        cotangent = _numbers(2, 7, 8, seed=2)
        torch.autograd.backward(scattered, turn(cotangent).to(device))
        yield Result(
            "the gradient of the scattered part", _gradient(some), turn(cotangent.gather(1, rows)).double(), 0.0
        )


# ---- quantizer -------------------------------------------------------------------------------------------------------
def _quantizer(device: torch.device) -> Iterator[Result]:
    """ZeRO++: 8 bits, symmetric; what is stored is the width of a step."""
    quantizer = importlib.import_module("deepspeed.runtime.zero.partition_parameters").CUDAQuantizer()
    x = _numbers(64, 64).half()
    codes, widths = quantizer.quantize(x.to(device), groups=16)
    groups = x.double().view(16, -1)
    width = 2 * groups.abs().amax(dim=1, keepdim=True) / 256
    wanted = (groups / width).round().clamp(-128, 127)
    yield Result("the width of a step", widths.reshape(-1), width.reshape(-1), 1e-6)
    yield Result("the codes", codes.reshape(16, -1), wanted, 1.0)  # a tie can fall to either side of half a step
    restored = quantizer.dequantize(codes, widths).reshape(16, -1)
    yield Result("what comes back", restored, codes.cpu().double().reshape(16, -1) * width, 2e-3)


def _fp_quantizer(device: torch.device) -> Iterator[Result]:
    """Groups of 128, of 8, 12 and 6 bits; all of them, and two of four by their index."""
    config = importlib.import_module("deepspeed.linear").QuantizationConfig(group_size=128)
    quantizer = importlib.import_module("deepspeed.ops.fp_quantizer").FP_Quantize(quantization_config=config)
    x = _numbers(4, 1, 256).bfloat16()
    chosen = torch.tensor([3, 1], dtype=torch.int32)
    for bits, error in ((8, 0.15), (12, 0.02), (6, 0.3)):
        stored = quantizer.quantize(x.to(device), q_bits=bits)
        restored = quantizer.dequantize(stored, q_bits=bits)
        yield Result(f"values of {bits} bits", restored, x.double(), error)
        parts = quantizer.selective_dequantize(stored, chosen.to(device), q_bits=bits)
        yield Result(f"two of four, of {bits} bits", parts, restored.cpu().double()[[3, 1]], 0.0)
    levels, _ = quantizer.quantize(x.to(device), q_bits=8, return_meta_tensor=True)
    exponents = (levels.cpu().reshape(-1, 128).int() >> 3) & 15
    scales = quantizer.get_scales()
    expected = x.double().abs().reshape(-1, 128).amax(dim=1, keepdim=True) / 480
    yield Result("scales", scales, expected, 1e-6)
    yield Result("the largest exponent", exponents.amax(dim=1), torch.full((8,), 15.0).double(), 0.0)


def _evoformer(device: torch.device) -> Iterator[Result]:
    """With both biases, with one, and without; queries, keys and values of 16 bits."""
    attend = importlib.import_module("deepspeed.ops.deepspeed4science").DS4Sci_EvoformerAttention
    batch, rows, tokens, heads, size = 2, 3, 20, 2, 16
    shapes = ((batch, rows, 1, 1, tokens), (batch, 1, heads, tokens, tokens))
    names = ("queries", "keys", "values", "the bias of rows", "the bias of pairs")
    for chosen in ((), (0,), (0, 1)):
        made = [_numbers(batch, rows, tokens, heads, size, seed=seed).half() for seed in range(3)]
        made += [_numbers(*shapes[i], seed=3 + i).half() for i in chosen]
        ours = [x.clone().to(device).requires_grad_() for x in made]
        exact = [x.double().requires_grad_() for x in made]
        q, k, v = (x.transpose(-2, -3) for x in exact[:3])
        scores = q @ k.transpose(-1, -2) / math.sqrt(size)
        for bias in exact[3:]:
            scores = scores + bias
        expected = (torch.softmax(scores, dim=-1) @ v).transpose(-2, -3)
        result = attend(*ours[:3], ours[3:])
        yield Result(f"attention with {len(chosen)} biases", result.detach(), expected.detach(), 5e-3)
        cotangent = _numbers(*expected.shape, seed=5)
        torch.autograd.backward(result, cotangent.half().to(device))
        torch.autograd.backward(expected, cotangent.half().double())
        for name, x, y in zip(names, ours, exact, strict=False):
            yield Result(f"the gradient of {name}, {len(chosen)} biases", _gradient(x), _gradient(y), 2e-2)


def _dequantizer(bits: int, device: torch.device) -> Iterator[Result]:
    """Weight-only quantization for inference: asymmetric, by groups of the last dimension."""
    utils = importlib.import_module("deepspeed.inference.quantization.utils")
    config = {"num_bits": bits, "group_size": 16, "group_dim": 1, "symmetric": False}
    x = _numbers(8, 64).half()
    codes, scale, low = utils.Quantizer(config).quantize(x.to(device))
    restored = utils.DeQuantizer(config, torch.float16).dequantize(codes, scale, low)
    groups = x.double().view(8, 4, 16)
    width = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / (2**bits - 1)
    error = (restored.cpu().double().view(8, 4, 16) - groups).abs() / width
    yield Result("the error in steps", error, torch.zeros_like(error), 0.75)  # half a step, and float16's roundings


# ---- spatial ---------------------------------------------------------------------------------------------------------
def _spatial(device: torch.device) -> Iterator[Result]:
    function = importlib.import_module("deepspeed.ops.transformer.inference.bias_add").nhwc_bias_add
    x, other = (_numbers(2, 8, 5, 3, seed=s).half().to(memory_format=torch.channels_last) for s in (0, 1))
    bias, other_bias = (_numbers(8, seed=s).half() for s in (2, 3))
    for given in ((x, bias), (x, bias, other), (x, bias, other, other_bias)):
        wanted = sum((t.double().view(1, -1, 1, 1) if t.dim() == 1 else t.double()) for t in given)
        assert isinstance(wanted, Tensor)
        yield Result(f"nhwc_bias_add of {len(given)} tensors", function(*(t.to(device) for t in given)), wanted, 1e-2)


# ---- utils -----------------------------------------------------------------------------------------------------------
def _bytes(device: torch.device) -> Iterator[Result]:
    module: Any = importlib.import_module("deepspeed.ops.op_builder").UtilsBuilder().load()
    x = _numbers(5)
    seen = module.cast_to_byte_tensor(x)
    yield Result("a tensor's bytes", seen, x.view(torch.uint8).double(), 0.0)
    x[2] = 7.0
    yield Result("its bytes after it was written", seen, x.view(torch.uint8).double(), 0.0)


TRAINING = (
    FrontEnd("FusedLamb", "FusedLambBuilder", _lamb),
    FrontEnd("DeepSpeedTransformerLayer.pre_layer_norm", "TransformerBuilder", functools.partial(_layer, True, False)),
    FrontEnd(
        "DeepSpeedTransformerLayer.post_layer_norm", "TransformerBuilder", functools.partial(_layer, False, False)
    ),
    FrontEnd("DeepSpeedTransformerLayer.fp16", "TransformerBuilder", _half_layer),
    FrontEnd(
        "DeepSpeedTransformerLayer.stochastic_mode",
        "StochasticTransformerBuilder",
        functools.partial(_layer, True, True),
    ),
    FrontEnd("sample_tokens", "RandomLTDBuilder", _sampling),
    FrontEnd("GatherTokens.ScatterTokens", "RandomLTDBuilder", _tokens),
    FrontEnd("CUDAQuantizer", "QuantizerBuilder", _quantizer),
    FrontEnd("DS4Sci_EvoformerAttention", "EvoformerAttnBuilder", _evoformer),
    FrontEnd("FP_Quantize", "FPQuantizerBuilder", _fp_quantizer),
    FrontEnd("DeQuantizer.8bit", "QuantizerBuilder", functools.partial(_dequantizer, 8)),
    FrontEnd("DeQuantizer.4bit", "QuantizerBuilder", functools.partial(_dequantizer, 4)),
    FrontEnd("nhwc_bias_add", "SpatialInferenceBuilder", _spatial),
    FrontEnd("cast_to_byte_tensor", "UtilsBuilder", _bytes),
)
