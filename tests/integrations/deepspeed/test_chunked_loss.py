"""Under every stage of ZeRO, on two ranks: linear layer and cross entropy in one, and transformers' models on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ds_plugin_sdk.settings import child_environment
from launchers import free_port

# The weight is that of an embedding, and is used in the forward of a module that does not own it; or it is a layer's.
TRAIN = """
import os, torch, deepspeed, transformers
from torch import nn
from torch.nn import functional
from ds_plugin_sdk.integrations.transformers import accelerate
from ds_plugin_sdk.losses import largest_difference
from ds_plugin_sdk.nn import LinearCrossEntropyLoss, linear_cross_entropy

class Shared(nn.Module):
    def __init__(self, ours):
        super().__init__()
        self.ours, self.embedding, self.body = ours, nn.Embedding(96, 16), nn.Linear(16, 16)

    def forward(self, ids):
        hidden, target = torch.tanh(self.body(self.embedding(ids)))[:, :-1], ids[:, 1:]
        if self.ours:
            return linear_cross_entropy(hidden, self.embedding.weight, target)
        logits = functional.linear(hidden, self.embedding.weight).float()
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten())

class Apart(nn.Module):
    def __init__(self, ours):
        super().__init__()
        self.ours, self.embedding, self.body = ours, nn.Embedding(96, 16), nn.Linear(16, 16)
        self.head = LinearCrossEntropyLoss(16, 96, bias=True, label_smoothing=0.1)

    def forward(self, ids):
        hidden, target = torch.tanh(self.body(self.embedding(ids)))[:, :-1], ids[:, 1:]
        if self.ours:
            return self.head(hidden, target)
        logits = functional.linear(hidden, self.head.weight, self.head.bias).float()
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1)

class Llama(nn.Module):
    def __init__(self, ours):
        super().__init__()
        sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=96)
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        self.ours = ours
        if ours:
            assert accelerate(self.model, loss='chunked').loss == ['']

    def forward(self, ids):
        output = self.model(input_ids=ids, labels=ids)
        assert not self.training or (output.logits is None) == self.ours
        return output.loss

def losses(kind, ours, stage, dtype):
    torch.manual_seed(0)
    config = {
        'train_micro_batch_size_per_gpu': 2,
        'gradient_accumulation_steps': 2,
        'optimizer': {'type': 'AdamW', 'params': {'lr': 1e-2}},
        'zero_optimization': {'stage': stage, 'stage3_param_persistence_threshold': 0},
        'bf16': {'enabled': dtype == 'bfloat16'},
    }
    model = kind(ours)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    ids = torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(engine.global_rank))
    for _ in range(4):
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        yield loss.item()

RUNS = (
    (Shared, 3, 'float32'), (Apart, 3, 'float32'),
    (Llama, 0, 'float32'), (Llama, 1, 'bfloat16'), (Llama, 2, 'float32'), (Llama, 3, 'bfloat16'),
)
with open(f"losses-{os.environ['RANK']}", 'w') as file:
    for kind, stage, dtype in RUNS:
        found, expected = (list(losses(kind, ours, stage, dtype)) for ours in (True, False))
        apart = largest_difference(found, expected, relative=True)
        print(kind.__name__, stage, dtype, apart, found[0], found[-1], file=file)
torch.distributed.destroy_process_group()
"""


@pytest.mark.deepspeed
@pytest.mark.compiler
@pytest.mark.slow
def test_losses_are_those_with_logits_under_every_stage(tmp_path: Path, kernel_cache: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2"]
    done = subprocess.run(
        [*launcher, "--master_port", free_port(), str(tmp_path / "train.py")],
        cwd=tmp_path,
        env=child_environment(DS_ACCELERATOR="cpu", DS_PLUGIN_CACHE_DIR=str(kernel_cache), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    for rank in (0, 1):
        found = [line.split() for line in (tmp_path / f"losses-{rank}").read_text().splitlines()]
        assert len(found) == 6
        for *run, apart, first, last in found:
            assert float(apart) < (1e-5 if "float32" in run else 2e-2), run
            assert float(last) < float(first), run
