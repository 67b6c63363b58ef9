"""Layers that came in 4 bits, as GPTQ, AWQ and torchao lay them out: what is taken over, and what is left alone."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from int4_layers import AwqLinear, Drawn, GptqLinear, Int4Linear, RepackingLinear, levels_of, put_into
from torch import Tensor, nn

from counted_calls import CountedCalls

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    import transformers

from ds_plugin_sdk.integrations.transformers import accelerate
from ds_plugin_sdk.integrations.transformers.int4 import matrix_of
from ds_plugin_sdk.integrations.transformers.int4_layouts import read_awq, read_gptq, read_torchao
from ds_plugin_sdk.integrations.transformers.understood import NotUnderstoodError
from ds_plugin_sdk.ops.linear import dequantize_weight

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]

_SIZES = {"vocab_size": 96, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES, intermediate_size=256, num_key_value_heads=2),
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES, intermediate_size=256, num_key_value_heads=2),
    "opt": lambda: transformers.OPTConfig(**_SIZES, ffn_dim=256, word_embed_proj_dim=128),
}
# What inputs in 16 bits may move logits by.
CLOSE = {"rtol": 1e-3, "atol": 1e-3}
MAKERS: dict[str, Callable[..., nn.Module]] = {
    "gptq, format 1": GptqLinear,
    "gptq, format 2": functools.partial(GptqLinear, format=2),
    "awq": AwqLinear,
}


def make(name: str, maker: str, dtype: torch.dtype = torch.float32, group: int = 64, symmetric: bool = False) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    for parameter in model.parameters():  # biases are zero at first
        if not parameter.any():
            nn.init.normal_(parameter)
    model = model.to(dtype)
    put_into(model, functools.partial(MAKERS[maker], dtype=dtype), group, symmetric)
    model.generation_config.eos_token_id = None
    return model


@torch.no_grad()
def logits(model: Any, count: int = 9) -> Tensor:
    tokens = torch.randint(3, 96, (2, count), generator=torch.Generator().manual_seed(1))
    result: Tensor = model(tokens).logits
    return result


def generate(model: Any) -> Any:
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)


# ---------------------------------------------------------------------- layouts
@pytest.mark.parametrize("group", [64, 128, 256])
def test_layouts_are_read(group: int) -> None:
    """The levels, scales and zero points that were put in, exactly; format 1 of GPTQ is the second that is found."""
    drawn = Drawn(256, 40, group, seed=group)
    drawn.zeros[0, :2] = torch.tensor([0, 15])
    first, second = (GptqLinear(drawn, format=number) for number in (1, 2))
    awq = AwqLinear(drawn)
    qdata, scale, zero = (drawn.levels - 8).t().to(torch.int8), drawn.scales.t(), (drawn.zeros - 8).t().to(torch.int8)
    found = {
        "format 1": read_gptq(first.qweight, first.qzeros, first.scales)[1],
        "format 2": read_gptq(second.qweight, second.qzeros, second.scales)[0],
        "awq": read_awq(awq.qweight, awq.qzeros, awq.scales)[0],
        "torchao": read_torchao(qdata, scale, zero)[0],
    }
    for name, weights in found.items():
        assert torch.equal(weights.dequantized(), drawn.weight()), name


def test_format_1_of_gptq_has_sixteen_too() -> None:
    """15 stands for 16 where nothing wraps."""
    drawn = Drawn(64, 8, 64)
    drawn.zeros[:] = 16
    layer = GptqLinear(drawn)
    assert torch.equal(read_gptq(layer.qweight, layer.qzeros, layer.scales)[2].dequantized(), drawn.weight())


def test_the_default_device_is_not_that_of_a_layer() -> None:
    """As of who makes new tensors on a GPU; the layer's own code could not be called on the meta device."""
    model = make("llama", "gptq, format 1")
    expected = logits(model)
    with torch.device("meta"):
        handle = accelerate(model)
    assert "GptqLinear: it could not be called: Tensor on device meta" in str(handle)
    torch.testing.assert_close(logits(model), expected, **CLOSE)
    handle.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_matrix_is_what_the_layers_stand_for(maker: str, symmetric: bool, dtype: torch.dtype) -> None:
    """Of two layers in one, of which one has a bias: the definition in float64, but for float32's rounding."""
    drawn = [Drawn(256, rows, 128, symmetric=symmetric, seed=rows) for rows in (24, 40)]
    bias = torch.randn(24)
    layers = MAKERS[maker](drawn[0], bias, dtype=dtype), MAKERS[maker](drawn[1], dtype=dtype)
    matrix = matrix_of(*layers, dtype=dtype)
    weight, joined, scales, offsets = matrix.contents
    assert weight.dtype == torch.uint8
    assert scales is not None
    assert (offsets is None) == symmetric
    # The scales are those of the dtype.
    for each in drawn:
        each.scales = each.scales.to(dtype).float()
    exact = torch.cat([each.weight() for each in drawn])
    wide = None if offsets is None else offsets.double()
    actual = dequantize_weight(weight, scales.double(), torch.float64, offsets=wide)
    torch.testing.assert_close(actual, exact, rtol=0, atol=2**-23 * 16 / 32)
    assert joined is not None
    assert torch.equal(joined, torch.cat([bias.to(dtype), torch.zeros(40, dtype=dtype)]))
    assert matrix.rows == [24, 40]
    assert matrix.dtype == dtype


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [32, 96])
def test_groups_that_are_no_blocks_are_kept_in_8_bits(maker: str, symmetric: bool, group: int) -> None:
    drawn = Drawn(192, 40, group, symmetric=symmetric)
    weight, _, scales, offsets = matrix_of(MAKERS[maker](drawn), dtype=torch.float32).contents
    assert weight.dtype == torch.int8
    assert scales is not None
    assert offsets is None
    assert torch.equal(dequantize_weight(weight, scales.double(), torch.float64), drawn.weight())


