"""The functions DeepSpeed calls on our ops: called directly, and by DeepSpeed's own unmodified front ends."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepspeed_support import Python

from ds_plugin_sdk import op_builder
from ds_plugin_sdk.errors import InvalidTensorError, OpError, SdkError
from ds_plugin_sdk.integrations.deepspeed.modules import (
    async_io,
    cpu_adagrad,
    cpu_adam,
    cpu_lion,
    fused_adam,
    fused_lion,
)
from ds_plugin_sdk.op_builder import op_table

# DeepSpeed's functions and their number of positional arguments; what it calls on Linux.
FUNCTIONS = {
    "cpu_adam": {
        "create_adam": 8,
        "destroy_adam": 1,
        "adam_update": 12,
        "adam_rollback": 12,
        "zenflow_adam_create": 2,
        "zenflow_adam_register_group": 9,
        "zenflow_adam_destroy": 1,
        "zenflow_adam_ctrl_size": 0,
        "zenflow_adam_ctrl_init": 2,
        "zenflow_adam_run_worker": 2,
        "zenflow_adam_submit": 9,
        "zenflow_adam_wait": 2,
        "zenflow_adam_ctrl_exit": 1,
    },
    "fused_adam": {"multi_tensor_adam": 11, "multi_tensor_adam_mixed_precision": 12},
    "cpu_adagrad": {"create_adagrad": 5, "destroy_adagrad": 1, "adagrad_update": 8},
    "cpu_lion": {"create_lion": 6, "destroy_lion": 1, "lion_update": 9},
    "fused_lion": {"multi_tensor_lion": 8},
    "fused_lamb": {"lamb": 16},
    "fp_quantizer": {"quantize": 6, "dequantize": 5, "selective_dequantize": 6, "get_scales": 2},
    "async_io": {"aio_handle": 5, "aio_read": 7, "aio_write": 7, "deepspeed_memcpy": 2},
    "pin_memory": {"pin_handle": 0},
    "evoformer_attn": {"attention": 7, "attention_bwd": 14},
    "random_ltd": {
        "token_sort_": 2,
        "token_gather": 3,
        "token_scatter_": 4,
        "mask_gather_bert": 2,
        "mask_gather_gpt": 2,
    },
    "spatial_inference": {"nhwc_bias_add": 2, "nhwc_bias_add_add": 3, "nhwc_bias_add_bias_add": 4},
    "utils": {"cast_to_byte_tensor": 1, "flatten": 1, "unflatten": 2},
    "quantizer": {
        "quantize": 4,
        "dequantize": 5,
        "dequantize_fp32": 5,
        "swizzle_quant": 7,
        "quantized_reduction": 7,
        "dequantize_int4_to_half_experimental": 5,
        "dequantize_int8_to_half_experimental": 5,
        **{
            f"ds_{sr}quantize_{asym}{dtype}": 3
            for sr in ("", "sr_")
            for asym in ("", "asym_")
            for dtype in ("fp32", "fp16")
        },
    },
    **{
        name: {
            f"{function}_{dtype}": positionals
            for function, positionals in (("create_transformer_layer", 15), ("forward", 20), ("backward", 33))
            for dtype in ("fp32", "fp16")
        }
        for name in ("transformer", "stochastic_transformer")
    },
    "inference_core_ops": {
        "create_handle": 0,
        "blas_linear": 3,
        "layer_norm": 5,
        "pre_layer_norm": 7,
        "post_layer_norm": 6,
        "rms_norm": 4,
        "rms_pre_norm": 6,
        "bias_activation": 3,
        "gated_activation": 4,
    },
    "transformer_inference": {
        **{
            f"{function}_{dtype}": positionals
            for function, positionals in {
                "softmax": 11,
                "softmax_context": 19,
                "bias_gelu": 2,
                "bias_relu": 2,
                "bias_add": 2,
                "bias_residual": 3,
                "qkv_gemm": 10,
                "rms_qkv_gemm": 7,
                "mlp_gemm": 16,
                "rms_mlp_gemm": 11,
                "vector_matmul": 6,
                "linear_layer": 8,
                "fused_gemm_gelu": 8,
                "residual_add_bias": 9,
                "einsum_sec_sm_ecm": 2,
                "pad_transform": 5,
                "add_padding": 3,
                "allocate_workspace": 10,
                "repeat_kv_cache": 2,
                "dequantize": 3,
                "layer_norm": 4,
            }.items()
            for dtype in ("fp32", "fp16", "bf16")
        },
        "softmax_context_int8": 19,
        "vector_matmul_int8": 6,
        "fused_gemm_gelu_int8": 8,
        "gated_activation": 3,
        "layer_norm": 4,
        "_layer_norm_residual": 6,
        "layer_norm_residual_store_pre_ln_res": 6,
        "rms_norm": 3,
        "pre_rms_norm": 4,
        "_vector_add": 3,
        "apply_rotary_pos_emb": 7,
        "moe_res_matmul": 3,
        "reset_cache": 0,
        "release_workspace": 0,
        "retake_workspace": 0,
    },
}

LR, BETAS, EPS, DECAY = 0.01, (0.9, 0.95), 1e-6, 0.1
NOOP = torch.zeros(1, dtype=torch.int32)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_module_has_deepspeeds_functions(name: str) -> None:
    module = op_builder.functions_of(name)
    for function, positionals in FUNCTIONS[name].items():
        inspect.signature(getattr(module, function)).bind(*range(positionals))


def test_every_op_that_deepspeed_asks_for_has_a_module() -> None:
    assert {op.name for op in op_table.OPS if op.functions} == set(FUNCTIONS)


def tensors(count: int, layout: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Random float32 tensors of shape (5, 3) in a layout; second moments come out positive."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(3, 5, generator=generator) for _ in range(count)]
    return [layout(tensor) for tensor in (*made[:3], *(tensor.abs() for tensor in made[3:]))]


LAYOUTS = {
    "contiguous": lambda tensor: tensor.t().contiguous(),
    "transposed": lambda tensor: tensor.t(),
    "sliced": lambda tensor: torch.stack([tensor.t(), tensor.t()], dim=2)[:, :, 1],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("adamw", [True, False])
def test_adam_agrees_with_the_formula(layout: Callable[[torch.Tensor], torch.Tensor], adamw: bool) -> None:
    p, g, m, v = tensors(4, layout)
    p0, g0, m0, v0 = (tensor.double() for tensor in (p, g, m, v))
    step, (b1, b2) = 7, BETAS
    grad = g0 if adamw else g0 + DECAY * p0
    m1, v1 = b1 * m0 + (1 - b1) * grad, b2 * v0 + (1 - b2) * grad**2
    p1 = p0 - LR * DECAY * p0 * adamw - LR * (m1 / (1 - b1**step)) / ((v1 / (1 - b2**step)).sqrt() + EPS)

    twin = [tensor.clone() for tensor in (g, p, m, v)]
    cpu_adam.create_adam(3, LR, *BETAS, EPS, DECAY, adamw, False)
    assert cpu_adam.adam_update(3, step, LR, *BETAS, EPS, DECAY, True, p, g, m, v) == 0
    fused_adam.multi_tensor_adam(65536, NOOP, [[each] for each in twin], LR, *BETAS, EPS, step, int(adamw), 1, DECAY)
    for got, fused, expected in ((p, twin[1], p1), (m, twin[2], m1), (v, twin[3], v1)):
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(fused, got, rtol=0, atol=0)
    assert torch.equal(g.double(), g0) and torch.equal(twin[0].double(), g0)

    if adamw:
        assert cpu_adam.adam_rollback(3, step, LR, *BETAS, EPS, DECAY, True, p, g, m, v) == 0
        for got, expected in ((p, p0), (m, m0), (v, v0)):
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    assert cpu_adam.destroy_adam(3) == 0


@pytest.mark.parametrize("size", [1003, fused_adam._AT_ONCE + 3], ids=["one part", "two parts"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_model_of_16_bits_is_stepped_with_its_masters(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    scale, step = 128.0, 3
    master, m, v = torch.nn.Parameter(torch.randn(size)), torch.randn(size), torch.rand(size)
    grad, output = (scale * torch.randn(size)).to(dtype), torch.empty(size, dtype=dtype)
    p, g = master.detach().clone(), grad.float() / scale
    twin = [g, p, m.clone(), v.clone()]
    fused_adam.multi_tensor_adam(65536, NOOP, [[each] for each in twin], LR, *BETAS, EPS, step, 1, 1, DECAY)
    lists = [[grad], [master], [m], [v], [output]]
    fused_adam.multi_tensor_adam_mixed_precision(65536, NOOP, lists, LR, *BETAS, EPS, step, 1, 1, DECAY, scale)
    for got, expected in zip((master, m, v, output), (p, *twin[2:], p.to(dtype)), strict=True):
        assert torch.equal(got, expected)


def _mixed(**replaced: torch.Tensor) -> list[list[torch.Tensor]]:
    half = torch.ones(6, dtype=torch.float16)
    names = ("grad", "param", "exp_avg", "exp_avg_sq", "output")
    made = {name: torch.ones(6) if 0 < i < 4 else half.clone() for i, name in enumerate(names)} | replaced
    return [[made[name]] for name in names]


@pytest.mark.parametrize(
    ("lists", "scale", "message"),
    [
        (_mixed(), 0.0, "grad_scale is 0.0; expected a positive"),
        (_mixed(), float("nan"), "grad_scale is nan"),
        (_mixed()[:4], 1.0, "tensor_lists are 4"),
        ([[] for _ in range(5)], 1.0, "none of them empty"),
        (_mixed(grad=torch.ones(6), output=torch.ones(6)), 1.0, "grads are float32; expected float16 or bfloat16"),
        (_mixed(param=torch.ones(6).half()), 1.0, "params is float16; expected float32"),
        (_mixed(exp_avg_sq=torch.ones(6).half()), 1.0, "exp_avg_sqs is float16; expected float32"),
        (_mixed(output=torch.ones(6).bfloat16()), 1.0, "outputs is bfloat16; expected float16"),
        (_mixed(grad=torch.ones(6, 2).half()[:, 0]), 1.0, r"grads\[0\] is not contiguous"),
        (_mixed(param=torch.ones(2, 3)), 1.0, r"params\[0\] has shape \[2, 3\]; expected \[6\]"),
    ],
)
def test_a_step_with_masters_that_cannot_be_right_is_rejected(
    lists: list[list[torch.Tensor]], scale: float, message: str
) -> None:
    before = [[tensor.clone() for tensor in tensors] for tensors in lists]
    with pytest.raises(InvalidTensorError, match=message.replace("; ", ".*")):
        fused_adam.multi_tensor_adam_mixed_precision(1, NOOP, lists, LR, *BETAS, EPS, 1, 1, 1, DECAY, scale)
    for tensors, copies in zip(lists, before, strict=True):
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=True))


@pytest.mark.parametrize("states", [torch.float32, None], ids=["float32 states", "states of 16 bits"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_step_of_16_bits_is_undone_to_within_its_rounding(dtype: torch.dtype, states: torch.dtype | None) -> None:
    lr = 0.5  # moves parameters by far more than their rounding
    p, g, m, v = tensors(4, torch.t)
    p, g, m, v = p.to(dtype), g.to(dtype), m.to(states or dtype), v.to(states or dtype)
    before, grads = [tensor.clone() for tensor in (p, m, v)], g.clone()
    cpu_adam.create_adam(4, lr, *BETAS, EPS, DECAY, True, False)
    cpu_adam.adam_update(4, 3, lr, *BETAS, EPS, DECAY, True, p, g, m, v)
    assert not any(torch.equal(now, then) for now, then in zip((p, m, v), before, strict=True))
    assert cpu_adam.adam_rollback(4, 3, lr, *BETAS, EPS, DECAY, True, p, g, m, v) == 0
    for now, then in zip((p, m, v), before, strict=True):
        rounding = 2 * torch.finfo(now.dtype).eps  # of the step, and of its inverse
        torch.testing.assert_close(now.double(), then.double(), rtol=rounding, atol=rounding)
    assert torch.equal(g, grads)
    cpu_adam.destroy_adam(4)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_adagrad_agrees_with_the_formula(layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    p, g, _, s = tensors(4, layout)
    p0, g0, s0 = p.double(), g.double(), s.double()
    grad = g0 + DECAY * p0
    s1 = s0 + grad**2
    assert cpu_adagrad.adagrad_update(1, 1, LR, EPS, DECAY, p, g, s) == 0
    torch.testing.assert_close(p.double(), p0 - LR * grad / (s1.sqrt() + EPS), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(s.double(), s1, rtol=1e-6, atol=1e-6)
    assert torch.equal(g.double(), g0)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_lion_agrees_with_the_formula(layout: Callable[[torch.Tensor], torch.Tensor]) -> None:
    p, g, m = tensors(3, layout)
    p0, g0, m0 = p.double(), g.double(), m.double()
    b1, b2 = BETAS
    p1 = p0 - LR * DECAY * p0 - LR * (b1 * m0 + (1 - b1) * g0).sign()
    twin = [tensor.clone() for tensor in (g, p, m)]
    assert cpu_lion.lion_update(1, 1, LR, *BETAS, DECAY, p, g, m) == 0
    fused_lion.multi_tensor_lion(65536, NOOP, [[each] for each in twin], LR, *BETAS, 1, DECAY)
    for got, fused, expected in ((p, twin[1], p1), (m, twin[2], b2 * m0 + (1 - b2) * g0)):
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(fused, got, rtol=0, atol=0)
    assert torch.equal(g.double(), g0)


def test_a_negative_decay_is_none_on_the_cpu() -> None:
    """DeepSpeed's CPU ops apply the decay only if it is positive."""
    cpu_adam.create_adam(5, LR, *BETAS, EPS, 0.0, True, False)
    calls: dict[str, Callable[[float, list[torch.Tensor]], int]] = {
        "adam": lambda decay, t: cpu_adam.adam_update(5, 1, LR, *BETAS, EPS, decay, True, *t),
        "adagrad": lambda decay, t: cpu_adagrad.adagrad_update(5, 1, LR, EPS, decay, t[0], t[1], t[3]),
        "lion": lambda decay, t: cpu_lion.lion_update(5, 1, LR, *BETAS, decay, *t[:3]),
    }
    for name, call in calls.items():
        negative, none = tensors(4, torch.clone), tensors(4, torch.clone)
        call(-1.0, negative)
        call(0.0, none)
        assert torch.equal(negative[0], none[0]), name
    cpu_adam.destroy_adam(5)


