"""Level ``features``: what a user of DeepSpeed switches on, each in a short run on the target and the same on the host.

ZeRO           F1   stages, offload, ZeRO++, ZenFlow, SuperOffload
parallelism    F2   pipeline, Ulysses, tensor and expert parallelism
optimizers     F3   those that a configuration names
memory         F4   recomputed and offloaded activations
types          F5   bfloat16, float16 with loss scaling, autocast
compilation    F6   torch.compile, DeepCompile
checkpoints    F7   other stages and rank counts, universal checkpoints, zero_to_fp32
data           F8   random-LTD, curriculum
tools          F9   profiler, monitors, autotuning, elasticity
inference      F10  kernels, hybrid engine

A row of `FEATURES` says what is run; the numbers that it gives must be the host's. The host runs DeepSpeed on the SDK's
ops for the CPU. What DeepSpeed itself forbids on anything but CUDA ends as "DeepSpeed's limit", with the place.
"""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ds_plugin_sdk.accelerator import installed
from ds_plugin_sdk.conformance.check import Clause, ExcusedError, NonconformanceError, check, expect, tell
from ds_plugin_sdk.conformance.patience import allowed
from ds_plugin_sdk.conformance.process import START_TIMEOUT, Worker, WorkerError
from ds_plugin_sdk.conformance.runtime.support import indexed
from ds_plugin_sdk.conformance.target import Target

_PROGRAM = "ds_plugin_sdk.conformance.programs.features"
_HOST = "ds_plugin_sdk.conformance.programs.host:Host"

# For each run of a feature, which takes seconds, and of one for which a compiler may be needed.
_SECONDS, _COMPILER_SECONDS = 120.0, 300.0

# What compiles: inductor, and DeepSpeed's own op for NVMe where the target has none.
_COMPILED = ("compiled", "deepcompile", "muon", "nvme")

# Largest difference between numbers, relative to the larger of 1 and the number: sums in other orders, over some steps.
_FLOAT32, _BFLOAT16, _FLOAT16 = 2e-4, 4e-2, 1e-2


@dataclass(frozen=True)
class Run:
    """A task of `ds_plugin_sdk.conformance.programs.feature_tasks` on some ranks."""

    task: str
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 2


@dataclass(frozen=True)
class Feature:
    """One row.

    Attributes:
        group: the clause that it belongs to.
        name: short and stable.
        runs: made one after the other; those with the option ``folder`` share one.
        tolerance: the largest difference from the host's numbers, relative to the larger of 1 and the number.
        dtype: what the device must declare.
        module: what DeepSpeed, or the environment, must have.
    """

    group: str
    name: str
    runs: Sequence[Run]
    tolerance: float = _FLOAT32
    dtype: torch.dtype = torch.float32
    module: str = ""

    @property
    def ranks(self) -> int:
        return max(run.ranks for run in self.runs)

    @property
    def seconds(self) -> float:
        """For each run."""
        return _COMPILER_SECONDS if any(word in self.name for word in _COMPILED) else _SECONDS


def _train(
    group: str,
    name: str,
    task: str = "train",
    *,
    ranks: int = 2,
    more: Mapping[str, Any] | None = None,
    module: str = "",
    **config: Any,
) -> Feature:
    """A feature that is a configuration."""
    dtype, tolerance = torch.float32, _FLOAT32
    if config.get("bf16"):
        dtype, tolerance = torch.bfloat16, _BFLOAT16
    if config.get("fp16"):
        dtype, tolerance = torch.float16, _FLOAT16
    return Feature(group, name, [Run(task, {"config": config, **(more or {})}, ranks)], tolerance, dtype, module)


def _zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"stage": stage, **more}


_BF16, _FP16 = {"enabled": True}, {"enabled": True, "initial_scale_power": 8}
_ON_HOST = {"device": "cpu", "pin_memory": True}
_ON_DISK = {"device": "nvme", "nvme_path": "{folder}", "pin_memory": True, "buffer_count": 5}
_AIO = {"block_size": 4096, "queue_depth": 8, "thread_count": 1, "single_submit": False, "overlap_events": True}
_RATE = {"lr": 1e-2}
_LANGUAGE: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0}}


def _optimizer(name: str, **more: Any) -> dict[str, Any]:
    return {"type": name, "params": {**_RATE, **more}}


def _resumed(name: str, before: Mapping[str, Any], after: Mapping[str, Any], ranks: int) -> Feature:
    """A checkpoint written under one configuration on two ranks, and read under another."""
    return Feature(
        "checkpoints",
        name,
        [Run("save", {"config": before, "folder": ""}), Run("load", {"config": after, "folder": ""}, ranks)],
    )