class Wrapping(GptqLinear):
    """15 in format 1 is 0, as in gptqmodel; 16 elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        zeros = (levels_of(self.qzeros, 1) + 1) & 15
        of = self.g_idx.long()
        return x @ (self.scales[of] * (levels_of(self.qweight, 0) - zeros[of]))


@pytest.mark.parametrize(("kind", "zero"), [(GptqLinear, 16), (Wrapping, 0)])
def test_the_layer_says_what_the_last_zero_point_is(kind: type[GptqLinear], zero: int) -> None:
    """One of 160 zero points, 15 in its word, is 0 or 16."""
    drawn = Drawn(256, 40, 64)
    drawn.zeros[2, 7] = zero
    layer = kind(drawn)
    assert int(levels_of(layer.qzeros, 1)[2, 7]) == 15
    matrix = matrix_of(layer, dtype=torch.float32)
    assert matrix.contents.offsets is not None
    assert torch.equal(matrix.contents.offsets, (drawn.scales * (8 - drawn.zeros)).t())


# ---------------------------------------------------------------------- models
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("group", [32, 64])
def test_models_of_others_run_whole(name: str, maker: str, group: int) -> None:
    model = make(name, maker, group=group)
    expected, plain = logits(model), generate(model)
    with accelerate(model) as handle, CountedCalls() as counted:
        assert len(handle.layers) == 2, str(handle)
        torch.testing.assert_close(logits(model), expected, **CLOSE)
        assert torch.equal(generate(model), plain)
    assert counted.calls["decoder_layer"] == 2 * 13
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("symmetric", [False, True])
def test_in_sixteen_bits(dtype: torch.dtype, symmetric: bool) -> None:
    """No further from float32 than the layers' own code, for a prompt and for many inputs."""
    model = make("llama", "gptq, format 1", dtype, symmetric=symmetric)
    exact = make("llama", "gptq, format 1", dtype, symmetric=symmetric).float()
    for count in (9, 80):
        reference, plain = logits(exact, count), logits(model, count).float()
        with accelerate(model) as handle:
            assert len(handle.layers) == 2, str(handle)
            ours = logits(model, count).float()
        assert float((ours - reference).abs().mean()) <= 1.2 * float((plain - reference).abs().mean()) + 1e-3


