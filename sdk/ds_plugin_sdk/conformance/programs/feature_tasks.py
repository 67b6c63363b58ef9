"""Short runs of DeepSpeed, each with something that its users switch on: one of some ranks.

A task gives lists of numbers by name, which must be the same on every device. It uses DeepSpeed as a training script
does. Where a configuration suffices, the task is `train`.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from ds_plugin_sdk.conformance.programs import small_model
from ds_plugin_sdk.conformance.target import Target

Numbers = dict[str, list[float]]

_WIDTH, _CLASSES = 32, 16


def _merged(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """`patch` over `base`, section by section; a section that is None is left out."""
    result = copy.deepcopy(dict(base))
    for name, value in patch.items():
        both = isinstance(value, Mapping) and isinstance(result.get(name), Mapping)
        result[name] = _merged(result[name], value) if both else value
    return {name: value for name, value in result.items() if value is not None}


def _config(patch: Mapping[str, Any]) -> dict[str, Any]:
    base = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": small_model.LEARNING_RATE, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 0, "stage3_param_persistence_threshold": 16, "sub_group_size": 1500},
        "steps_per_print": 1 << 30,
    }
    return _merged(base, _with_folder(patch))


def _with_folder(patch: Any) -> Any:
    """`patch` with a folder that all ranks share in the place of ``{folder}``."""
    if "{folder}" not in json.dumps(patch):
        return patch
    return json.loads(json.dumps(patch).replace("{folder}", _shared_folder()))


def _shared_folder() -> str:
    import torch.distributed as dist

    folder: list[Any] = [tempfile.mkdtemp(prefix="conformance-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    return str(folder[0])


def _model() -> nn.Sequential:
    """Linear layers and norms, the same each time, of widths that shards and groups divide."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(3)]
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), *blocks, nn.Linear(_WIDTH, _CLASSES))


def _batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randn(4, _WIDTH, generator=generator), torch.randint(_CLASSES, (4,), generator=generator)


def _engine(patch: Mapping[str, Any], model: nn.Module | None = None, **more: Any) -> Any:
    import deepspeed

    model = model if model is not None else _model()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=_config(patch), **more)[0]


def _steps(engine: Any, count: int, rank: int | None = None) -> list[float]:
    """The losses of some steps, each on the same batch."""
    dtype = next(engine.module.parameters()).dtype
    x, classes = (part.to(engine.device) for part in _batch(engine.global_rank if rank is None else rank))
    losses = []
    for _ in range(count):
        # A copy each time: partitioned activations free what they are given.
        loss = small_model.loss_of(engine(x.to(dtype, copy=True)), classes)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.item()))
    return losses


def train(target: Target, config: Mapping[str, Any], steps: int = 6) -> Numbers:
    """Train with a configuration."""
    engine = _engine(config)
    if engine.device.type != target.device_type:
        raise RuntimeError(f"the engine trains on {engine.device}, not on {target.device_type}")
    return {"losses": _steps(engine, steps)}


def quantized_between_nodes(target: Target, config: Mapping[str, Any]) -> Numbers:
    """Train as if each rank had a machine of its own: DeepSpeed quantizes gradients between machines alone."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import stage3

    name = "all_to_all_quant_reduce"
    with (
        mock.patch.object(get_accelerator(), "device_count", lambda: 1),
        mock.patch.object(stage3, name, wraps=getattr(stage3, name)) as quantizing,
    ):
        numbers = train(target, config)
    if not quantizing.called:
        raise RuntimeError("DeepSpeed has quantized no gradient")
    return numbers


def sharded_from_the_start(target: Target, config: Mapping[str, Any]) -> Numbers:
    """Make the model inside `deepspeed.zero.Init`."""
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=_config(config)):
        model = _model()
    return {"losses": _steps(_engine(config, model), 6)}


def states_moved(target: Target, config: Mapping[str, Any]) -> Numbers:
    """Move the engine's states to the host and back between steps."""
    engine = _engine(config)
    first = _steps(engine, 3)
    engine.offload_states()
    engine.reload_states()
    return {"losses": [*first, *_steps(engine, 3)]}


def compiled(target: Target, config: Mapping[str, Any]) -> Numbers:
    engine = _engine(config)
    engine.compile()
    return {"losses": _steps(engine, 4)}


