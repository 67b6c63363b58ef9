"""Libraries that start DeepSpeed for the user, on the device that DeepSpeed uses: scripts as in their manuals."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_plugin_sdk.integrations import accelerate as hugging_face
from ds_plugin_sdk.integrations import lightning
from ds_plugin_sdk.integrations.deepspeed import import_hook
from launchers import free_port
from plugin_site import Install

Train = Callable[..., list[str]]

ZAP = """
from ds_plugin_sdk import TorchAccelerator, simulator
simulator.install("zap")


class ZAP_Accelerator(TorchAccelerator):
    device_type = "zap"
    communication_backend = "zapccl"
    compile_backend = "aot_eager"
"""

DATA = """
import torch

torch.manual_seed(0)
x = torch.randn(16, 4)
data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=4)
"""

ACCELERATE = (
    DATA
    + """
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inputs, wanted in loader:
    loss = torch.nn.functional.mse_loss(model(inputs), wanted)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    mean = accelerator.reduce(loss.detach(), "mean").item()
accelerator.wait_for_everyone()
accelerator.print(type(model).__name__, accelerator.num_processes, accelerator.device, len(loader), round(mean, 4))
accelerator.end_training()
"""
)

TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
rows = [{"input_ids": torch.arange(8) % 5, "labels": torch.arange(8) % 5}] * 16
model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2))
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=4, bf16=True, learning_rate=0.01, logging_steps=1, report_to="none",
    save_strategy="no", disable_tqdm=True, deepspeed={
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "zero_optimization": {"stage": 2},
    },
)
trainer = Trainer(model=model, args=arguments, train_dataset=rows)
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
if trainer.is_world_process_zero():
    engine = type(trainer.model_wrapped).__name__
    print(engine, arguments.world_size, arguments.device, len(losses), losses[0] > losses[-1])
torch.distributed.destroy_process_group()
"""

LIGHTNING = (
    DATA
    + """
import lightning

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch):
        self.loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", self.loss, sync_dist=True)
        return self.loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    torch.manual_seed(0)
    model = Model()
    trainer = lightning.Trainer(
        accelerator="gpu", devices=2, strategy="deepspeed_stage_2", max_epochs=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(model, loader)
    if trainer.is_global_zero:
        print(type(trainer.strategy.model).__name__, trainer.world_size, trainer.strategy.root_device,
              trainer.num_training_batches, round(trainer.callback_metrics["loss"].item(), 4))
"""
)

# Devices that the strategy's object was given; none of the last ones is here.
LIGHTNING_DEVICES = """
import lightning, torch
from lightning.fabric.strategies import DeepSpeedStrategy as OfFabric
from lightning.pytorch.strategies import DeepSpeedStrategy as OfTrainer

found = []
for accelerator in ("auto", "cpu"):
    strategy = OfTrainer(parallel_devices=[torch.device("cpu")] * 2)
    trainer = lightning.Trainer(accelerator=accelerator, strategy=strategy, logger=False, enable_checkpointing=False)
    fabric = lightning.Fabric(accelerator=accelerator, strategy=OfFabric(parallel_devices=[torch.device("cpu")] * 2))
    found += [*{type(trainer.accelerator).__name__, type(fabric.accelerator).__name__}, str(trainer.num_devices)]
    statistics = trainer.accelerator.get_device_stats(torch.device("cpu", 0))
    found += [str(len({"cpu_percent", "cpu_vm_percent", "allocated_bytes.all.current"} & {*statistics}))]
    try:
        lightning.Trainer(accelerator=accelerator, strategy=OfTrainer(parallel_devices=[torch.device("cuda", 0)]))
    except Exception as error:
        found.append(str(error).split()[-1])
print(*found)
"""

# A module that the hook waits for, and that comes before it.
HOOKED = """
import sys
from ds_plugin_sdk.integrations.deepspeed import import_hook

import_hook._AFTER = {__name__: "after:then"}
sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, import_hook._Finder)]
import_hook.install()
"""

DS_CONFIG = (
    '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": true}'
)


@pytest.fixture
def train(tmp_path: Path, compiled_once: None) -> Train:
    """``train(script, launcher)`` runs a script and gives the words of the last line that it prints."""

    def run(script: str, launcher: tuple[str, ...] = (), **variables: str) -> list[str]:
        (tmp_path / "train.py").write_text(script, encoding="utf-8")
        (tmp_path / "ds.json").write_text(DS_CONFIG, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, *launcher, "train.py"],
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()[-1].split()

    return run


@pytest.fixture
def zap(install: Install) -> None:
    """A vendor's plugin, on the simulated device."""
    site = install("zap", priority=50, accelerator="zap_device:ZAP_Accelerator", probe="Probe.available(devices=2)")
    (site / "zap_device.py").write_text(ZAP, encoding="utf-8")