def test_a_layer_alone() -> None:
    model = make("llama", "awq")
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: None)
    expected = logits(model)
    with accelerate(model) as handle:
        assert handle.layers == ["model.layers.1"]
        assert len([name for name in handle.linear if name.startswith("model.layers.0")]) == 6
        assert "hooks" in handle.left["model.layers.0.mlp.down_proj"]
        torch.testing.assert_close(logits(model), expected, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [GptqLinear, AwqLinear, RepackingLinear])
def test_scales_of_another_dtype_than_the_model(kind: type[Int4Linear], dtype: torch.dtype) -> None:
    """Checkpoints keep scales and biases in float16; the model's dtype is that of the inputs, and decides."""
    model = make("qwen2", "awq", dtype)
    put_into(model, functools.partial(kind, dtype=torch.float16), 64)
    before = {name: buffer for name, buffer in model.named_buffers() if "layers" in name}
    if dtype == torch.float32 and kind is not RepackingLinear:
        with accelerate(model) as handle:  # their products of scales and levels are rounded to float16
            assert handle.layers == []
            assert "does not compute" in handle.left["model.layers.0.self_attn.q_proj"]
        return
    with accelerate(model) as handle, CountedCalls() as counted:
        assert len(handle.layers) == 2, str(handle)
        ours = logits(model).float()
        # Only copies were tried: the layers still serve whatever dtype they may be called with first.
        now = dict(model.named_buffers())
        assert all(now[name] is buffer and buffer.dtype != torch.uint8 for name, buffer in before.items())
    assert counted.calls["decoder_layer"] == 2
    bound = 1e-3 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(ours, logits(model).float(), rtol=bound, atol=bound)


def test_layers_that_were_called_before_are_left_alone() -> None:
    """If that laid out their tensors anew; what to do is said."""
    model = make("llama", "awq")
    put_into(model, RepackingLinear, 64)
    expected = logits(model)
    with accelerate(model) as handle:
        assert handle.layers == []
        assert "accelerate the model before that" in handle.left["model.layers.0.self_attn.q_proj"]
        torch.testing.assert_close(logits(model), expected, **CLOSE)


# ---------------------------------------------------------------------- left alone
class Rounding(GptqLinear):
    """As layers that quantize their inputs to 8 bits, each row with its own scale."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return super().forward((x / scale).round() * scale)


class WithMore(GptqLinear):
    """As layers with an adapter."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.02 * x.mean(-1, keepdim=True)


class OfOnePlace(GptqLinear):
    """Computes what its tensors say, but for one zero point."""

    def forward(self, x: Tensor) -> Tensor:
        self.qzeros[1, 2] += 16
        result = super().forward(x)
        self.qzeros[1, 2] -= 16
        return result


class Failing(GptqLinear):
    def forward(self, x: Tensor) -> Tensor:
        raise ImportError("no kernels for this machine")


class WithMask(GptqLinear):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x) * mask


def _drawn(**options: Any) -> Drawn:
    return Drawn(256, 40, **{"group": 64, **options})