def _stage(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, **more}


_UNIVERSAL = {"load_universal": True}

FEATURES: tuple[Feature, ...] = (
    # ---- ZeRO
    *(_train("zero", f"stage_{stage}", zero_optimization=_zero(stage)) for stage in range(4)),
    *(
        _train("zero", f"stage_{stage}_optimizer_on_host", zero_optimization=_zero(stage, offload_optimizer=_ON_HOST))
        for stage in (1, 2, 3)
    ),
    _train(
        "zero",
        "parameters_on_host",
        zero_optimization=_zero(3, offload_optimizer=_ON_HOST, offload_param=_ON_HOST),
    ),
    _train("zero", "optimizer_on_nvme", aio=_AIO, zero_optimization=_zero(3, offload_optimizer=_ON_DISK)),
    _train(
        "zero",
        "parameters_on_nvme",
        aio=_AIO,
        zero_optimization=_zero(3, offload_optimizer=_ON_DISK, offload_param={**_ON_DISK, "buffer_size": 100_000}),
    ),
    _train("zero", "twin_flow", zero_optimization=_zero(3, offload_optimizer={**_ON_HOST, "ratio": 0.4})),
    _train("zero", "offload_states", "states_moved", zero_optimization=_zero(3)),
    _train("zero", "sharded_from_the_start", "sharded_from_the_start", zero_optimization=_zero(3)),
    _train("zero", "quantized_weights", bf16=_BF16, zero_optimization=_zero(3, zero_quantized_weights=True)),
    _train(
        "zero",
        "quantized_gradients",
        "quantized_between_nodes",
        bf16=_BF16,
        zero_optimization=_zero(3, zero_quantized_gradients=True),
    ),
    _train("zero", "secondary_shards", zero_optimization=_zero(3, zero_hpz_partition_size=2)),
    *(
        _train(
            "zero",
            f"zenflow_{stage}{'_overlapped' if overlap else ''}",
            bf16=_BF16,
            gradient_accumulation_steps=1,
            zero_optimization=_zero(
                stage,
                offload_optimizer=_ON_HOST,
                zenflow={
                    "topk_ratio": 0.2,
                    "update_interval": 2,
                    "select_strategy": "step",
                    "select_interval": 4,
                    "full_warm_up_rounds": 0,
                    "overlap_step": overlap,
                },
            ),
        )
        for stage, overlap in ((2, False), (2, True), (3, False))
    ),
    _train(
        "zero",
        "super_offload",
        module="deepspeed.runtime.superoffload",
        bf16=_BF16,
        zero_optimization=_zero(3, offload_optimizer={**_ON_HOST, "super_offload": True}),
    ),
    # ---- parallelism
    _train("parallelism", "pipeline", "pipeline", zero_optimization=_zero(0)),
    _train("parallelism", "pipeline_zero_1", "pipeline", zero_optimization=_zero(1)),
    Feature("parallelism", "ulysses", [Run("ulysses")]),
    Feature("parallelism", "tensor_inference", [Run("parallel_inference")], module="transformers"),
    _train(
        "parallelism",
        "tensor_training",
        "parallel_training",
        **{**_LANGUAGE, "tensor_parallel": {"autotp_size": 2}},
    ),
    _train("parallelism", "experts", "experts", zero_optimization=_zero(0)),
    _train("parallelism", "experts_zero_2", "experts", bf16=_BF16, zero_optimization=_zero(2)),
    # ---- optimizers
    *(
        _train("optimizers", name.lower(), optimizer=_optimizer(name), zero_optimization=_zero(stage))
        for name, stage in (("Adam", 1), ("AdamW", 2), ("Lamb", 0), ("Lion", 1), ("Adagrad", 0))
    ),
    *(
        _train(
            "optimizers",
            f"{name.lower()}_on_host",
            optimizer=_optimizer(name),
            zero_optimization=_zero(2, offload_optimizer=_ON_HOST),
        )
        for name in ("Lion", "Adagrad")
    ),
    _train("optimizers", "muon", "muon", optimizer=_optimizer("Muon"), zero_optimization=_zero(2), bf16=_BF16),
    *(
        _train(
            "optimizers",
            name.lower(),
            module="deepspeed.runtime.fp16.onebit",
            optimizer=_optimizer(name),
            fp16=_FP16,
        )
        for name in ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
    ),
    # ---- memory
    _train("memory", "gradient_accumulation", gradient_accumulation_steps=2, zero_optimization=_zero(2)),
    _train("memory", "gradient_checkpointing", "torch_recomputed", zero_optimization=_zero(2)),
    *(
        _train(
            "memory",
            f"activations_{name}",
            "recomputed",
            zero_optimization=_zero(1),
            activation_checkpointing=options,
        )
        for name, options in (
            ("recomputed", {}),
            ("partitioned", {"partition_activations": True}),
            ("on_host", {"partition_activations": True, "cpu_checkpointing": True}),
        )
    ),
    # ---- types
    _train("types", "bfloat16", bf16=_BF16, zero_optimization=_zero(2)),
    _train("types", "bfloat16_stage_0", bf16=_BF16),
    _train("types", "float16", fp16=_FP16, zero_optimization=_zero(2)),
    _train(
        "types",
        "loss_scaling",
        "overflow",
        fp16={"enabled": True, "initial_scale_power": 24, "hysteresis": 1},
        zero_optimization=_zero(2),
    ),
    # In float16 the loss is scaled by torch's GradScaler: ZeRO's optimizer has one, and without ZeRO the engine.
    *(
        Feature(
            "types",
            name,
            [
                Run(
                    "train",
                    {
                        "config": {
                            "torch_autocast": {"enabled": True, "dtype": str(dtype).removeprefix("torch.")},
                            "zero_optimization": {"stage": stage},
                        }
                    },
                )
            ],
            tolerance,
            dtype,
        )
        for name, dtype, stage, tolerance in (
            ("autocast", torch.bfloat16, 2, _BFLOAT16),
            ("autocast_float16", torch.float16, 2, _FLOAT16),
            ("autocast_float16_stage_0", torch.float16, 0, _FLOAT16),
        )
    ),
    # ---- compilation
    _train("compilation", "compiled", "compiled", zero_optimization=_zero(1)),
    _train("compilation", "compiled_stage_3", "compiled", zero_optimization=_zero(3)),
    _train("compilation", "deepcompile", "compiled", zero_optimization=_zero(3), compile={"deepcompile": True}),
    # ---- checkpoints
    *(_resumed(f"stage_{stage}", _stage(stage), _stage(stage), 2) for stage in (0, 1, 2, 3)),
    _resumed("universal_fewer_ranks", _stage(2), _stage(2, checkpoint=_UNIVERSAL), 1),
    _resumed("universal_other_stage", _stage(1), _stage(2, checkpoint=_UNIVERSAL), 2),
    _resumed("universal_stage_3", _stage(3), _stage(3, checkpoint=_UNIVERSAL), 2),
    *(
        Feature("checkpoints", f"to_float32_{stage}", [Run("to_float32", {"config": _stage(stage), "folder": ""})])
        for stage in (2, 3)
    ),
    # ---- data
    _train(
        "data",
        "random_ltd",
        "dropped_tokens",
        data_efficiency={
            "enabled": True,
            "data_routing": {
                "enabled": True,
                "random_ltd": {
                    "enabled": True,
                    "total_layer_num": 3,
                    "random_ltd_layer_num": 1,
                    "random_ltd_layer_id": [1],
                    "model_mask_name": "mask",
                    "model_type": "decoder",
                    "hidden_state_order": "batch_seq_dim",
                    "random_ltd_schedule": {
                        "min_value": 8,
                        "max_value": 16,
                        "schedule_type": "fixed_linear",
                        "schedule_config": {"require_steps": 8, "seq_per_step": 4},
                    },
                },
            },
        },
    ),
    _train(
        "data",
        "curriculum",
        "curriculum",
        data_efficiency={
            "enabled": True,
            "data_sampling": {
                "enabled": True,
                "num_workers": 0,
                "curriculum_learning": {
                    "enabled": True,
                    "data_cluster_path": "{folder}",
                    "curriculum_metrics": {
                        "length": {
                            "index_to_sample_path": "none",
                            "index_to_metric_path": "none",
                            "difficulty_type": "value",
                            "clustering_type": "single_cluster",
                            "min_difficulty": 2,
                            "max_difficulty": 10,
                            "schedule_type": "fixed_linear",
                            "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 2},
                        }
                    },
                },
            },
        },
    ),
    # ---- tools
    _train("tools", "flops_profiler", "profiled", ranks=1),
    _train(
        "tools",
        "csv_monitor",
        "monitored",
        csv_monitor={"enabled": True, "output_path": "{folder}", "job_name": "run"},
    ),
    _train("tools", "wall_clock_breakdown", wall_clock_breakdown=True, zero_optimization=_zero(2)),
    _train("tools", "comms_logger", comms_logger={"enabled": True, "verbose": False}, zero_optimization=_zero(1)),
    Feature("tools", "autotuning", [Run("tuned", ranks=1)], module="deepspeed.autotuning"),
    Feature("tools", "elasticity", [Run("elastic", ranks=1)], module="deepspeed.elasticity"),
    # ---- inference
    *(
        Feature(
            "inference",
            "kernels" if kernels else "no_kernels",
            [Run("injected_inference", {"kernels": kernels}, 1)],
            module="transformers",
        )
        for kernels in (False, True)
    ),
    Feature(
        "inference",
        "hybrid_engine",
        [Run("hybrid", {"config": {**_LANGUAGE, "hybrid_engine": {"enabled": True, "max_out_tokens": 32}}}, 1)],
        module="transformers",
    ),
)


