"""The SDK's own optimizers under DeepSpeed's ZeRO."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from deepspeed_support import Python

ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

TRAIN = """
import warnings
import torch, deepspeed
from ds_plugin_sdk import optim

def train(optimizer, stage, **config):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    config |= {'train_micro_batch_size_per_gpu': 64, 'zero_optimization': {'stage': stage}, 'steps_per_print': 1000}
    made = optimizer(model.parameters(), lr=1e-2, weight_decay=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=made, config=config)
    x = torch.randn(64, 16)
    losses = []
    for _ in range(20):
        loss = torch.nn.functional.mse_loss(engine(x), x.square().sum(dim=1, keepdim=True))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return torch.tensor(losses)
"""

ELEMENTWISE = """
expected = train(torch.optim.AdamW, 0)
for stage in (0, 1, 2, 3):
    torch.testing.assert_close(train(optim.FusedAdam, stage), expected, rtol=1e-4, atol=0)
for ours in (optim.FusedAdagrad, optim.FusedLion):
    torch.testing.assert_close(train(ours, 2), train(ours, 0), rtol=1e-4, atol=0)
print('agree')
"""

LAMB = """
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    try:
        train(optim.FusedLamb, 1)
    except AssertionError as error:
        print(error)
    train(optim.FusedLamb, 1, zero_allow_untested_optimizer=True)
    train(optim.FusedLamb, 0)
print(*(each.message for each in caught if 'FusedLamb' in str(each.message)), sep='\\n')
"""


@pytest.mark.deepspeed
@pytest.mark.compiler
def test_zero_takes_what_updates_each_element_by_itself(python: Python, kernel_cache: Path) -> None:
    """In every stage the losses of Adam are those of torch's AdamW, and those of the others those without ZeRO."""
    done = python(TRAIN + ELEMENTWISE, DS_PLUGIN_CACHE_DIR=str(kernel_cache), **ONE_RANK)
    assert "agree" in done.stdout


@pytest.mark.deepspeed
@pytest.mark.compiler
def test_lamb_says_that_its_ratios_are_others(python: Python, kernel_cache: Path) -> None:
    """DeepSpeed refuses it unless told not to; a warning says what is different, and there is none without ZeRO."""
    done = python(TRAIN + LAMB, DS_PLUGIN_CACHE_DIR=str(kernel_cache), **ONE_RANK)
    assert "zero_allow_untested_optimizer" in done.stdout
    assert len(re.findall("^FusedLamb under ZeRO: .* has one trust ratio", done.stdout, re.MULTILINE)) == 2, done.stdout
