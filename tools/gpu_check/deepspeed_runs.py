"""Short runs of unmodified DeepSpeed on one device: the losses of each configuration, as JSON.

    PYTHONPATH=tools python -m gpu_check.deepspeed_runs runs.json
    PYTHONPATH=tools python -m gpu_check.deepspeed_runs --compare plugin.json own.json

Run once with a plugin and once with `TORCH_DEVICE_BACKEND_AUTOLOAD=0`, on DeepSpeed's own accelerator. There
optimizers are torch's, so that DeepSpeed compiles nothing: the losses are the same within rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ds_plugin_sdk.losses import largest_difference

STEPS, BATCH, TOKENS, VOCABULARY, WIDTH = 8, 8, 64, 512, 256
TOLERANCE = {"float32": 1e-3, "bf16": 2e-2, "fp16": 5e-3}  # relative, of a loss

ON_HOST = {"device": "cpu", "pin_memory": True}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, LAMB": {"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}},
    "fp16, loss scaling": {"fp16": {"enabled": True}},
    "bf16, clipping": {"bf16": {"enabled": True}, "gradient_clipping": 0.1},
    **{f"bf16, ZeRO {stage}": {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}} for stage in range(4)},
    "float32, ZeRO 3": {"zero_optimization": {"stage": 3}},
    "bf16, ZeRO 2, optimizer on the host": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "offload_optimizer": ON_HOST},
    },
    "bf16, ZeRO 3, everything on the host": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": ON_HOST, "offload_param": ON_HOST},
    },
}


class Model(nn.Module):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        past = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1] - 1, device=tokens.device)
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers.layers:  # the stack itself would ask on the host whether the mask is causal
            x = layer(x, src_mask=past.to(x.dtype))
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def losses(name: str, plugin: bool) -> list[float]:
    """The losses of some steps on one batch."""
    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        **CONFIGURATIONS[name],
    }
    model: Any = Model()
    if not plugin and "LAMB" not in name:
        config["optimizer"] = {**config["optimizer"], "params": {**config["optimizer"]["params"], "torch_adam": True}}
        config["zero_force_ds_cpu_optimizer"] = False
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(2)).to(engine.device)
    found = []
    for _ in range(STEPS):
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    print(f"{name}: {type(engine.optimizer).__name__}, {found[0]:.4f} to {found[-1]:.4f}", flush=True)
    engine.destroy()
    return found


def a_graph_of_a_step() -> list[float]:
    """Losses of steps whose forward and backward are a CUDA graph, after three that are not."""
    from ds_plugin_sdk.optim import FusedAdam

    torch.manual_seed(1)
    device = get_accelerator().current_device_name()
    model = Model().to(device)
    optimizer = FusedAdam(model.parameters(), lr=1e-3, bias_correction=False)
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(2)).to(device)

    def both_passes() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss: Tensor = model(tokens)
        loss.backward()
        return loss.detach()

    found = []
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            found.append(float(both_passes()))
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = both_passes()
    for _ in range(STEPS - len(found)):
        graph.replay()
        found.append(float(loss))
        optimizer.step()
    print(f"a graph of both passes: {found[0]:.4f} to {found[-1]:.4f}", flush=True)
    return found


def without_a_graph() -> list[float]:
    """The losses of the same steps, each launched by Python, with torch's optimizer."""
    torch.manual_seed(1)
    device = get_accelerator().current_device_name()
    model = Model().to(device)
    first = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()}
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(2)).to(device)
    found = []
    for _ in range(STEPS):
        loss: Tensor = model(tokens)
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p, (m, v) in first.items():
                assert p.grad is not None
                m.lerp_(p.grad, 0.1)
                v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                p.addcdiv_(m, v.sqrt().add_(1e-8), value=-1e-3)
        found.append(float(loss.detach()))
    return found


def run(into: Path) -> int:
    """All configurations; how many failed."""
    accelerator = type(get_accelerator())
    plugin = not accelerator.__module__.startswith("deepspeed.")
    print(f"{accelerator.__module__}.{accelerator.__qualname__}", flush=True)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29611" if plugin else "29612")
    results: dict[str, list[float] | str] = {}
    todo = {name: (lambda name=name: losses(name, plugin)) for name in CONFIGURATIONS}
    if get_accelerator().device_name() == "cuda":
        todo["float32, both passes in a graph"] = a_graph_of_a_step if plugin else without_a_graph
    for name, what in todo.items():
        if "LAMB" in name and not plugin:
            continue  # DeepSpeed would have to compile its own
        try:
            results[name] = what()
        except Exception as error:
            print(f"{name}: {traceback.format_exc()}", flush=True)
            results[name] = f"{type(error).__name__}: {error}"
        into.write_text(json.dumps(results, indent=1))
    return sum(isinstance(found, str) for found in results.values())


def compare(plugin: Path, own: Path) -> int:
    """Print the losses side by side; how many differ by more than the tolerance."""
    ours, theirs = (json.loads(path.read_text()) for path in (plugin, own))
    failed = 0
    for name, found in ours.items():
        reference, tolerance = theirs.get(name), TOLERANCE[name.partition(",")[0]]
        if isinstance(found, str) or isinstance(reference, str):
            failed += isinstance(found, str)
            print(f"{name}: plugin: {found}; DeepSpeed's own: {reference}")
            continue
        if reference is None:
            failed += not found[-1] < found[0]
            print(f"{name}: {found[0]:.5f} to {found[-1]:.5f}, alone")
            continue
        apart = largest_difference(found, reference, relative=True)
        failed += not apart <= tolerance
        print(f"{name}: {found[-1]:.5f}, DeepSpeed's own {reference[-1]:.5f}; at most {apart:.1e} apart of {tolerance}")
    print(f"{len(ours) - failed} of {len(ours)} configurations as on DeepSpeed's own accelerator")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--compare", action="store_true")
    arguments = parser.parse_args()
    return compare(*arguments.files) if arguments.compare else run(*arguments.files)


if __name__ == "__main__":
    sys.exit(main() != 0)