class _Server:
    """A process that runs features on a target; another takes its place if it ends.

    Args:
        target: its name.
        plugin: whose accelerator the processes have that DeepSpeed spawns: they choose by themselves.
    """

    def __init__(self, target: str, plugin: str = "") -> None:
        self._target = target
        self._chosen = {"DS_ACCELERATOR": plugin} if plugin else {}
        self._worker: Worker | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        atexit.register(self.close)

    def run(self, run: Run, options: Mapping[str, Any], seconds: float = _SECONDS) -> list[dict[str, Any]]:
        """What each rank gave; `ds_plugin_sdk.conformance.programs.features` says in which form."""
        if self._worker is None:
            self._folder = tempfile.TemporaryDirectory(prefix="conformance-")
            self._worker = Worker(self._target, _PROGRAM, environment={**_compilers(self._folder.name), **self._chosen})
        seconds = allowed(seconds)
        request = {"task": run.task, "options": options, "ranks": run.ranks, "seconds": seconds}
        try:
            answer: list[dict[str, Any]] = self._worker.ask(request, START_TIMEOUT + seconds)
        except WorkerError as error:
            self.close()
            raise NonconformanceError(f"the program of the features: {error.what}", why=error.output) from None
        return answer

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None
        if self._folder is not None:
            self._folder.cleanup()