def accelerate_launch(*options: str) -> tuple[str, ...]:
    config = ("--use_deepspeed", "--deepspeed_config_file", "ds.json", "--main_process_port", free_port())
    return ("-m", "accelerate.commands.launch", *config, *options)


@pytest.mark.deepspeed
@pytest.mark.compiler
@pytest.mark.slow
def test_accelerate_launch_starts_a_rank_on_each_of_a_vendors_devices(zap: None, train: Train) -> None:
    """By ``python -m``, which executes the command's module past the loader that the import hook gives it."""
    assert train(ACCELERATE, accelerate_launch())[:4] == ["DeepSpeedEngine", "2", "zap:0", "2"]


@pytest.mark.deepspeed
@pytest.mark.slow
def test_the_trainer_trains_in_bfloat16_on_the_cpu_plugin(train: Train) -> None:
    """In two ranks, without ``use_cpu``."""
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}")
    assert train(TRAINER, launcher) == ["DeepSpeedEngine", "2", "cpu", "6", "True"]


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "import torch\n", "import accelerate\n"])
def test_the_trainer_may_be_what_imports_torch(first: str, train: Train) -> None:
    """As in scripts that begin with transformers: its module of arguments was found before there was a hook."""
    script = (
        f"{first}from transformers import TrainingArguments\n"
        "config = {'bf16': {'enabled': True}, 'zero_optimization': {'stage': 2}}\n"
        "print(TrainingArguments('out', bf16=True, deepspeed=config).bf16)\n"
    )
    assert train(script) == ["True"]


@pytest.mark.deepspeed
@pytest.mark.slow
def test_accelerate_on_the_cpu_keeps_deepspeed(train: Train) -> None:
    launched = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    asked = {
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json",
    }
    assert train(ACCELERATE, **launched, **asked)[:4] == ["DeepSpeedEngine", "1", "cpu", "4"]


@pytest.mark.deepspeed
@pytest.mark.slow
def test_debugging_by_accelerate_trains_as_without_a_plugin(train: Train) -> None:
    """It starts ranks that no launcher has numbered, so DeepSpeed cannot be used, which accelerate does not."""
    body = ACCELERATE.replace("accelerator = Accelerator()", "accelerator = Accelerator(deepspeed_plugin=plugin)")
    body = body.replace("accelerator.print", "accelerator.process_index == 0 and print")  # without numbers all print
    script = [
        "def main():",
        "    from accelerate.utils import DeepSpeedPlugin",
        "    plugin = DeepSpeedPlugin(hf_ds_config='ds.json')",
        *(f"    {line}" for line in body.splitlines()),
        "if __name__ == '__main__':",
        "    from accelerate import debug_launcher",
        "    debug_launcher(main, num_processes=2)",
    ]
    assert train("\n".join(script))[:4] == ["DistributedDataParallel", "2", "cpu:0", "2"]


@pytest.mark.deepspeed
@pytest.mark.slow
def test_lightnings_strategy_trains_on_the_cpu_plugin(train: Train) -> None:
    assert train(LIGHTNING)[:4] == ["DeepSpeedEngine", "2", "cpu:0", "2"]


@pytest.mark.deepspeed
def test_a_lightning_strategy_may_have_its_devices(train: Train) -> None:
    """Those of the plugin are the plugin's, with the CPU's statistics, too; of others Lightning says what it says."""
    accelerator = ["PluginAccelerator", "2", "3"]
    assert train(LIGHTNING_DEVICES) == [*accelerator, "['cpu'].", *accelerator, "type"]


# --- Where nothing changes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [name for name in import_hook._AFTER if not name.startswith("deepspeed.")])
def test_what_the_hook_waits_for_exists(module: str) -> None:
    """In the installed releases, of those that are installed: Lightning's parts have a second name each."""
    package, *parts = module.split(".")
    found = importlib.util.find_spec(package)
    if found is not None:
        (folder,) = found.submodule_search_locations or ()
        assert Path(folder, *parts).with_suffix(".py").is_file()


class Device:
    """As much of an accelerator as the adaptations ask."""

    def __init__(self, name: str = "zap") -> None:
        self.name = name

    def device_name(self, index: int | None = None) -> str:
        return self.name if index is None or self.name == "cpu" else f"{self.name}:{index}"

    def communication_backend_name(self) -> str:
        return f"{self.name}ccl"


def state(monkeypatch: pytest.MonkeyPatch, device: Device | None, kind: str = "MULTI_GPU", **flags: bool) -> Any:
    """accelerate's module of state, which finds a device of `kind`, adapted to `device`."""
    kinds = SimpleNamespace(**{name: SimpleNamespace(value=name) for name in ("NO", "DEEPSPEED", kind)})

    class PartialState:
        _cpu = False

        def _prepare_backend(
            self, cpu: bool = False, sagemaker_dp: Any = False, backend: Any = None
        ) -> tuple[str, Any]:
            return "theirs", getattr(kinds, kind)

        def set_device(self) -> None: ...

    found = SimpleNamespace(
        PartialState=PartialState,
        DistributedType=kinds,
        parse_flag_from_env=lambda key, default=False: flags.get(key, default),
        get_int_from_env=lambda keys, default: 0,
    )
    monkeypatch.setattr(hugging_face, "_deepspeeds_accelerator", lambda: device)
    hugging_face.follow_in_state(found)
    return found