def test_what_cannot_be_right_is_rejected() -> None:
    p, g, m, v = tensors(4, torch.clone)
    with pytest.raises(SdkError, match=r"this optimizer does not exist .*create_adam\(77"):
        cpu_adam.adam_update(77, 1, LR, *BETAS, EPS, DECAY, True, p, g, m, v)
    cpu_adam.create_adam(77, LR, *BETAS, EPS, DECAY, True, False)
    before = p.clone()
    with pytest.raises(InvalidTensorError, match="grads"):
        cpu_adam.adam_update(77, 1, LR, *BETAS, EPS, DECAY, True, p, g.bfloat16(), m, v)
    with pytest.raises(InvalidTensorError, match="grads"):
        cpu_adam.adam_rollback(77, 1, LR, *BETAS, EPS, DECAY, True, p, g.bfloat16(), m, v)
    assert torch.equal(p, before)
    cpu_adam.destroy_adam(77)
    assert cpu_adam.destroy_adam(77) == 0


FRONT_ENDS = """
import functools, cpuinfo, torch, deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # a second each, and the front ends ask each time
LR, B1, B2, EPS, WD, STEPS = 0.01, 0.9, 0.95, 1e-6, 0.1, 5

def adam(p, grads, adamw=True):
    m = v = torch.zeros_like(p)
    for t, g in enumerate(grads, 1):
        g = g if adamw else g + WD * p
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        p = p * (1 - LR * WD * adamw) - LR * (m / (1 - B1**t)) / ((v / (1 - B2**t)).sqrt() + EPS)
    return p

def adagrad(p, grads):
    s = torch.zeros_like(p)
    for g in grads:
        g = g + WD * p
        s = s + g * g
        p = p - LR * g / (s.sqrt() + EPS)
    return p

def lion(p, grads):
    m = torch.zeros_like(p)
    for g in grads:
        p = p * (1 - LR * WD) - LR * (B1 * m + (1 - B1) * g).sign()
        m = B2 * m + (1 - B2) * g
    return p

betas = dict(betas=(B1, B2))
CASES = [
    ('DeepSpeedCPUAdam', lambda p: DeepSpeedCPUAdam(p, LR, eps=EPS, weight_decay=WD, **betas), adam),
    ('DeepSpeedCPUAdam L2', lambda p: DeepSpeedCPUAdam(p, LR, eps=EPS, weight_decay=WD, adamw_mode=False, **betas),
     lambda p, g: adam(p, g, False)),
    ('DeepSpeedCPUAdam bf16 states',
     lambda p: DeepSpeedCPUAdam(p, LR, eps=EPS, weight_decay=WD, fp32_optimizer_states=False, **betas), adam),
    ('FusedAdam', lambda p: FusedAdam(p, LR, eps=EPS, weight_decay=WD, **betas), adam),
    ('FusedAdam L2', lambda p: FusedAdam(p, LR, eps=EPS, weight_decay=WD, adam_w_mode=False, **betas),
     lambda p, g: adam(p, g, False)),
    ('DeepSpeedCPUAdagrad', lambda p: DeepSpeedCPUAdagrad(p, LR, eps=EPS, weight_decay=WD), adagrad),
    ('DeepSpeedCPULion', lambda p: DeepSpeedCPULion(p, LR, weight_decay=WD, **betas), lion),
    ('FusedLion', lambda p: FusedLion(p, LR, weight_decay=WD, **betas), lion),
]

# Parameters stay below 0.25, where half a unit in bfloat16's last place is at most 2**-11; each step rounds once.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: STEPS * 2**-11 * 1.5}

for name, make, formula in CASES:
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        # The second parameter is not contiguous. One tensor a FusedAdam step, whose front end counts steps only so.
        for start in (torch.randn(1003) * 0.05, torch.randn(7, 19).t() * 0.05):
            start = start.to(dtype)
            param = torch.nn.Parameter(start.clone(memory_format=torch.preserve_format))
            grads = [torch.randn_like(param).detach() for _ in range(STEPS)]
            optimizer = make([param])
            expected = formula(param.detach().double(), [grad.double() for grad in grads])
            for grad in grads:
                param.grad = grad.clone()
                optimizer.step()
                assert torch.equal(param.grad, grad), (name, dtype, 'gradients were modified')
            errors = (param.detach().double() - expected).abs()
            if name == 'FusedLion' and dtype is torch.bfloat16:
                # The moment has bfloat16's 8 bits here, so a direction that is nearly 0 may get the other sign.
                turned = (errors - 2 * LR).abs() < TOLERANCE[dtype]
                assert turned.double().mean() < 0.01, turned.sum()
                errors[turned] = 0
            error, moved = errors.max().item(), (start.double() - expected).abs().max().item()
            print(f'{name} | {dtype} | {tuple(start.shape)} | {error:.2e} | {moved:.2e}')
            assert error < TOLERANCE[dtype] < moved / 5, (name, dtype, error)

# Sub-group steps and their rollback, as ZeRO-Offload and SuperOffload make them.
param = torch.nn.Parameter(torch.randn(501))
optimizer = DeepSpeedCPUAdam([param], LR, eps=EPS, weight_decay=WD)
param.grad = torch.randn(501)
optimizer.step_subgroup(0)
kept = [tensor.clone() for tensor in (param.detach(), optimizer.state[0]['exp_avg'], optimizer.state[0]['exp_avg_sq'])]
optimizer.step_subgroup(0)
assert optimizer.state[0]['step'] == 2 and not torch.equal(param, kept[0])
optimizer.rollback_subgroup(0)
assert optimizer.state[0]['step'] == 1
for now, before in zip((param.detach(), optimizer.state[0]['exp_avg'], optimizer.state[0]['exp_avg_sq']), kept):
    torch.testing.assert_close(now, before, rtol=1e-5, atol=1e-6)

# A sparse gradient, which DeepSpeedCPUAdagrad takes apart itself.
table = torch.nn.Parameter(torch.randn(10, 4))
rows = table.detach().clone()
table.grad = torch.sparse_coo_tensor([[2, 7]], torch.ones(2, 4), (10, 4)).coalesce()
DeepSpeedCPUAdagrad([table], LR).step()
changed = (table.detach() != rows).any(dim=1).nonzero().flatten().tolist()
assert changed == [2, 7], changed
torch.testing.assert_close(table[2], rows[2] - LR)

from ds_plugin_sdk import provenance
print('origins', sorted({(record.name, record.origin) for record in provenance.records()}))
keep = DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(2))])  # destroyed at the interpreter's exit
"""


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    "origin",
    [pytest.param("compiled", marks=pytest.mark.compiler), "reference"],
)
def test_deepspeeds_front_ends_agree_with_float64(origin: str, python: Python, kernel_cache: Path) -> None:
    """Worst error of 5 steps against the formulas in float64: 1e-6 in float32, rounding to the type in bfloat16."""
    switch = {"compiled": "1", "reference": "0"}[origin]
    # Not compiling leaves the reference only where the cache has nothing: the test's own.
    cache = {"DS_PLUGIN_CACHE_DIR": str(kernel_cache)} if origin == "compiled" else {}
    done = python(FRONT_ENDS, DS_PLUGIN_COMPILE=switch, **cache)
    *_, origins = done.stdout.splitlines()
    found = dict(re.findall(r"\('(\w+)', '(\w+)'\)", origins))
    optimizers = {name for name in FUNCTIONS if name.startswith(("cpu_", "fused_"))} - {"fused_lamb"}  # test_lamb.py
    assert {found.pop(name) for name in optimizers} <= (
        {"compiled", "cache"} if origin == "compiled" else {"reference"}
    )
    quiet = [line for line in done.stderr.splitlines() if "Exception ignored" in line or "Traceback" in line]
    assert not quiet, done.stderr