def _compilers(folder: str) -> dict[str, str]:
    """What makes compilers work in a folder of their own.

    A process that is killed while it compiles leaves a lock or half a library, which all later ones would meet in the
    folders that they share.
    """
    return {
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TORCH_EXTENSIONS_DIR": f"{folder}/extensions",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # inductor's pool of compilers would not survive the fork
    }


@functools.cache
def _server(target: str, plugin: str = "") -> _Server:
    return _Server(target, plugin)


def _numbers(target: str, feature: Feature, plugin: str) -> dict[str, list[float]]:
    """What each rank gave in each run; where a rank failed, the error that says so."""
    found: dict[str, list[float]] = {}
    ops: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        for index, run in enumerate(feature.runs):
            options = {**run.options, **({"folder": folder} if "folder" in run.options else {})}
            ranks = _server(target, plugin).run(run, options, feature.seconds)
            _expect_done(ranks)
            for rank, answer in enumerate(ranks):
                found.update({f"rank{rank}.{run.task}.{index}.{n}": values for n, values in answer["result"].items()})
            ops.update(dict(ranks[0]["ops"]))
    tell(ops=ops)
    return found


def _expect_done(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raise what the rank says that knows best: one that failed rather than one that waited for it."""
    limit = next((rank["limit"] for rank in ranks if rank.get("limit")), "")
    if limit:
        raise ExcusedError("DeepSpeed's limit", limit)
    failed = [(rank, answer) for rank, answer in enumerate(ranks) if "result" not in answer]
    if not failed:
        return
    rank, answer = min(failed, key=lambda each: ("failure" not in each[1], "SIGABRT" in each[1].get("ended", "")))
    who = f"rank {rank} of {len(ranks)}"
    if "failure" in answer:
        raise NonconformanceError(f"{who}: {answer['failure']}", why=answer["trace"])
    raise NonconformanceError(f"{who} ended {answer['ended']}", why=answer["output"])


@functools.cache
def _on_host(name: str, plugin: str) -> dict[str, list[float]] | NonconformanceError | ExcusedError:
    """The host's numbers, or why it has none."""
    feature = next(feature for feature in FEATURES if _id(feature) == name)
    try:
        return _numbers(_HOST, feature, plugin)
    except (NonconformanceError, ExcusedError) as error:
        return error


def _id(feature: Feature) -> str:
    return f"{feature.group}.{feature.name}"


def _why_not(feature: Feature, target: Target) -> str:
    """Why a feature cannot be tried here; empty if it can."""
    if feature.module and not installed(feature.module):
        package = feature.module.partition(".")[0]
        version = importlib.metadata.version(package) if installed(package) else "(not installed)"
        return f"{package} {version} has no {feature.module}" if "." in feature.module else f"no {package} is installed"
    if feature.dtype not in target.dtypes:
        return f"the accelerator does not declare {feature.dtype}"
    count = int(target.accelerator.device_count())
    if indexed(target) and count < feature.ranks:
        return f"it takes {feature.ranks} devices; the accelerator declares {count}"
    return ""


def _expect_same(found: Mapping[str, Sequence[float]], host: Mapping[str, Sequence[float]], tolerance: float) -> None:
    for name, expected in host.items():
        actual = found.get(name, [])
        shown = f"{name}: {_rounded(actual)}", f"the host has {_rounded(expected)}"
        expect(len(actual) == len(expected), shown[0], why=shown[1])
        for value, right in zip(actual, expected, strict=True):
            off = abs(value - right) / max(1.0, abs(right))
            if not off <= tolerance or not math.isfinite(value):
                expect(False, f"{shown[0]}, off by {off:.2g}", why=f"{shown[1]}; allowed is {tolerance:g}")


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 5) for value in [*values][:8]]


