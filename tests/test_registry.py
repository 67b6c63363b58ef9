"""Which plugin is chosen, which is not, and what the user reads."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ds_plugin_sdk.errors import (
    PluginConflictError,
    PluginError,
    PluginLoadError,
    PluginVersionError,
    UnknownAcceleratorError,
)
from ds_plugin_sdk.registry import Probe, load, only, scan
from ds_plugin_sdk.registry.select import decide
from ds_plugin_sdk.settings import child_environment
from plugin_site import Install


def no_hardware() -> str | None:
    return None


def test_scan_reads_metadata_and_imports_nothing(install: Install) -> None:
    install("zap", body="raise RuntimeError('imported')")
    (candidate,) = scan()["zap"]
    assert str(candidate) == "ds-plugin-zap 1.0"


def test_the_highest_priority_among_the_available_is_chosen(install: Install) -> None:
    install("low", priority=1)
    install("high", priority=2)
    install("higher", priority=3, probe="Probe.absent('no /dev/higher')")
    decision = decide(no_hardware)
    assert decision.chosen is not None
    assert decision.chosen.name == "high"
    assert "higher: skipped, ds-plugin-higher 1.0, absent: no /dev/higher" in str(decision)
    assert "high: chosen" in str(decision)


def test_two_of_equal_priority_are_an_error_that_says_how_to_decide(install: Install) -> None:
    install("one")
    install("two")
    with pytest.raises(PluginConflictError, match="DS_ACCELERATOR=one or DS_ACCELERATOR=two"):
        decide(no_hardware)


def test_the_cpu_plugin_stands_aside_for_hardware() -> None:
    assert decide(no_hardware).chosen is not None
    decision = decide(lambda: "cuda")
    assert decision.chosen is None
    assert "cpu: not used, 'cuda' was found" in str(decision)


def test_without_deepspeed_nothing_could_use_the_hardware_and_the_cpu_plugin_serves() -> None:
    decision = decide(lambda: "cuda", deepspeed_installed=False)
    assert decision.chosen is not None
    assert decision.chosen.name == "cpu"
    assert "cpu: not skipped, 'cuda' was found, but DeepSpeed, which could use it, is not" in str(decision)
    assert "not skipped" not in str(decide(no_hardware, deepspeed_installed=False))


def run_where_torch_sees_a_gpu(program: str, **environment: str) -> str:
    """A process whose torch says so; the last line that it prints."""
    gpu = "import torch\ntorch.accelerator.current_accelerator = lambda check_available=False: torch.device('cuda')\n"
    done = subprocess.run(
        [sys.executable, "-c", gpu + program],
        env=child_environment(**environment),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()[-1]


def test_get_accelerator_beside_a_gpu_without_deepspeed() -> None:
    program = (
        "import sys; sys.modules['deepspeed'] = None\n"
        "from ds_plugin_sdk import get_accelerator, registry\n"
        "assert registry.preview().chosen.name == 'cpu'\n"
        "print(get_accelerator().device_name(), *registry.decision().steps, sep='; ')\n"
    )
    said = run_where_torch_sees_a_gpu(program)
    assert re.fullmatch(r"cpu; cpu: available, .*; cpu: not skipped, .*; cpu: chosen, .*", said), said


@pytest.mark.deepspeed
def test_get_accelerator_beside_a_gpu_says_that_deepspeed_would_use_it() -> None:
    """DeepSpeed is installed and not imported: it alone knows the accelerator of a GPU without a plugin."""
    program = (
        "from ds_plugin_sdk import errors, get_accelerator\n"
        "try:\n    get_accelerator()\nexcept errors.PluginLoadError as error:\n    print(error.hint)\n"
    )
    assert "import deepspeed first, which uses that hardware, or set DS_ACCELERATOR=cpu" in run_where_torch_sees_a_gpu(
        program
    )
    forced = "from ds_plugin_sdk import get_accelerator\nprint(get_accelerator().device_name())\n"
    assert run_where_torch_sees_a_gpu(forced, DS_ACCELERATOR="cpu") == "cpu"


@pytest.mark.parametrize(("variable", "value"), [("DS_PLUGIN_AUTOLOAD", "0"), ("DS_PLUGINS", "zap")])
def test_what_is_installed_is_not_to_be_installed_again(variable: str, value: str) -> None:
    program = (
        "from ds_plugin_sdk import errors, get_accelerator\n"
        "try:\n    get_accelerator()\nexcept errors.PluginLoadError as error:\n    print(error.hint)\n"
    )
    hint = run_where_torch_sees_a_gpu(program, **{variable: value})
    assert "pip install" not in hint
    assert "sdk list --explain" in hint


def test_a_class_that_is_not_finished_is_no_damaged_file(install: Install) -> None:
    """Reinstalling it would not help."""
    site = install("zap", accelerator="zap_device:Zap")
    (site / "zap_device.py").write_text(
        "import abc\nclass Zap(abc.ABC):\n    @abc.abstractmethod\n    def memory_stats(self): ...\n"
    )
    with pytest.raises(PluginLoadError, match=r"abstract class Zap .*memory_stats") as caught:
        load(only(scan()["zap"]))
    assert "derive the class from TorchAccelerator, or from PortedAccelerator" in caught.value.hint
    assert "reinstall" not in caught.value.hint


def test_other_hardware_is_not_asked_for_when_a_device_plugin_is_available(install: Install) -> None:
    install("zap")

    def never() -> str | None:
        raise AssertionError("asked")

    assert decide(never).chosen is not None


def test_a_request_by_name_is_obeyed(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("zap", priority=50)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    chosen = decide(lambda: "cuda").chosen
    assert chosen is not None
    assert chosen.name == "cpu"


def test_an_unknown_request_names_what_is_installed(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("zap")
    monkeypatch.setenv("DS_ACCELERATOR", "zip")
    with pytest.raises(
        UnknownAcceleratorError, match=r"installed plugins: cpu, zap.*built into DeepSpeed: cuda"
    ) as error:
        decide(no_hardware, builtin_names=("cuda",))
    assert isinstance(error.value, ValueError)
    assert "by convention called ds-plugin-zip; `sdk list` has what is here" in str(error.value)


@pytest.mark.parametrize(
    ("registered", "asked", "says"),
    [
        ("Zap", "zap", "the installed one is called 'Zap'"),
        ("zap-one", "zap_one", "the installed one is called 'zap-one'"),
        (
            "zop",
            "zap",
            "ds-plugin-zap 1.0 is here and registers no plugin 'zap': write zap = \"package:plugin\" under "
            '[project.entry-points."ds_plugin_sdk.plugins"] of its pyproject.toml, and install it again',
        ),
        ("zap", "zap ", "the installed one is called 'zap'"),
        ("zop", "zap,zop", "name one accelerator, as `sdk list` shows them"),
        ("zop", "ZAP", "name one accelerator, as `sdk list` shows them"),
    ],
)
def test_what_is_installed_under_another_name_is_not_to_be_installed_again(
    install: Install, monkeypatch: pytest.MonkeyPatch, registered: str, asked: str, says: str
) -> None:
    install(registered, distribution="ds-plugin-zap")
    monkeypatch.setenv("DS_ACCELERATOR", asked)
    with pytest.raises(UnknownAcceleratorError, match=re.escape(says)):
        decide(no_hardware)


def test_a_name_of_deepspeeds_own_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert decide(no_hardware, builtin_names=("cuda", "cpu")).chosen is None


@pytest.mark.parametrize("probe", ["Probe.absent('no GPU')", "Probe.broken('driver 1 < 2')"])
def test_a_name_of_deepspeeds_own_is_left_to_it_where_the_plugin_has_no_device(
    install: Install, monkeypatch: pytest.MonkeyPatch, probe: str
) -> None:
    """As DS_ACCELERATOR=cuda is how DeepSpeed's ops for GPUs are built on machines that have none."""
    install("npu", probe=probe)
    monkeypatch.setenv("DS_ACCELERATOR", "npu")
    if "broken" in probe:
        with pytest.raises(PluginError, match="driver 1 < 2"):
            decide(no_hardware, builtin_names=("npu", "cpu"))
    else:
        decision = decide(no_hardware, builtin_names=("npu", "cpu"))
        assert decision.chosen is None and "absent: no GPU" in str(decision)