def test_switches_of_files_may_be_the_texts_that_ds_nvme_tune_prints(native: Callable[..., None]) -> None:
    native("async_io")
    handle = async_io.aio_handle(1 << 20, 4, "false", "True", 2)
    assert (handle.get_single_submit(), handle.get_overlap_events()) == (False, True)
    with pytest.raises(OpError, match=r"overlap_events is 'maybe'; expected true or false"):
        async_io.aio_handle(1 << 20, 4, False, "maybe", 2)


@pytest.mark.deepspeed
def test_ds_report_lists_our_ops(python: Python) -> None:
    done = python("import sys; sys.argv = ['ds_report']\nfrom deepspeed.env_report import cli_main; cli_main()")
    table = dict(re.findall(r"^(\w+) \.+ .*?(\[OKAY\]|\[NO\])(?:\x1b\[0m)?\s*$", done.stdout, re.MULTILINE))
    listed = {op.name for op in op_table.OPS if op.families and (op.kernels or op.host or op.deepspeed)}
    assert set(FUNCTIONS) <= listed
    deepspeeds_own = {"deepspeed_ccl_comm", "deepspeed_shm_comm", "ninja"}
    others = {name: says for name, says in table.items() if name not in listed | deepspeeds_own}
    assert {name: table[name] for name in listed} == dict.fromkeys(listed, "[OKAY]"), done.stdout
    assert others.keys() >= {"ragged_ops", "cutlass_ops"}
    assert set(others.values()) == {"[NO]"}, done.stdout
