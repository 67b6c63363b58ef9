"""The commands, as a user types them."""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import ds_plugin_sdk.cli.app
from broken_plugin import install_broken
from ds_plugin_sdk import __version__, cli, registry, report
from ds_plugin_sdk.cli.needs_torch import import_torch
from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.integrations.deepspeed import autoload
from ds_plugin_sdk.settings import child_environment
from launchers import free_port
from plugin_site import MANIFEST, Install, write_plugin

pytestmark = pytest.mark.compiler

Run = Callable[..., str]
ROOT = Path(__file__).resolve().parents[1]


def test_the_command_is_installed_under_both_names() -> None:
    for name in ("sdk", "ds-sdk"):
        done = subprocess.run(
            [Path(sysconfig.get_path("scripts")) / name, "--version"], capture_output=True, text=True, check=True
        )
        assert done.stdout == f"ds-plugin-sdk {__version__}\n"


@pytest.mark.parametrize("module", ["ds_plugin_sdk", "ds_plugin_sdk.cli"])
def test_the_module_is_the_command(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"ds-plugin-sdk {__version__}\n"


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        ("ImportError", ["doctor"]),
        ("OSError", ["list"]),
        ("RuntimeError", ["bench", "jit"]),
        ("ValueError", ["new-plugin", "zap"]),
        ("ImportError", ["conformance", "cpu"]),
        ("ImportError", ["conformance", "--contract"]),
    ],
)
def test_a_torch_that_cannot_be_imported_is_an_error_without_a_traceback(
    error: str, arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(f"raise {error}('libcudart.so.13: no such file')\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "ds_plugin_sdk", *arguments],
        cwd=tmp_path,
        env=child_environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: torch cannot be imported: {error}: libcudart.so.13: no such file\n")
    assert "Traceback" not in done.stderr


def test_a_clone_on_the_path_has_an_unknown_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "zap_clone").mkdir()
    (tmp_path / "zap_clone" / "__init__.py").touch()
    (tmp_path / "zap_remains").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = report.versions_of(["zap-clone", "zap-remains", "zap-none"])
    assert found == {"zap-clone": "unknown", "zap-remains": "not installed", "zap-none": "not installed"}


def test_a_folder_called_torch_is_not_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an uninstall that was interrupted leaves it."""
    empty = ModuleType("torch")
    empty.__file__, empty.__path__ = None, ["/opt/site-packages/torch"]
    monkeypatch.setitem(sys.modules, "torch", empty)
    with pytest.raises(SdkError, match="torch cannot be imported: ImportError: /opt/site-packages/torch is no torch"):
        import_torch()


def test_reports_of_conformance_are_compared_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "ds_plugin_sdk", "conformance", "--diff", "old.json", "new.json"],
        cwd=tmp_path,
        env=child_environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "old.json is no report" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "arguments", [["--version"], ["list", "--help"], ["bench", "--help"], ["cache", "ls"], ["check"]]
)
def test_commands_that_need_no_torch_start_without_it(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n", encoding="utf-8")
    (tmp_path / "train.py").write_text("print()\n", encoding="utf-8")
    command = [*arguments, str(tmp_path / "train.py")] if arguments == ["check"] else arguments
    done = subprocess.run(
        [sys.executable, "-m", "ds_plugin_sdk", *command],
        env=child_environment(PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_an_interrupt_while_commands_are_imported_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupt:
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == "ds_plugin_sdk.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "ds_plugin_sdk.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupt(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130


@pytest.mark.parametrize("arguments", [["--version"], ["list"], ["report", "--json"]])
def test_an_output_that_cannot_be_written_is_one_sentence(arguments: list[str]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full on this system")
    with full.open("w", encoding="utf-8") as output:
        command = [sys.executable, "-m", "ds_plugin_sdk", *arguments]
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("errors", "expected"), [("strict", "backslashreplace"), ("surrogateescape", "surrogateescape")]
)
def test_what_writes_paths_as_they_are_stays(errors: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python's output is in the C locale: a program that reads the path finds it."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdout", output)
    cli._escape_letters()
    assert output.errors == expected


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_a_path_that_the_output_has_no_letters_for_is_escaped(encoding: str, tmp_path: Path) -> None:
    """The name of a folder need not be text: the last byte is none in UTF-8."""
    cache = bytes(tmp_path) + b"/caf\xc3\xa9\xff"
    environment = {**os.environb, b"DS_PLUGIN_CACHE_DIR": cache, b"PYTHONIOENCODING": encoding.encode()}
    command = [sys.executable, "-m", "ds_plugin_sdk", "report"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"\\udcff" in done.stdout


def test_an_error_of_another_file_is_not_taken_for_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ds_plugin_sdk.cli.app, "app", full)
    with pytest.raises(OSError, match="No space left"):
        cli.main()


@pytest.mark.parametrize("arguments", [["--version"], ["list", "--json"]])
def test_a_closed_output_is_no_error(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "ds_plugin_sdk", *arguments]
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *command], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_runs_with_the_lowest_versions_that_are_declared(tmp_path: Path) -> None:
    """Of its pure Python dependencies; torch, which is large, has tests with its oldest release elsewhere."""
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lowest = [
        f"{name}=={version}" for name, version in re.findall(r'(?m)^  "(platformdirs|rich|typer)>=([\d.]+)"', declared)
    ]
    assert len(lowest) == 3
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), *lowest]
    if subprocess.run(install, capture_output=True, check=False).returncode:
        pytest.skip("no package index is reached")
    environment = child_environment(PYTHONPATH=f"{tmp_path}:{ROOT / 'sdk'}")
    for command in (["--help"], ["cache", "ls"]):
        subprocess.run(
            [sys.executable, "-m", "ds_plugin_sdk", *command], env=environment, capture_output=True, check=True
        )


def test_list_names_the_plugins_and_the_choice(sdk: Run, install: Install) -> None:
    install("zap", probe="Probe.absent('no /dev/zap')")
    text = sdk("list", "--explain")
    assert re.search(r"cpu +ds-plugin-cpu 0.1.0 +available: \d+ device.* <- chosen", text)
    assert re.search(r"zap +ds-plugin-zap 1.0 +absent: no /dev/zap", text)
    assert re.search(r"cpu +chosen +the best available: priority -100", text)
    assert re.search(r"accelerate \d[\d.]* +follows +where DeepSpeed is asked for", text)


@pytest.mark.parametrize("arguments", [[], ["--explain"]])
def test_list_says_where_deepspeed_does_not_see_what_is_chosen(
    sdk: Run, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "import ds_plugin_sdk" not in sdk("list", *arguments)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    text = sdk("list", *arguments)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD is not 1" in text and "import ds_plugin_sdk" in text


def test_list_says_that_the_sdk_is_not_installed_where_no_plugin_is(sdk: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Source folders on PYTHONPATH: nothing tells of plugins there."""
    monkeypatch.setattr(registry, "scan", dict)
    monkeypatch.setattr(autoload, "why_not_called", lambda: "ds-plugin-sdk is on the path, and not installed")
    text = sdk("list")
    assert "No plugins are installed" in text and "not installed; a plugin is found where it is installed" in text


def test_list_says_that_other_libraries_are_left_alone(sdk: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_PLUGIN_AUTOLOAD", "0")
    assert re.search(r"accelerate \d[\d.]* +left alone +DS_PLUGIN_AUTOLOAD=0", sdk("list", "--explain"))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"DS_PLUGIN_AUTOLOAD": "0", "DS_ACCELERATOR": "cpu"}, "cpu +left to DeepSpeed +DS_PLUGIN_AUTOLOAD=0"),
        ({"DS_ACCELERATOR": "npu"}, "npu +left to DeepSpeed +DS_ACCELERATOR=npu, and no plugin has that name"),
    ],
)
def test_list_chooses_no_plugin_where_deepspeed_uses_its_own(
    sdk: Run, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], reason: str
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    text = sdk("list", "--explain")
    assert "<- chosen" not in text
    assert re.search(reason, text)