class _Blocks(nn.Module):
    """A model whose blocks are recomputed in the backward pass, with dropout in them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import deepspeed

        *blocks, last = self.model
        for block in blocks:
            x = deepspeed.checkpointing.checkpoint(block, x)
        result: torch.Tensor = last(x)
        return result


def recomputed(target: Target, config: Mapping[str, Any]) -> Numbers:
    """Train with activation checkpointing as the configuration has it."""
    import deepspeed

    model = _Blocks()
    engine = _engine(config, model)
    deepspeed.checkpointing.configure(None, deepspeed_config=_config(config))
    return {"losses": _steps(engine, 4)}


def torch_recomputed(target: Target, config: Mapping[str, Any]) -> Numbers:
    """Train with torch's own activation checkpointing."""
    from torch.utils.checkpoint import checkpoint

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model()

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.model, x, use_reentrant=False)

    return {"losses": _steps(_engine(config, Recomputed()), 4)}


def overflow(target: Target, config: Mapping[str, Any]) -> Numbers:
    """Start with a loss scale that overflows."""
    engine = _engine(config)
    losses = _steps(engine, 16)
    return {"losses": losses, "skipped": [engine.skipped_steps], "scale": [float(engine.optimizer.loss_scale)]}


def pipeline(target: Target, config: Mapping[str, Any]) -> Numbers:
    """A model of two stages, a stage a rank."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    torch.manual_seed(0)
    layers = list(_model())
    model = PipelineModule(layers, num_stages=2, loss_fn=small_model.loss_of, partition_method="uniform")
    patch = _merged({"gradient_accumulation_steps": 2, "train_batch_size": 8}, config)
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=_config(patch))[0]

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield from (_batch(0), _batch(1))

    data = batches()
    return {"losses": [float(engine.train_batch(data)) for _ in range(4)]}


def ulysses(target: Target) -> Numbers:
    """Attention over a sequence that two ranks share, forward and backward."""
    import deepspeed.comm as dist
    from deepspeed.sequence.layer import DistributedAttention

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    group = dist.new_group([0, 1])
    layer = DistributedAttention(attention, group, scatter_idx=2, gather_idx=1)
    torch.manual_seed(3)
    whole = [torch.randn(2, 8, 4, 16) for _ in range(3)]
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    parts = [part[:, mine].to(target.device).requires_grad_() for part in whole]
    output = layer(*parts, 0)
    torch.autograd.backward(output.square().sum())
    return {
        "output": output.flatten().tolist(),
        "gradient": [float(part.grad.double().sum()) for part in parts if part.grad is not None],
    }


def _language_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def _tokens(target: Target) -> torch.Tensor:
    return torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(5)).to(target.device)


def parallel_inference(target: Target) -> Numbers:
    """A language model of transformers, its layers' weights split over the ranks."""
    import deepspeed
    import deepspeed.comm as dist

    engine = deepspeed.init_inference(
        _language_model().eval(), tensor_parallel={"tp_size": dist.get_world_size()}, dtype=torch.float32
    )
    with torch.no_grad():
        return {"logits": engine(_tokens(target)).logits.float().flatten().tolist()[:256]}


def injected_inference(target: Target, kernels: bool) -> Numbers:
    """A GPT-2 of transformers with DeepSpeed's inference engine, with and without its kernels.

    Without a cache: the one of transformers 5 is not what DeepSpeed's layers know.
    """
    import deepspeed
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=64, n_layer=2, n_head=4)).eval()
    engine = deepspeed.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=kernels)
    with torch.no_grad():
        return {"logits": engine(_tokens(target), use_cache=False).logits.float().flatten().tolist()[:256]}


def parallel_training(target: Target, config: Mapping[str, Any]) -> Numbers:
    """A language model of transformers trained with its layers' weights split over the ranks."""
    engine = _engine(config, _language_model())
    tokens = _tokens(target)
    losses = []
    for _ in range(4):
        loss = engine(tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.item()))
    return {"losses": losses}