@pytest.mark.parametrize("probe", ["Probe.absent('no /dev/zap')", "Probe.broken('driver 1 < 2')", "1 / 0"])
def test_a_request_that_cannot_be_met_raises(install: Install, monkeypatch: pytest.MonkeyPatch, probe: str) -> None:
    install("zap", probe=probe)
    monkeypatch.setenv("DS_ACCELERATOR", "zap")
    with pytest.raises(PluginError, match=r"plugin 'zap'.*(no /dev/zap|driver 1 < 2|ZeroDivisionError)"):
        decide(no_hardware)


def test_a_broken_plugin_is_skipped_once_and_loudly(install: Install) -> None:
    install("zap", body="raise RuntimeError('bad wheel')")
    with pytest.warns(RuntimeWarning, match=r"plugin 'zap' is skipped: .*RuntimeError: bad wheel") as caught:
        decision = decide(no_hardware)
    assert len(caught) == 1
    assert decision.chosen is not None
    assert decision.chosen.name == "cpu"


READS = "from ds_plugin_sdk import Plugin, Probe\nfrom ds_plugin_sdk.settings import settings\n"
READS_AT_IMPORT = READS + "plugin = settings.cpu_threads\n"
READS_IN_PROBE = READS + "plugin = Plugin('zap', (1, 0), 'a:B', probe=lambda: Probe.available(settings.cpu_threads))\n"


