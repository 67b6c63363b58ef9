"""Under every stage of ZeRO, on two ranks: a model whose layers run on ops, and whose products are in float32. And a
GPT-2 that is accelerated before or after `deepspeed.initialize`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ds_plugin_sdk.settings import child_environment
from launchers import free_port

TRAIN = """
import importlib, os, torch, deepspeed, transformers
from ds_plugin_sdk.integrations.transformers import accelerate, training
from ds_plugin_sdk.losses import largest_difference
from ds_plugin_sdk.ops import _products

# A CPU that is slow at 16-bit numbers, and products that are never too small.
linear = importlib.import_module('ds_plugin_sdk.nn.linear')
_products.multiplies_fast = lambda dtype: False
linear._LEAST = linear._ROWS = 0
calls = []
multiply = training.multiply
training.multiply = lambda *args, **options: calls.append(args[1].shape) or multiply(*args, **options)
# Norms, gates and rotary embeddings, none of which is too small either.
fused = importlib.import_module('ds_plugin_sdk.nn._fused')
fused._LEAST = 0
ops = []
call = fused.Fused.call
fused.Fused.call = lambda self, *args, **options: ops.append(self.op) or call(self, *args, **options)

def losses(ours, stage, checkpointing, first=True):
    torch.manual_seed(0)
    config = {
        'train_micro_batch_size_per_gpu': 2,
        'gradient_accumulation_steps': 2,
        'optimizer': {'type': 'AdamW', 'params': {'lr': 1e-2}},
        'zero_optimization': {'stage': stage, 'stage3_param_persistence_threshold': 0},
        'bf16': {'enabled': True},
    }
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=96)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False))
    if checkpointing:
        model.gradient_checkpointing_enable({'use_reentrant': False})
    if ours and first:
        accelerate(model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if ours and not first:
        accelerate(model)
    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(engine.global_rank))
    for _ in range(4):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        yield loss.item()

with open(f"losses-{os.environ['RANK']}", 'w') as file:
    for stage in range(4):
        for checkpointing, first in ((False, True), (True, True), (False, False)):
            expected = list(losses(False, stage, checkpointing))
            before = len(calls) + len(ops)
            found = list(losses(True, stage, checkpointing, first))
            apart = largest_difference(found, expected, relative=True)
            print(stage, checkpointing, first, before, len(calls), len(ops), apart, found[0], found[-1], file=file)
            calls.clear()
            ops.clear()
torch.distributed.destroy_process_group()
"""


LENGTHS = """
import os, sys, torch, deepspeed, transformers
from ds_plugin_sdk.integrations.transformers import accelerate
from ds_plugin_sdk.losses import largest_difference
from ds_plugin_sdk.nn import _fused

ops = []
call = _fused.Fused.call
_fused.Fused.call = lambda self, *args, **options: ops.append(self.op) or call(self, *args, **options)

def losses(ours):
    torch.manual_seed(0)
    config = {
        'train_micro_batch_size_per_gpu': 1,
        'optimizer': {'type': 'AdamW', 'params': {'lr': 1e-3}},
        'zero_optimization': {'stage': 3, 'stage3_param_persistence_threshold': 100},
        'flops_profiler': {'enabled': 'profile' in sys.argv, 'profile_step': 2, 'output_file': os.devnull},
    }
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=256)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    if ours:
        accelerate(model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    rank = engine.global_rank
    for step in range(5):
        # 128 of 300 tokens are enough for the op of gated activations, 128 of 200 are not.
        tokens = 200 if rank == 1 and step >= 2 else 300
        ids = torch.randint(0, 256, (1, tokens), generator=torch.Generator().manual_seed(2 * step + rank))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        yield loss.item()

expected = list(losses(False))
apart = largest_difference(losses(True), expected)
with open(f"lengths-{os.environ['RANK']}", 'w') as file:
    print(apart, ops.count('activation_and_mul'), file=file)
torch.distributed.destroy_process_group()
"""


ORDERS = """
import torch, deepspeed, transformers
from ds_plugin_sdk.integrations.transformers import accelerate
from ds_plugin_sdk.losses import largest_difference

def losses(order, stage):
    torch.manual_seed(0)
    optimizer = {'type': 'AdamW', 'params': {'lr': 1e-3}}
    config = {'train_micro_batch_size_per_gpu': 2, 'optimizer': optimizer, 'zero_optimization': {'stage': stage}}
    sizes = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=96, bos_token_id=1, eos_token_id=2)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    if order == 'before':
        print(accelerate(model))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    if order == 'after':
        accelerate(model)
    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        yield loss.item()

with open('orders', 'w') as file:
    for stage in (0, 2):
        expected = list(losses('never', stage))
        for order in ('before', 'after'):
            print(stage, order, largest_difference(losses(order, stage), expected), file=file)
torch.distributed.destroy_process_group()
"""


def launch(ranks: int, program: str, folder: Path, kernel_cache: Path, *arguments: str) -> None:
    (folder / "train.py").write_text(program, encoding="utf-8")
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", str(ranks)]
    done = subprocess.run(
        [*launcher, "--master_port", free_port(), str(folder / "train.py"), *arguments],
        cwd=folder,
        env=child_environment(DS_ACCELERATOR="cpu", DS_PLUGIN_CACHE_DIR=str(kernel_cache), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


@pytest.mark.deepspeed
@pytest.mark.compiler
@pytest.mark.slow
def test_losses_are_those_of_the_plain_model_under_every_stage(tmp_path: Path, kernel_cache: Path) -> None:
    launch(2, TRAIN, tmp_path, kernel_cache)
    for rank in (0, 1):
        found = [line.split() for line in (tmp_path / f"losses-{rank}").read_text().splitlines()]
        assert len(found) == 12
        for stage, checkpointing, before, plain, ours, fused, apart, first, last in found:
            run = f"stage {stage}, checkpointing {checkpointing}, accelerated before DeepSpeed has it {before}"
            assert plain == "0", run
            # Seven linear layers in each of two layers, and that of logits; those of layers again by checkpoints.
            assert int(ours) == 4 * (2 * 14 + 1 if checkpointing == "True" else 15), run
            # In a layer two norms, a gate, queries and keys; and the last norm.
            assert int(fused) == 4 * (2 * 10 + 1 if checkpointing == "True" else 11), run
            assert float(apart) < 2e-2 and float(last) < float(first), run


@pytest.mark.deepspeed
@pytest.mark.compiler
def test_a_gpt2_is_accelerated_before_or_after_deepspeed_has_it(tmp_path: Path, kernel_cache: Path) -> None:
    launch(1, ORDERS, tmp_path, kernel_cache)
    found = [line.split() for line in (tmp_path / "orders").read_text(encoding="utf-8").splitlines()]
    assert [(stage, order) for stage, order, _ in found] == [(s, o) for s in "02" for o in ("before", "after")]
    assert all(float(apart) < 1e-5 for *_, apart in found), found


@pytest.mark.deepspeed
@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("what", ["train", "profile"])
def test_modules_are_called_in_one_order_on_all_ranks(what: str, tmp_path: Path, kernel_cache: Path) -> None:
    """ZeRO 3 gathers parameters by that order. Ranks have batches of other lengths, and one may be profiled."""
    launch(2, LENGTHS, tmp_path, kernel_cache, what)
    for rank in range(2):
        apart, served = (tmp_path / f"lengths-{rank}").read_text(encoding="utf-8").split()
        assert float(apart) < 1e-4
        assert int(served) > 0, "the op has computed some"