def test_list_as_json(sdk: Run, install: Install) -> None:
    install("zap", body="raise RuntimeError('bad wheel')")
    with pytest.warns(RuntimeWarning, match="bad wheel"):
        text = sdk("list", "--json")
    found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert found["chosen"] == "cpu"
    assert {plugin["name"]: plugin["state"][:6] for plugin in found["plugins"]} == {"cpu": "availa", "zap": "broken"}


def test_list_fails_where_deepspeed_would(sdk: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "zip")
    text = sdk("list", status=1)
    assert "error: DS_ACCELERATOR=zip names nothing that is installed" in text
    assert "Traceback" not in text


def test_build_then_report_then_cache(sdk: Run, tmp_path: Path) -> None:
    assert re.search(r"fused_adam +compiles +ds-plugin-sdk", sdk("report"))
    built = sdk("build", "cpu", "--ops", "fused_adam")
    assert re.search(r"fused_adam +compiled +\d+\.\d s", built)
    assert re.search(r"(cpu|fused)_adam +cache", sdk("report"))
    assert re.search(r"adam +ds-plugin-sdk +\d+\.\d MiB +just now", sdk("cache", "ls"))
    assert "adam" in sdk("cache", "why", "adam")
    assert "1 binaries checked, 0 damaged" in sdk("cache", "verify")
    (library,) = (tmp_path / "kernel-cache").rglob("adam.so")
    library.write_bytes(library.read_bytes()[:-1])
    assert "1 damaged" in sdk("cache", "verify", status=1)
    assert "1 binaries removed" in sdk("cache", "prune", "--all")
    assert "is empty" in sdk("cache", "ls")