@pytest.mark.parametrize("body", [READS_AT_IMPORT, READS_IN_PROBE], ids=["import", "probe"])
def test_a_setting_that_a_plugin_cannot_use_is_to_be_corrected_and_not_the_plugin(
    install: Install, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    install("zap", body=body)
    monkeypatch.setenv("DS_PLUGIN_CPU_THREADS", "many")
    with pytest.warns(RuntimeWarning, match="DS_PLUGIN_CPU_THREADS='many' cannot be used") as caught:
        decide(no_hardware)
    assert "-> correct it or unset it; DS_PLUGIN_CPU_THREADS: threads of each rank" in str(caught[0].message)
    assert "pip" not in str(caught[0].message)


def test_a_setting_that_an_accelerator_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_PLUGIN_CPU_THREADS", "many")
    with pytest.raises(PluginLoadError, match="DS_PLUGIN_CPU_THREADS='many' cannot be used") as caught:
        load(only(scan()["cpu"]))
    assert caught.value.hint.startswith("correct it or unset it; DS_PLUGIN_CPU_THREADS")


def test_where_no_thread_can_be_started_plugins_are_asked_all_the_same(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    install("zap")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    decision = decide(no_hardware)
    assert decision.chosen is not None and decision.chosen.name == "zap"


def test_a_missing_dependency_is_told_from_a_broken_plugin(install: Install) -> None:
    install("zap", body="import zap_runtime_library")
    with pytest.raises(PluginLoadError, match="pip install zap_runtime_library"):
        _ = only(scan()["zap"]).manifest


def test_an_entry_point_that_names_nothing_is_quoted(install: Install) -> None:
    site = install("zap")
    (site / "ds_plugin_zap-1.0.dist-info" / "entry_points.txt").write_text(
        "[ds_plugin_sdk.plugins]\nzap = ds-plugin-zap:plugin\n", encoding="utf-8"
    )
    says = r"'ds-plugin-zap:plugin' of ds-plugin-zap 1.0 is no 'module:object'\n.*write zap = \"package:plugin\""
    with pytest.raises(PluginLoadError, match=says):
        _ = only(scan()["zap"]).manifest


def test_an_error_at_import_names_the_entry_point(install: Install) -> None:
    install("zap", body="1 / 0")
    with pytest.raises(PluginLoadError, match=r"ds_plugin_zap:plugin of ds-plugin-zap 1.0: ZeroDivisionError"):
        _ = only(scan()["zap"]).manifest


def test_an_entry_point_that_is_no_manifest(install: Install) -> None:
    install("zap", body="plugin = 'zap'")
    with pytest.raises(PluginLoadError, match=r"is 'zap'.*\n.*ds_plugin_sdk.Plugin\(name='zap'"):
        _ = only(scan()["zap"]).manifest


def test_a_manifest_under_another_name(install: Install) -> None:
    install("zap", body="from ds_plugin_sdk import Plugin\nplugin = Plugin('cpu', (1, 0), 'a:b', lambda: None)")
    with pytest.raises(PluginLoadError, match="a Plugin named 'cpu'"):
        _ = only(scan()["zap"]).manifest


@pytest.mark.parametrize(
    ("needs", "upgrade"), [((1, 99), "ds-plugin-sdk"), ((2, 0), "ds-plugin-sdk"), ((0, 9), "ds-plugin-zap")]
)
def test_handshake(install: Install, needs: tuple[int, int], upgrade: str) -> None:
    install("zap", sdk_api=needs)
    with pytest.raises(PluginVersionError, match=f"pip install --upgrade {upgrade}$"):
        _ = only(scan()["zap"]).manifest


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ("'zap', '1.0', 'a:b', probe", "sdk_api is '1.0', and must be two whole numbers, such as (1, 0)"),
        ("'zap', (1, 0), 'a.b', probe", "accelerator is 'a.b', and must be 'module:Class'"),
        ("'zap', (1, 0), 'a:b', probe()", "probe is Probe"),
        ("'zap', (1, 0), 'a:b', probe, priority='high'", "priority is 'high', and must be a whole number"),
        ("'zap', (1, 0), 'a:b', probe, report=print", "report is <built-in function print>"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(install: Install, fields: str, problem: str) -> None:
    install(
        "zap",
        body="from ds_plugin_sdk import Plugin, Probe\n"
        f"probe = lambda: Probe.available(1)\nplugin = Plugin({fields})\n",
    )
    (candidate,) = scan()["zap"]
    with pytest.raises(PluginLoadError, match=re.escape(problem)):
        _ = candidate.manifest
    assert "manifest cannot be used" in candidate.probe().detail


SLOW = """
import time, pathlib
from ds_plugin_sdk import Plugin, Probe
{at_import}
def probe():
    with pathlib.Path({log!r}).open('a') as log:
        log.write('asked ')
    {in_probe}
    return Probe.available(1)
plugin = Plugin('zap', (1, 0), 'a:b', probe)
"""


@pytest.mark.parametrize("where", ["at_import", "in_probe"])
def test_a_plugin_that_hangs_is_skipped_when_its_time_is_over(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    log = tmp_path / "log"
    body = SLOW.format(**{"at_import": "", "in_probe": "", "log": str(log), where: "time.sleep(30)"})
    # A module of its own: the thread that is left alone keeps importing it.
    install("zap", distribution=f"ds-plugin-sleeps-{where}", body=body)
    monkeypatch.setenv("DS_PLUGIN_PROBE_TIMEOUT", "1")
    began = time.monotonic()
    for _ in range(2):  # it is not waited for twice
        with pytest.warns(RuntimeWarning, match=r"'zap' is skipped: .*did not return within 1 s \(DS_PLUGIN_PROBE_TI"):
            decision = decide(no_hardware)
        assert decision.chosen is not None
        assert decision.chosen.name == "cpu"
    assert time.monotonic() - began < 10
    assert not log.exists() or log.read_text(encoding="utf-8") == "asked "


@pytest.mark.parametrize("raised", ["SystemExit", "GeneratorExit", "asyncio.CancelledError"])
@pytest.mark.parametrize("where", ["at_import", "in_probe"])
def test_a_plugin_cannot_end_the_program(install: Install, tmp_path: Path, raised: str, where: str) -> None:
    """As the panics of programs in Rust, too, are no `Exception`."""
    body = {"at_import": "", "in_probe": "", where: f"raise {raised}(3)"}
    install("zap", body="import asyncio\n" + SLOW.format(**body, log=str(tmp_path / "log")))
    with pytest.warns(RuntimeWarning, match=rf"plugin 'zap' is skipped: .*{raised.removeprefix('asyncio.')}: 3"):
        assert decide(no_hardware).chosen is not None


def test_a_manifest_for_a_newer_sdk_is_told_as_one(install: Install) -> None:
    install("zap", body="from ds_plugin_sdk import Plugin\nplugin = Plugin('zap', (1, 9), 'a:b', None, colour='red')\n")
    with pytest.warns(RuntimeWarning, match=r"'zap' is skipped: .*\n.*pip install --upgrade ds-plugin-sdk"):
        assert decide(no_hardware).chosen is not None


@pytest.mark.parametrize(
    ("probe", "says"),
    [
        (
            "Probe.available(devices=0)",
            "devices=0), whose number of devices must be a whole one from 1 on; Probe.absent(",
        ),
        ("Probe.available(devices=True)", "devices=True), whose number of devices must be"),
        ("Probe.available(devices='two')", "devices='two'), whose number of devices must be"),
        ("Probe('avalable', devices=1)", "devices=1), whose state must be one of available, absent, broken"),
    ],
)
def test_an_answer_that_says_nothing_is_no_answer(install: Install, probe: str, says: str) -> None:
    install("zap", probe=probe)
    with pytest.warns(RuntimeWarning, match=f"plugin 'zap' is skipped: its probe gave Probe.*{re.escape(says)}"):
        chosen = decide(no_hardware).chosen
    assert chosen is not None
    assert chosen.name == "cpu"


def test_a_probe_is_asked_once_in_a_process(install: Install, tmp_path: Path) -> None:
    log = tmp_path / "log"
    install("zap", body=SLOW.format(at_import="", in_probe="", log=str(log)))
    for _ in range(2):
        assert scan()["zap"][0].probe().state == "available"
    assert log.read_text(encoding="utf-8") == "asked "


def test_two_distributions_of_one_name(install: Install) -> None:
    install("cpu", distribution="ds-plugin-impostor")
    with pytest.raises(PluginConflictError, match=r"ds-plugin-cpu 0.1.0 and ds-plugin-impostor 1.0"):
        only(scan()["cpu"])
    with pytest.warns(RuntimeWarning, match="two distributions offer the same plugin"):
        assert decide(no_hardware).chosen is None


def test_plugins_can_be_allow_listed(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("zap")
    monkeypatch.setenv("DS_PLUGINS", "cpu")
    chosen = decide(no_hardware).chosen
    assert chosen is not None
    assert chosen.name == "cpu"
    monkeypatch.setenv("DS_ACCELERATOR", "zap")
    with pytest.raises(PluginError, match="DS_PLUGINS=cpu does not list it"):
        decide(no_hardware)


def test_a_list_that_allows_none_of_the_plugins_is_told(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("zap")
    monkeypatch.setenv("DS_PLUGINS", "cpu,zapp")
    assert decide(no_hardware).chosen is not None
    monkeypatch.setenv("DS_PLUGINS", "zapp")
    with pytest.warns(RuntimeWarning, match="DS_PLUGINS=zapp lists none of the installed plugins: cpu, zap"):
        assert decide(no_hardware).chosen is None


def test_autoload_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_PLUGIN_AUTOLOAD", "0")
    assert decide(no_hardware).chosen is None


def test_without_autoload_a_plugin_has_a_name_that_deepspeed_lacks(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("zap")
    monkeypatch.setenv("DS_PLUGIN_AUTOLOAD", "0")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    left = decide(no_hardware, ("cuda", "cpu"))
    assert left.is_deepspeeds
    monkeypatch.setenv("DS_ACCELERATOR", "zap")
    chosen = decide(no_hardware, ("cuda", "cpu"))
    assert chosen.chosen is not None and chosen.chosen.name == "zap"


def test_probe_reads_as_a_sentence() -> None:
    assert str(Probe.available(1)) == "available: 1 device"
    assert str(Probe.available(2, "simulated")) == "available: 2 devices (simulated)"
    assert str(Probe.absent("no driver")) == "absent: no driver"
