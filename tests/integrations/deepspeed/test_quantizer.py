"""ZeRO++ and weight-only quantization: unmodified DeepSpeed on the quantizer's functions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed_support import Python

from ds_plugin_sdk.integrations.deepspeed.modules import quantizer
from ds_plugin_sdk.settings import child_environment
from launchers import free_port


def run_ranks(program: str, cache: Path, *, nodes: int, devices: int) -> list[str]:
    """Run a program on every rank; nodes of a cluster are processes here. Returns what each printed."""
    port, ranks = free_port(), range(nodes * devices)
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program],
            env=child_environment(
                DS_PLUGIN_CACHE_DIR=str(cache),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                WORLD_SIZE=str(nodes * devices),
                RANK=str(rank),
                LOCAL_RANK=str(rank % devices),
                LOCAL_WORLD_SIZE=str(devices),
                LOCAL_SIZE=str(devices),
                OMP_NUM_THREADS="1",
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
    try:
        done = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), "\n".join(out + error for out, error in done)
    return [out for out, _ in done]


# ---- functions -------------------------------------------------------------------------------------------------------
def test_quantize_takes_what_a_gpu_would_misread() -> None:
    """DeepSpeed's CUDA op reads all tensors as float16; here the numbers of a dtype are the numbers."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for quant_type, columns in ((quantizer.Symmetric, ()), (quantizer.Asymmetric, (2,))):
            levels, params = quantizer.quantize(x.to(dtype), 4, 8, quant_type)
            assert levels.shape == x.shape and params.shape == (4, *columns)
            back = quantizer.dequantize(levels, params, 4, 8, quant_type)
            assert back.dtype == torch.float16
            torch.testing.assert_close(back.float(), x, rtol=0.02, atol=0.03)
            exact = quantizer.dequantize_fp32(levels, params, 4, 8, quant_type)
            torch.testing.assert_close(back, exact.half(), rtol=1e-3, atol=1e-5)


def test_params_come_in_any_shape_and_more_than_are_used() -> None:
    levels, params = quantizer.quantize(torch.arange(32.0).view(4, 8), 4, 8, quantizer.Symmetric)
    wanted = quantizer.dequantize(levels, params, 4, 8, quantizer.Symmetric)
    more = torch.cat((params, torch.zeros(3)))
    for form in (params.view(2, 2), params.view(4, 1), more):
        assert torch.equal(quantizer.dequantize(levels, form, 4, 8, quantizer.Symmetric), wanted)


def test_enumeration_is_that_of_the_cuda_op() -> None:
    assert (int(quantizer.Symmetric), int(quantizer.Asymmetric)) == (0, 1)
    assert quantizer.QuantizationType.Asymmetric is quantizer.Asymmetric


@pytest.mark.parametrize("kind", ["", "asym_"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_fake_quantizers_round_in_place(kind: str, dtype: str) -> None:
    """To nearest within half a step, stochastically within one, and reproducibly by torch's seed."""
    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(0)).to(
        torch.float16 if dtype == "fp16" else torch.float32
    )
    span = 2 * x.abs().amax(1, True) if not kind else x.amax(1, True) - x.amin(1, True)
    step = (span.float() + 1e-5) / 256
    nearest = x.clone()
    assert getattr(quantizer, f"ds_quantize_{kind}{dtype}")(nearest, 4, 8) is nearest
    slack = 0.01 if dtype == "fp32" else 0.2  # in steps; float16 rounds the result, too
    assert (((nearest.float() - x.float()).abs() / step).flatten().sort().values[:-4] <= 0.5 + slack).all()

    stochastic = []
    for default in (torch.float32, torch.float32, torch.bfloat16):
        torch.manual_seed(3)
        torch.set_default_dtype(default)
        try:
            stochastic.append(getattr(quantizer, f"ds_sr_quantize_{kind}{dtype}")(x.clone(), 4, 8))
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(each, stochastic[0]) for each in stochastic)
    assert not torch.equal(stochastic[0], nearest)
    assert ((stochastic[0].float() - x.float()).abs() / step <= 1 + slack).all()


# ---- DeepSpeed's front ends ------------------------------------------------------------------------------------------
WEIGHT_ONLY = """
import torch, deepspeed
from deepspeed.inference.quantization.layers import QuantizedLinear
from deepspeed.inference.quantization.utils import DeQuantizer, Quantizer

torch.manual_seed(0)
for bits, unit in ((8, 1 / 255), (4, 1 / 15)):
    config = {'num_bits': bits, 'group_size': 64, 'group_dim': 1, 'symmetric': False}
    weight = torch.randn(32, 256).half()
    stored, scale, minimum = Quantizer(config).quantize(weight)
    kernel = DeQuantizer(config, torch.float16).dequantize(stored, scale, minimum)
    plain = DeQuantizer(config, torch.float32).dequantize(stored, scale.float(), minimum.float())
    assert kernel.shape == weight.shape and kernel.dtype == torch.float16
    # One rounding to float16 away from the formula.
    assert ((kernel.float() - plain).abs() <= 2**-11 * plain.abs() + 2**-14).all()
    span = weight.float().view(32, 4, 64).amax(-1) - weight.float().view(32, 4, 64).amin(-1)
    # Half a step of 1 / 255 or 1 / 15 of a group's span, and what float16 scales lose.
    assert ((kernel - weight).view(32, 4, 64).abs().amax(-1) <= span * (unit * 0.55 + 2**-9)).all()

    linear = torch.nn.Linear(256, 64).half()
    x = torch.randn(4, 256).half()
    exact = linear(x)
    got = QuantizedLinear(config, linear)(x)
    error = ((got - exact).float().norm() / exact.float().norm()).item()
    print(f'weight only, {bits} bits: {error:.4f}')
    assert 0 < error < (0.01 if bits == 8 else 0.15), error
from ds_plugin_sdk import provenance
print([record.origin for record in provenance.records() if record.name == 'quantizer'])
"""