def _with(name: str, change: Callable[[Tensor], Tensor], layer: nn.Module | None = None) -> nn.Module:
    layer = GptqLinear(_drawn()) if layer is None else layer
    layer._buffers[name] = change(layer._buffers[name])  # type: ignore[arg-type]  # a buffer may be None, this one is not
    return layer


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "groups of several sizes": (
        lambda: GptqLinear(_drawn(), order=torch.randint(0, 4, (256,), generator=torch.Generator().manual_seed(0))),
        "desc_act",
    ),
    "no groups": (lambda: GptqLinear(_drawn(), order=(torch.arange(256) // 64) % 3), "desc_act"),
    "small groups": (lambda: GptqLinear(_drawn(group=16)), "multiples of 32"),
    "inputs in 8 bits": (lambda: Rounding(_drawn()), "does not compute"),
    "inputs in 8 bits, bfloat16": (lambda: Rounding(_drawn(), dtype=torch.bfloat16), "does not compute"),
    "adapter": (lambda: WithMore(_drawn()), "does not compute"),
    "a zero point": (lambda: OfOnePlace(_drawn(), dtype=torch.bfloat16), "does not compute"),
    "another order in words": (lambda: AwqLinear(_drawn(), order=tuple(range(8))), "does not compute"),
    "no kernels": (lambda: Failing(_drawn()), "no kernels for this machine"),
    "another argument": (lambda: WithMask(_drawn()), "could not be called"),
    "shapes": (lambda: _with("qweight", lambda words: words[:, :32]), "no layout"),
    "8 bits": (lambda: _with("qzeros", lambda words: words.repeat(1, 2)), "no layout"),
    "dtypes": (lambda: _with("qweight", lambda words: words.to(torch.int64)), "int32"),
    "bias": (lambda: _with("bias", lambda bias: bias.double(), GptqLinear(_drawn(), torch.ones(40))), "bias"),
    "float64": (lambda: GptqLinear(_drawn()).double(), "float64"),
    "meta": (lambda: GptqLinear(_drawn()).to("meta"), "no plain tensor"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_not_known_for_certain_is_left_alone(case: str) -> None:
    layer: Any = LEFT[case][0]()
    why = LEFT[case][1]
    with pytest.raises(NotUnderstoodError, match=why):
        matrix_of(layer, dtype=layer.scales.dtype)


def test_layers_that_do_not_fit_together_are_no_matrix() -> None:
    with pytest.raises(NotUnderstoodError, match="several sizes"):
        matrix_of(GptqLinear(_drawn()), GptqLinear(_drawn(group=128)), dtype=torch.float32)
    with pytest.raises(NotUnderstoodError, match="is none"):
        matrix_of(GptqLinear(_drawn()), nn.Linear(256, 40), dtype=torch.float32)


# ---------------------------------------------------------------------- inputs in another order
def shuffled(columns: int, group: int, seed: int) -> Tensor:
    """The group of each input, as GPTQ with desc_act has them."""
    return (torch.arange(columns) // group)[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]


def with_orders(model: Any, seed_of: Callable[[str], int]) -> Any:
    """All layers in 4 bits have inputs in an order, which layers of the same seed share."""
    for name, layer in model.named_modules():
        if isinstance(layer, GptqLinear):
            group = layer.in_features // layer.scales.shape[0]
            layer.g_idx = shuffled(layer.in_features, group, seed_of(name)).to(torch.int32)
    return model


# Layers with the same input.
_INPUTS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 1, "up_proj": 1, "fc1": 1}


def _input_of(name: str) -> int:
    return _INPUTS.get(name.rpartition(".")[2], 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_inputs_in_another_order(name: str, dtype: torch.dtype) -> None:
    """desc_act: whole layers, whose inputs are gathered."""
    model = with_orders(make(name, "gptq, format 1", dtype), _input_of)
    exact = with_orders(make(name, "gptq, format 1", dtype), _input_of).float()
    reference, expected, plain = logits(exact), logits(model), generate(model)
    with accelerate(model) as handle, CountedCalls() as counted:
        assert len(handle.layers) == 2, str(handle)
        ours = logits(model)
        if dtype == torch.float32:
            torch.testing.assert_close(ours, expected, **CLOSE)
            assert torch.equal(generate(model), plain)
    assert counted.calls["linear"] >= 2 * 4
    error = (ours.float() - reference).abs().mean()
    assert error <= 1.2 * (expected.float() - reference).abs().mean() + 1e-3


def test_orders_that_differ_make_no_matrix() -> None:
    """Queries, keys and values have one input each then: layers run alone."""
    seeds = itertools.count()
    model = with_orders(make("llama", "gptq, format 1"), lambda _: next(seeds))
    expected = logits(model)
    with accelerate(model) as handle:
        assert handle.layers == []
        assert len([name for name in handle.linear if "layers" in name]) == 14
        assert "several orders" in handle.left["model.layers.0"]
        torch.testing.assert_close(logits(model), expected, **CLOSE)


@pytest.mark.parametrize("columns", [100, 300])
def test_inputs_of_another_size_are_an_error(columns: int) -> None:
    """Gathered, more inputs than the layer has could seem to fit."""
    seeds = itertools.count()
    model = with_orders(make("llama", "gptq, format 1"), lambda _: next(seeds))
    with accelerate(model) as handle, torch.no_grad():
        layer = model.model.layers[0].mlp.up_proj
        assert "model.layers.0.mlp.up_proj" in handle.linear
        with pytest.raises(RuntimeError):
            layer(torch.randn(2, columns))


def test_an_order_that_changes_is_a_change() -> None:
    model = with_orders(make("llama", "gptq, format 1"), _input_of)
    with accelerate(model) as handle:
        logits(model)
        layer = model.model.layers[0].mlp.down_proj
        layer.g_idx.copy_(shuffled(layer.in_features, 64, 99))
        ours = logits(model)
        assert handle.layers == ["model.layers.1"]
    torch.testing.assert_close(ours, logits(model), **CLOSE)


# ---------------------------------------------------------------------- later
def change_in_place(layer: Any) -> None:
    layer.scales.mul_(2)


def change_through_data(layer: Any) -> None:
    layer.scales.data *= 2


def assign(layer: Any) -> None:
    layer.qzeros = layer.qzeros + 0x1111


def load(layer: Any) -> None:
    layer.load_state_dict({**layer.state_dict(), "scales": 2 * layer.scales})


def add_hook(layer: Any) -> None:
    layer.register_forward_hook(lambda _, __, output: 2 * output)


CHANGES = [change_in_place, change_through_data, assign, load, add_hook]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("maker", ["gptq, format 2", "awq"])
def test_what_is_changed_later_counts(maker: str, change: Callable[[Any], None]) -> None:
    model, plain = make("llama", maker), make("llama", maker)
    with accelerate(model):
        before = logits(model)
        for each in (model, plain):
            change(each.model.layers[1].mlp.up_proj)
        ours = logits(model)
        assert not torch.allclose(ours, before, atol=1e-2)
        torch.testing.assert_close(ours, logits(plain), **CLOSE)


def test_a_copy_is_a_plain_model() -> None:
    model = make("llama", "awq")
    with accelerate(model):
        other = copy.deepcopy(model)
        expected = logits(model)
    with CountedCalls() as counted:
        torch.testing.assert_close(logits(other), expected, **CLOSE)
    assert counted.calls["decoder_layer"] == counted.calls["linear"] == 0


# ---------------------------------------------------------------------- torchao
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torchao uses what torch calls deprecated
@pytest.mark.parametrize("mapping", ["SYMMETRIC", "ASYMMETRIC"])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_torchao(dtype: torch.dtype, group: int, mapping: str) -> None:
    quantization = pytest.importorskip(
        "torchao.quantization", reason="torchao comes with the extra `test` on x86-64, where it has wheels"
    )
    primitives = importlib.import_module("torchao.quantization.quant_primitives")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["qwen2"]()).eval().to(dtype)
    config = quantization.IntxWeightOnlyConfig(
        torch.int4, quantization.PerGroup(group), mapping_type=primitives.MappingType[mapping]
    )
    quantization.quantize_(model.model, config)
    expected = logits(model)
    with accelerate(model) as handle, CountedCalls() as counted:
        assert len(handle.layers) == 2, str(handle)
        ours = logits(model)
        replacement: Any = handle._found.replacements["model.layers.0"]
        contents = replacement.layer.qkv.contents
    assert counted.calls["decoder_layer"] == 2
    assert contents.weight.dtype == (torch.uint8 if group == 64 else torch.int8)
    assert (contents.offsets is None) == (mapping == "SYMMETRIC" or group == 32)
    bound = 1e-3 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, expected, rtol=bound, atol=bound)
    assert torch.equal(logits(model), expected)