def _cases(group: str) -> Any:
    return lambda target: [{"feature": feature.name} for feature in FEATURES if feature.group == group]


def _needs_deepspeed(target: Target) -> str | None:
    return None if installed("deepspeed") else "DeepSpeed is not installed: pip install 'ds-plugin-sdk[deepspeed]'"


def _run(group: str, target: Target, feature: str) -> None:
    row = next(each for each in FEATURES if (each.group, each.name) == (group, feature))
    why_not = _why_not(row, target)
    if why_not:
        raise ExcusedError("skipped", why_not)
    plugin = target.plugin.name if target.plugin else ""
    host = _on_host(_id(row), plugin)
    found = _numbers(target.name, row, plugin)
    if isinstance(host, ExcusedError):
        raise ExcusedError("skipped", f"nothing to compare with: on the host it is {host.verdict}: {host.reason}")
    if isinstance(host, NonconformanceError):
        raise NonconformanceError("the run on the host failed, and there is nothing to compare with", why=str(host))
    _expect_same(found, host, row.tolerance)
    for rank in range(row.ranks):
        name = f"rank{rank}.load.1.losses"
        saved, loaded = host.get(f"rank{rank}.save.0.losses"), found.get(name)
        if saved is not None and loaded is not None:
            _expect_same({name: loaded}, {name: saved}, row.tolerance)


def _group(group: str, number: str, text: str, reason: str) -> None:
    parameters: Any = _cases(group)
    check(
        f"features.{group}",
        Clause(number, f"{text} as on the host, to the tolerance of their types.", reason),
        cases=parameters,
        needs=_needs_deepspeed,
        timeout=START_TIMEOUT + 4 * _COMPILER_SECONDS,
    )(functools.partial(_run, group))


_group(
    "zero",
    "F1.1",
    "Under each ZeRO stage, with optimizer and parameters on the device, on the host or on disk, with ZeRO++, with "
    "ZenFlow and with SuperOffload, training has the same losses",
    "Who holds what, and when it moves, is a matter of the configuration alone.",
)
_group(
    "parallelism",
    "F2.1",
    "Models split by layers, by sequences, by weights and by experts give the same numbers",
    "Models that do not fit into a device.",
)
_group("optimizers", "F3.1", "Each optimizer that a configuration names trains", "Its op is the device's.")
_group(
    "memory",
    "F4.1",
    "Accumulated gradients, and activations that are recomputed, partitioned or on the host, give the same losses",
    "Long sequences and large batches.",
)
_group(
    "types",
    "F5.1",
    "Training in bfloat16, in float16 with loss scaling, and under torch's autocast has the same losses",
    "How nearly every model is trained.",
)
_group("compilation", "F6.1", "Compiled models train", "`engine.compile()` takes the accelerator's backend.")
_group(
    "checkpoints",
    "F7.1",
    "A checkpoint is read under the same configuration, another stage or another rank count, and the run goes on",
    "Clusters change between the runs of one training.",
)
_group("data", "F8.1", "Random-LTD and curricula follow their schedules", "They are switched on by configuration.")
_group("tools", "F9.1", "Profilers, monitors and loggers report of the same run", "They time and count on the device.")
_group("inference", "F10.1", "Inference engines give the same logits", "Chat models generate and train in turn.")