@pytest.mark.deepspeed
@pytest.mark.compiler
def test_weight_only_quantization_runs_on_the_op(python: Python, kernel_cache: Path) -> None:
    """DeepSpeed's DeQuantizer, alone and in a model, takes our kernel and agrees with its own formula in float32."""
    done = python(WEIGHT_ONLY, DS_PLUGIN_CACHE_DIR=str(kernel_cache))
    assert re.search(r"\['(compiled|cache)'\]", done.stdout), done.stdout


ALL_TO_ALL = """
import torch, deepspeed
import torch.distributed as dist
deepspeed.init_distributed()
from deepspeed.runtime.comm.coalesced_collectives import all_to_all_quant_reduce
from deepspeed.utils import groups
rank, world = dist.get_rank(), dist.get_world_size()
process_groups = groups._get_local_all_to_all_group()
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    grads = [torch.randn(64, 32, generator=torch.Generator().manual_seed(each)).to(dtype) for each in range(world)]
    shard, = all_to_all_quant_reduce([grads[rank].clone()], process_groups)
    # The first stage adds up within the node, the second averages over nodes.
    nodes = world // deepspeed.accelerator.get_accelerator().device_count()
    wanted = sum(grad.float() for grad in grads) / nodes
    wanted = wanted.flatten().chunk(world)[rank]
    error, largest = (shard.float() - wanted).abs().max().item(), max(grad.abs().max().item() for grad in grads)
    relative = ((shard.float() - wanted).norm() / wanted.norm()).item()
    print(f'{dtype} {tuple(shard.shape)} {error:.3f} of {largest / 2:.3f}, {relative:.3f}', flush=True)
    # A level is an eighth of its group's largest value. Of a node, two ranks are off by one level at most, and then
    # their sum by one of its own, twice as wide; most by less than half a level.
    assert shard.shape == wanted.shape and error <= largest / 2 and relative < 0.15
dist.barrier()
"""


@pytest.mark.deepspeed
@pytest.mark.compiler
@pytest.mark.slow
def test_quantized_gradients_meet_on_two_nodes_of_two(kernel_cache: Path) -> None:
    """qgZ: swizzle, all-to-all within nodes, reduction, all-to-all among nodes; each rank gets its own shard."""
    outputs = run_ranks(ALL_TO_ALL, kernel_cache, nodes=2, devices=2)
    assert all(out.count("torch.") == 3 for out in outputs), outputs


TRAIN = """
import torch, deepspeed
import torch.distributed as dist
deepspeed.init_distributed()

def losses(**zero):
    torch.manual_seed(0)
    linear, gelu = torch.nn.Linear, torch.nn.GELU
    model = torch.nn.Sequential(linear(16, 64), gelu(), linear(64, 64), gelu(), linear(64, 16))
    config = {
        'train_micro_batch_size_per_gpu': 8,
        'optimizer': {'type': 'AdamW', 'params': {'lr': 1e-2, 'weight_decay': 0.01}},
        'zero_optimization': {'stage': 3, 'stage3_param_persistence_threshold': 0, **zero},
        'bf16': {'enabled': BF16},
        'steps_per_print': 1000,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    x = x.bfloat16() if BF16 else x
    for _ in range(30):
        loss = torch.nn.functional.mse_loss(engine(x), x.square())
        engine.backward(loss)
        engine.step()
        yield loss.item()

weights, gradients = {'zero_quantized_weights': True}, {'zero_quantized_gradients': True}
for name, zero in (('none', {}), ('weights', weights), ('gradients', gradients), ('both', {**weights, **gradients})):
    print('losses', name, *(f'{loss:.6f}' for loss in losses(**zero)), flush=True)
"""


@pytest.mark.deepspeed
@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zero_3_trains_with_quantized_weights_and_gradients(dtype: str, kernel_cache: Path) -> None:
    """ZeRO++ on two nodes of one rank: losses of 30 steps stay near those without quantization, and fall as far."""
    program = TRAIN.replace("BF16", str(dtype == "bfloat16"))
    for out in run_ranks(program, kernel_cache, nodes=2, devices=1):
        found = {
            name: torch.tensor([float(loss) for loss in text.split()])
            for name, text in re.findall(r"losses (\w+) (.*)", out)
        }
        plain = found.pop("none")
        assert plain[-1] < 0.1 * plain[0]
        # 8-bit weights barely show; 4-bit gradients do.
        for name, bound in (("weights", 0.05), ("gradients", 0.2), ("both", 0.2)):
            assert not torch.equal(found[name], plain), f"{name} were not quantized"
            assert ((found[name] - plain).abs() <= bound * plain).all(), (name, found[name], plain)