class _Experts(nn.Module):
    def __init__(self, parts: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        torch.manual_seed(0)
        expert = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU(), nn.Linear(_WIDTH, _WIDTH))
        self.experts = MoE(
            _WIDTH, expert, num_experts=4, ep_size=parts, k=1, use_rts=False, min_capacity=0, capacity_factor=4.0
        )
        self.head = nn.Linear(_WIDTH, _CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(x + self.experts(x)[0])


def experts(target: Target, config: Mapping[str, Any]) -> Numbers:
    """A layer of experts, of which each rank has a part."""
    import deepspeed
    import deepspeed.comm as dist
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    model = _Experts(dist.get_world_size())
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine = deepspeed.initialize(model=model, model_parameters=groups, config=_config(config))[0]
    return {"losses": _steps(engine, 4)}


def muon(target: Target, config: Mapping[str, Any]) -> Numbers:
    """Train with Muon on the weights of linear layers."""
    model = _model()
    for parameter in model.parameters():
        parameter.use_muon = parameter.ndim > 1  # type: ignore[attr-defined]  # how DeepSpeed is told
    return {"losses": _steps(_engine(config, model), 5)}


def save(target: Target, config: Mapping[str, Any], folder: str, model_only: bool = False) -> Numbers:
    """Train, write a checkpoint, and go on: the losses that a resumed run must have."""
    engine = _engine(config)
    _steps(engine, 3, rank=0)
    engine.save_checkpoint(folder, tag="here")
    return {"losses": _steps(engine, 3, rank=0)}


def load(target: Target, config: Mapping[str, Any], folder: str) -> Numbers:
    """Read a checkpoint, and go on."""
    import deepspeed

    if _config(config).get("checkpoint", {}).get("load_universal"):
        import types

        import torch.distributed as dist
        from deepspeed.checkpoint.ds_to_universal import main as convert

        if dist.get_rank() == 0:
            convert(
                types.SimpleNamespace(
                    input_folder=f"{folder}/here",
                    output_folder=f"{folder}/universal",
                    num_extract_workers=1,
                    num_merge_workers=1,
                    keep_temp_folder=False,
                    strict=True,
                    inject_missing_state=True,
                )
            )
            Path(folder, "latest_universal").write_text("universal", encoding="utf-8")
        dist.barrier()
    assert deepspeed is not None
    engine = _engine(config)
    universal = Path(folder, "universal").exists()
    path, _ = engine.load_checkpoint(folder, tag="universal" if universal else "here")
    if path is None:
        raise RuntimeError(f"load_checkpoint found nothing in {folder}")
    return {"losses": _steps(engine, 3, rank=0)}


def to_float32(target: Target, config: Mapping[str, Any], folder: str) -> Numbers:
    """The weights that `zero_to_fp32` makes of a checkpoint, in a plain model."""
    import torch.distributed as dist
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    engine = _engine(config)
    _steps(engine, 3, rank=0)
    engine.save_checkpoint(folder, tag="here")
    dist.barrier()
    weights = get_fp32_state_dict_from_zero_checkpoint(folder, tag="here")
    return {name: value.float().flatten().tolist()[:8] for name, value in weights.items()}


def curriculum(target: Target, config: Mapping[str, Any]) -> Numbers:
    """Batches whose difficulty grows by the configuration's schedule."""
    import deepspeed

    difficulties: list[float] = []

    def note(batch: Any, state: Mapping[str, Any]) -> Any:
        difficulties.append(float(state["current_difficulties"]["length"]))
        return batch

    x, classes = (torch.cat(part) for part in zip(*map(_batch, range(10)), strict=True))
    model = _model()
    engine, _, data, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=torch.utils.data.TensorDataset(x, classes),
        config=_config(config),
    )
    engine.set_data_post_process_func(note)
    losses = []
    for _, part in zip(range(5), data, strict=False):
        loss = small_model.loss_of(engine(part[0].to(engine.device)), part[1].to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.item()))
    return {"losses": losses, "difficulties": difficulties[:5]}


def dropped_tokens(target: Target, config: Mapping[str, Any]) -> Numbers:
    """Random-LTD: layers that see some of the tokens, by the configuration's schedule."""
    from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(_WIDTH, _WIDTH)

        def forward(self, x: torch.Tensor, mask: Any = None) -> Any:
            return x + self.linear(x)

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer() for _ in range(3)])
            self.head = nn.Linear(_WIDTH, _CLASSES)

        def forward(self, x: torch.Tensor) -> Any:
            x = x[:, None].expand(-1, 16, -1).contiguous()
            for layer in self.layers:
                x = layer(x, mask=None)
            return self.head(x.mean(1))

    torch.manual_seed(0)
    engine = convert_to_random_ltd(_engine(config, Layers()), Layer)
    losses = _steps(engine, 5)
    # Which tokens are dropped is drawn on the device: what must agree is that training goes on, and the schedule.
    return {"falls": [float(losses[-1] < losses[0])], "tokens": [engine.random_ltd_scheduler.get_current_seq()]}