def test_accelerate_without_deepspeed_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found = state(monkeypatch, Device())
    assert found.PartialState()._prepare_backend()[0] == "theirs"
    assert found.parse_flag_from_env("ACCELERATE_USE_CPU", True) is True


def test_accelerate_stays_as_it_is_while_deepspeed_uses_no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    found = state(monkeypatch, None, ACCELERATE_USE_DEEPSPEED=True, ACCELERATE_USE_CPU=True)
    assert found.PartialState()._prepare_backend()[0] == "theirs"
    assert found.parse_flag_from_env("ACCELERATE_USE_CPU") is True


@pytest.mark.parametrize(("kind", "device"), [("MULTI_GPU", "cuda"), ("MULTI_NPU", "npu"), ("MULTI_CPU", "cpu")])
def test_a_device_that_accelerate_has_found_itself_is_left_to_it(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = state(monkeypatch, Device(device), kind, ACCELERATE_USE_DEEPSPEED=True)
    assert found.PartialState()._prepare_backend()[0] == "theirs"


def test_deepspeeds_device_goes_before_one_that_accelerate_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = state(monkeypatch, Device("zap"), "MULTI_GPU", ACCELERATE_USE_DEEPSPEED=True)
    assert found.PartialState()._prepare_backend() == ("zapccl", found.DistributedType.DEEPSPEED)
    given = found.PartialState()._prepare_backend(False, None, "gloo")  # by InitProcessGroupKwargs
    assert given == ("gloo", found.DistributedType.DEEPSPEED)


def test_a_request_for_the_cpu_is_no_reason_against_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"ACCELERATE_USE_DEEPSPEED": True, "ACCELERATE_USE_CPU": True}
    assert state(monkeypatch, Device("cpu"), **wanted).parse_flag_from_env("ACCELERATE_USE_CPU") is False
    assert state(monkeypatch, Device("zap"), **wanted).parse_flag_from_env("ACCELERATE_USE_CPU") is True


def test_a_lightning_that_takes_any_device_itself_is_left_alone() -> None:
    class DeepSpeedStrategy:
        def setup_environment(self) -> None: ...

    before = DeepSpeedStrategy.setup_environment
    lightning.follow_in_strategy(SimpleNamespace(DeepSpeedStrategy=DeepSpeedStrategy))
    lightning.follow_in_connector(SimpleNamespace(DeepSpeedStrategy=DeepSpeedStrategy))
    assert DeepSpeedStrategy.setup_environment is before


@pytest.mark.parametrize(
    ("devices", "meant"), [(2, [0, 1]), ("2", [0, 1]), (-1, [0, 1, 2]), ("0,2", [0, 2]), ([1], [1])]
)
def test_devices_as_lightning_takes_them(devices: Any, meant: list[int]) -> None:
    class Accelerator(lightning._Methods):
        device = SimpleNamespace(device_count=lambda: 3)

    assert Accelerator.parse_devices(devices) == meant


def test_a_cpu_has_no_index_as_where_lightning_finds_it_itself() -> None:
    class Accelerator(lightning._Methods):
        device = Device("cpu")

    assert Accelerator.get_parallel_devices([0, 1]) == [torch.device("cpu")] * 2


def test_a_failure_of_an_adaptation_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "lightning_fabric").mkdir()
    (tmp_path / "lightning_fabric" / "__init__.py").write_text("", encoding="utf-8")
    (tmp_path / "lightning_fabric" / "connector.py").write_text("here = True\n", encoding="utf-8")
    program = "import torch, lightning_fabric.connector as c; assert c.here"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.count("RuntimeWarning: ds-plugin-sdk") == 1
    assert "follow_in_connector failed, lightning_fabric.connector stays as it is: AttributeError" in done.stderr


def test_a_module_that_imports_torch_is_adapted_when_it_is_done(tmp_path: Path) -> None:
    """Once, when its own names are all there; one that fails is as without the SDK."""
    (tmp_path / "after.py").write_text("def then(module):\n    print('then', module.done)\n")
    (tmp_path / "whole.py").write_text(f"{HOOKED}done = True\n")
    (tmp_path / "broken.py").write_text(f"{HOOKED}1 / 0\ndone = True\n")
    program = (
        "import importlib, sys, whole\n"
        "print(type(whole.__spec__).__name__, whole.__spec__._initializing)\n"
        "try:\n    import broken\nexcept ZeroDivisionError:\n    print('broken' in sys.modules)\n"
        "importlib.reload(whole)\n"
    )
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["then True", "ModuleSpec False", "False", "then True"], done.stderr