def test_report_as_json_has_every_part(sdk: Run) -> None:
    facts = json.loads(sdk("report", "--json"))
    assert set(facts) == {"versions", "accelerator", "compilers", "settings", "ops"}
    assert facts["versions"]["ds-plugin-sdk"] == "0.1.0"
    assert {op["name"] for op in facts["ops"]} >= {"cpu_adam", "fused_adam", "fused_lamb"}
    assert {"cores", "threads of a rank"} <= {what for what, _ in facts["accelerator"]}, "the CPU plugin's own lines"


def test_report_names_the_ops_that_are_deepspeeds_own(sdk: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP6 of the second engine's ops has no CPU kernel; a compatible op of DeepSpeed's would come before it."""
    names = {"GDSBuilder": False, "DeepCompileBuilder": True, "FusedAdamBuilder": True, "InferenceCoreBuilder": True}
    monkeypatch.setattr(report, "_deepspeeds_own", lambda device: names)
    ops = {op["name"]: op for op in json.loads(sdk("report", "--json"))["ops"]}
    lent = {name for name, op in ops.items() if op["origin"] == "lent"}
    assert lent == {"gds", "dc", "inference_core_ops"}
    assert {ops[name]["provider"] for name in lent} == {"deepspeed"}
    assert "not compatible" in ops["gds"]["reason"]


def test_a_plugins_own_lines_are_in_the_report_and_an_error_costs_no_others(sdk: Run, install: Install) -> None:
    install(
        "zap",
        body="from ds_plugin_sdk import Plugin, Probe\n"
        "def lines():\n"
        "    yield 'firmware', 7\n"
        "    raise OSError('the management library is gone')\n"
        "plugin = Plugin('zap', (1, 0), 'ds_plugin_cpu.accelerator:CPU_Accelerator',\n"
        "    probe=lambda: Probe.available(1), report='ds_plugin_zap:lines')\n",
    )
    facts = json.loads(sdk("report", "--json"))
    assert ["firmware", "7"] in facts["accelerator"]
    assert ["ds_plugin_zap:lines", "broken: OSError: the management library is gone"] in facts["accelerator"]
    assert {op["name"] for op in facts["ops"]} >= {"cpu_adam", "fused_adam"}


@pytest.mark.parametrize("report", ["ds_plugin_zap:nothing", "ds_plugin_that_is_missing:lines", "ds_plugin_zap"])
def test_a_report_function_that_is_not_there(sdk: Run, install: Install, report: str) -> None:
    install(
        "zap",
        body="from ds_plugin_sdk import Plugin, Probe\n"
        "plugin = Plugin('zap', (1, 0), 'ds_plugin_cpu.accelerator:CPU_Accelerator',\n"
        f"    probe=lambda: Probe.available(1), report={report!r})\n",
    )
    (problem,) = [what for subject, what in json.loads(sdk("report", "--json"))["accelerator"] if subject == report]
    assert problem.startswith("broken: ")


def test_report_names_a_setting_that_cannot_be_used(sdk: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", 'g++ "')
    facts = json.loads(sdk("report", "--json"))
    assert facts["compilers"]["cxx"] == "absent: CXX='g++ \"' cannot be used: No closing quotation"


def test_report_prints_no_secrets(sdk: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_TOKEN", "very-secret")
    assert "very-secret" not in sdk("report")


def test_build_of_an_unknown_plugin_or_op_says_what_there_is(sdk: Run) -> None:
    assert "installed: cpu" in sdk("build", "zap", status=1)
    assert "its native ops are" in sdk("build", "cpu", "--ops", "nonsense", status=1)
    assert "no op is named" in sdk("build", "cpu", "--ops", "", status=2)


@pytest.mark.parametrize(
    "arguments",
    [
        ("memory", "--threads", "0"),
        ("ops", "--threads", "0"),
        ("all-reduce", "--ranks", "0"),
        ("async-io", "--folder", "/nowhere"),
        ("training", "/nowhere"),
        ("losses", "/nowhere"),
    ],
    ids=" ".join,
)
def test_a_benchmark_of_nothing_is_wrong_use(sdk: Run, arguments: tuple[str, ...]) -> None:
    assert "Invalid value" in sdk("bench", *arguments, status=2)


def test_build_into_what_is_no_folder_compiles_nothing(sdk: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = sdk("build", "cpu", "--ops", "fused_lion", "--into", str(tmp_path / "file" / "out"), status=1)
    assert "binaries cannot be put into" in text and "Not a directory" in text and "choose another folder" in text
    assert "compiled" not in text


def test_build_goes_on_after_an_op_that_fails(sdk: Run, install: Install, tmp_path: Path) -> None:
    install_broken(install)
    ops = "fused_lion,zap_tools,fused_adagrad"
    text = sdk("build", "zap", "--ops", ops, "--into", str(tmp_path / "out"), status=1)
    assert re.search(r"fused_adagrad +compiled", text)
    assert re.search(r"fused_lion +broken .*this kernel is not finished", text)
    assert re.search(r"zap_tools +broken .*ModuleNotFoundError: No module named 'zap_toolkit'", text)
    assert "error: compiling failed (plugin 'zap-builders-" in text
    assert "and these failed too: zap_tools" in text
    assert [*(tmp_path / "out").glob("zap-builders-*/adagrad/adagrad.so")]


def test_a_builder_that_raises_costs_no_other_line_of_the_report(
    sdk: Run, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_broken(install)
    monkeypatch.setenv("DS_ACCELERATOR", "zap")
    ops = {op["name"]: op for op in json.loads(sdk("report", "--json"))["ops"]}
    assert ops["zap_tools"]["origin"] == "broken"
    said = ops["zap_tools"]["reason"]
    assert re.search("op 'zap_tools'.*ZapToolsBuilder: ModuleNotFoundError: No module named 'zap_toolkit'", said)
    assert ops["fused_lion"]["origin"] == "compiles"


ONLY_NATIVE = """
class ZapGreetBuilder(FusedLionBuilder):
    NAME, OWN, KIND = "zap_greet", True, "python_module"

    def sources(self):
        return [self.kernel_path("fused_adagrad.cpp")]
"""


def test_an_op_that_nothing_replaces_is_missing_without_a_compiler(
    sdk: Run, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_broken(install, more=ONLY_NATIVE)
    monkeypatch.setenv("DS_ACCELERATOR", "zap")
    monkeypatch.setenv("CXX", "no-such-compiler")
    ops = {op["name"]: op["origin"] for op in json.loads(sdk("report", "--json"))["ops"]}
    assert (ops["zap_greet"], ops["fused_lion"]) == ("missing", "reference")


def test_an_accelerator_that_does_not_answer_costs_no_other_line_of_the_report(sdk: Run, install: Install) -> None:
    site = install("zap", priority=50, accelerator="zap_device:Zap")
    (site / "zap_device.py").write_text(
        "from ds_plugin_cpu.accelerator import CPU_Accelerator\n"
        "class Zap(CPU_Accelerator):\n"
        "    def supported_dtypes(self):\n"
        "        raise RuntimeError('no driver')\n"
    )
    facts = json.loads(sdk("report", "--json"))
    assert ["types", "raises RuntimeError: no driver"] in facts["accelerator"]
    assert facts["ops"]
    (site / "zap_device.py").unlink()
    del sys.modules["zap_device"]
    importlib.invalidate_caches()
    assert "No module named 'zap_device'" in dict(json.loads(sdk("report", "--json"))["accelerator"])["problem"]


NOT_MADE = """
class FusedLionBuilder(FusedLionBuilder):
    def __init__(self):
        raise OSError("no toolkit")
"""


def test_a_builder_that_cannot_be_made_costs_no_other_line_of_the_report(
    sdk: Run, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_broken(install, more=NOT_MADE)
    monkeypatch.setenv("DS_ACCELERATOR", "zap")
    ops = {op["name"]: op for op in json.loads(sdk("report", "--json"))["ops"]}
    assert ops["fused_lion"]["origin"] == "broken"
    assert re.search(r"an op's builder raises .*FusedLionBuilder: OSError: no toolkit", ops["fused_lion"]["reason"])
    assert ops["fused_adagrad"]["origin"] == "compiles"


def test_the_report_says_that_a_kernel_has_failed_to_compile(
    sdk: Run, install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = install_broken(install)
    monkeypatch.setenv("DS_ACCELERATOR", "zap")

    def lion() -> tuple[str, str]:
        (op,) = (op for op in json.loads(sdk("report", "--json"))["ops"] if op["name"] == "fused_lion")
        return op["origin"], op["reason"]

    sdk("build", "zap", "--ops", "fused_lion", status=1)
    origin, reason = lion()
    assert origin == "failed"
    said = re.fullmatch(r"the build of [-\d: ]+ failed: (.*); log: (.*); it is tried again at the next use", reason)
    assert said is not None and "this kernel is not finished" in said[1], reason
    assert "#error this kernel is not finished" in Path(said[2]).read_text(encoding="utf-8")
    (tmp_path / "site" / package / "fused_lion.cpp").write_text("void nothing() {}\n", encoding="utf-8")
    assert lion()[0] == "compiles"


@pytest.mark.parametrize(
    "command",
    [["jit"], ["import"], ["ops", "--compile"], ["training", "."], ["losses", "."], ["all-reduce"], ["decode"]],
    ids=" ".join,
)
def test_a_benchmark_says_which_package_it_lacks(sdk: Run, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("deepspeed", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    text = sdk("bench", *command, status=1)
    assert re.search(r"error: this benchmark cannot run: (deepspeed|transformers) is not installed\n", text)
    assert re.search(r"-> pip install ('ds-plugin-sdk\[deepspeed\]'|transformers)\n", text)


def test_why_of_an_op_that_was_never_built_says_which_were(sdk: Run) -> None:
    text = sdk("cache", "why", "nope", status=1)
    assert "the cache has no build of this op (op 'nope'): " in text
    assert "has builds of nothing" in text


def test_a_cache_that_cannot_be_read_is_not_called_empty(
    sdk: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "kernel-cache is empty" in sdk("cache", "ls")
    (tmp_path / "file").touch()
    monkeypatch.setenv("DS_PLUGIN_CACHE_DIR", str(tmp_path / "file"))
    text = sdk("cache", "ls")
    assert f"cannot be read: {tmp_path / 'file'} is no folder" in text and "Builds go to a temporary folder" in text
    monkeypatch.setenv("DS_PLUGIN_CACHE_DIR", str(tmp_path / ("x" * 300)))
    assert "File name too long" in sdk("cache", "ls")
    assert "File name too long" in sdk("doctor", "--port", free_port())


def test_list_does_not_ask_what_ds_plugins_excludes(
    sdk: Run, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("zap", body="raise AssertionError('imported')")
    monkeypatch.setenv("DS_PLUGINS", "cpu")
    assert re.search(r"zap +ds-plugin-zap 1.0 +skipped: DS_PLUGINS does not list it", sdk("list"))


def test_prune_wants_to_know_what(sdk: Run) -> None:
    assert "--max-size" in sdk("cache", "prune", status=2)
    assert "is no size" in sdk("cache", "prune", "--max-size", "big", status=2)


@pytest.mark.parametrize("command", ["list", "report"])
def test_json_is_json_whatever_plugins_print(command: str, tmp_path: Path) -> None:
    probe = "Probe.absent('nothing')"
    body = "print('hello')\n" + MANIFEST.format(
        name="loud", sdk_api=(1, 0), accelerator="loud:None", probe=probe, priority=1
    )
    site = write_plugin(tmp_path, "loud", body=body)
    environment = child_environment(
        FORCE_COLOR="1", PYTHONIOENCODING="ascii", DS_PLUGIN_CACHE_DIR=str(tmp_path / "caf\xe9"), PYTHONPATH=str(site)
    )
    arguments = [sys.executable, "-m", "ds_plugin_sdk", command, "--json"]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
    assert "loud" in str(json.loads(done.stdout))


@pytest.mark.parametrize("metadata", [None, b"Name: ds-plugin-bare\nAuthor: Andr\xe9\n"])
def test_a_plugin_whose_metadata_cannot_be_read_has_its_folders_name(tmp_path: Path, metadata: bytes | None) -> None:
    site = write_plugin(tmp_path, "bare")
    file = site / "ds_plugin_bare-1.0.dist-info" / "METADATA"
    file.unlink()
    if metadata is not None:
        file.write_bytes(metadata)
    environment = child_environment(PYTHONPATH=str(site))
    for command in ("list", "report"):
        arguments = [sys.executable, "-m", "ds_plugin_sdk", command]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
        assert "ds_plugin_bare" in done.stdout