def profiled(target: Target, config: Mapping[str, Any]) -> Numbers:
    """The flops profiler's counts."""
    from deepspeed.profiling.flops_profiler import FlopsProfiler

    engine = _engine(config)
    profiler = FlopsProfiler(engine.module)
    profiler.start_profile()
    losses = _steps(engine, 1)
    found = {"flops": [float(profiler.get_total_flops())], "parameters": [float(profiler.get_total_params())]}
    profiler.end_profile()
    return {"losses": losses, **found}


def monitored(target: Target, config: Mapping[str, Any]) -> Numbers:
    """What the CSV monitor writes of the losses."""
    patch = _with_folder(config)
    engine = _engine(patch)
    losses = _steps(engine, 3)
    written = sorted(Path(patch["csv_monitor"]["output_path"]).rglob("*loss*.csv"))
    rows = [line.split(",") for file in written for line in file.read_text(encoding="utf-8").splitlines()[1:]]
    return {"losses": losses, "written": [float(row[-1]) for row in rows] if engine.global_rank == 0 else []}


def tuned(target: Target) -> Numbers:
    """What the programs that autotuning starts do: one writes the model's size and ends, each other one its speed."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        size, speed = Path(folder, "size.json"), Path(folder, "speed.json")
        _experiment(size, model_info={"profile": True}, model_info_path=str(size))
        _experiment(speed, metric_path=str(speed), start_profile_step=2, end_profile_step=3)
        model, metrics = (json.loads(file.read_text(encoding="utf-8")) for file in (size, speed))
    for name in ("latency", "throughput", "FLOPS_per_gpu"):
        if not metrics[name] > 0:
            raise RuntimeError(f"an experiment measured {name} {metrics[name]}")
    return {"parameters": [float(model[name]) for name in ("num_params", "trainable_num_params")]}


def _experiment(written: Path, **options: Any) -> None:
    try:
        _steps(_engine({"autotuning": {"enabled": True, **options}, "zero_optimization": {"stage": 1}}), 8)
    except SystemExit:
        return
    raise RuntimeError(f"DeepSpeed went on without writing {written.name}")


def elastic(target: Target) -> Numbers:
    """The batch sizes and device counts that elasticity allows."""
    from deepspeed.elasticity import compute_elastic_config

    sizes = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4], "min_gpus": 1, "max_gpus": 8}
    batch, counts = compute_elastic_config({"elasticity": {**sizes, "version": 0.1}}, "0.19.8")[:2]
    return {"batch": [float(batch)], "counts": [float(count) for count in counts]}


def hybrid(target: Target, config: Mapping[str, Any]) -> Numbers:
    """A language model that generates and trains in turn."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    model = OPTForCausalLM(
        OPTConfig(
            vocab_size=64,
            hidden_size=64,
            word_embed_proj_dim=64,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            dropout=0.0,
        )
    )
    engine = _engine(config, model)
    tokens = _tokens(target)
    found: Numbers = {"losses": []}
    for _ in range(2):
        engine.eval()
        with torch.no_grad():
            found["losses"].append(float(engine(tokens).logits.float().square().mean()))
        engine.train()
        loss = engine(tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        found["losses"].append(float(loss.item()))
    return found


TASKS: dict[str, Callable[..., Numbers]] = {
    task.__name__: task
    for task in (
        train,
        quantized_between_nodes,
        sharded_from_the_start,
        states_moved,
        compiled,
        recomputed,
        torch_recomputed,
        overflow,
        pipeline,
        ulysses,
        parallel_inference,
        injected_inference,
        parallel_training,
        experts,
        muon,
        save,
        load,
        to_float32,
        curriculum,
        dropped_tokens,
        profiled,
        monitored,
        tuned,
        elastic,
        hybrid,
    )
}
