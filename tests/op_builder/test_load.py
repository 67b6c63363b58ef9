"""What ``load()`` gives, where the native code came from, and what happens when there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

import ds_plugin_sdk
from ds_plugin_sdk.settings import child_environment

pytestmark = pytest.mark.compiler

ADAM_STEP = """
import warnings
warnings.simplefilter("always")
import torch
from ds_plugin_sdk import provenance
from ds_plugin_sdk.op_builder import find
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for name in ("FusedAdamBuilder", "CPUAdamBuilder", "FusedAdamBuilder"):
        find(name, None, "cpu")().load()
from ds_plugin_sdk.ops.adam import adam_
p, g = [torch.ones(5)], [torch.ones(5)]
adam_(p, g, [torch.zeros(5)], [torch.zeros(5)], 1, lr=0.1)
print([(record.name, record.origin) for record in provenance.records()])
print(len([w for w in caught if "falls back to its reference" in str(w.message)]))
print(abs(p[0][0].item() - 0.9) < 1e-5)
for w in caught:
    print(w.message)
"""


def run(program: str, **environment: str) -> tuple[int, str]:
    """Run Python in a new process: exit status, and all that it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=child_environment(**environment),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_two_names_of_one_family_share_one_library_and_the_next_process_finds_it() -> None:
    _, first = run(ADAM_STEP)
    assert first.startswith("[('fused_adam', 'compiled'), ('cpu_adam', 'compiled')]\n0\nTrue"), first
    _, second = run(ADAM_STEP)
    assert second.startswith("[('fused_adam', 'cache'), ('cpu_adam', 'cache')]\n0\nTrue"), second


PRUNED = """
from ds_plugin_sdk import provenance
from ds_plugin_sdk.jit import cache
from ds_plugin_sdk.op_builder import find

find("FusedAdamBuilder", None, "cpu")().load()
cache.prune(everything=True)
find("CPUAdamBuilder", None, "cpu")().load()
print([(record.name, record.origin) for record in provenance.records()])
"""


def test_the_second_name_of_a_family_needs_no_entry_of_the_cache() -> None:
    """`sdk cache prune --all` disturbs no process that has loaded the library."""
    assert run(PRUNED) == (0, "[('fused_adam', 'compiled'), ('cpu_adam', 'compiled')]\n")


def test_without_a_compiler_the_reference_serves_with_one_warning(tmp_path: Path) -> None:
    _, text = run(ADAM_STEP, PATH=str(tmp_path), CXX="no-such-compiler")
    assert text.startswith("[('fused_adam', 'reference'), ('cpu_adam', 'reference')]\n1\nTrue"), text
    assert "op 'adam' falls back to its reference implementation in plain torch" in text
    assert "no-such-compiler" in text


def test_compiling_can_be_forbidden() -> None:
    _, text = run(ADAM_STEP, DS_PLUGIN_COMPILE="0")
    assert "('fused_adam', 'reference')" in text
    assert "DS_PLUGIN_COMPILE=0" in text


def test_falling_back_can_be_forbidden() -> None:
    status, text = run(ADAM_STEP, DS_PLUGIN_COMPILE="0", DS_PLUGIN_FALLBACK="0")
    assert status == 1
    assert "CompileForbiddenError" in text


OF_ONE_FAMILY = """
from ds_plugin_sdk import CppOpBuilder, prebuild, provenance

class FusedAdamBuilder(CppOpBuilder):
    NAME = "fused_adam"

    def sources(self):
        return [self.kernel_path("device.cpp")]

class CPUAdamBuilder(FusedAdamBuilder):
    NAME = "cpu_adam"

    def sources(self):
        return [self.kernel_path("host.cpp")]
"""


def test_builders_of_one_library_list_the_same_sources(tmp_path: Path) -> None:
    for name in ("device", "host"):
        (tmp_path / f"{name}.cpp").write_text(f'extern "C" int zap_{name}() {{ return 1; }}', encoding="utf-8")
    (tmp_path / "zap_adams.py").write_text(OF_ONE_FAMILY, encoding="utf-8")
    environment = {"PYTHONPATH": str(tmp_path), "DS_PLUGIN_FALLBACK": "1"}
    loading = "from zap_adams import *; FusedAdamBuilder().load(); CPUAdamBuilder().load()"
    building = "from zap_adams import *; prebuild.distinct([FusedAdamBuilder(), CPUAdamBuilder()])"
    for program in (loading, building):
        status, text = run(program, **environment)
        assert status == 1
        assert "two builders make one library, 'adam', of different sources" in text
        assert "device.cpp; CPUAdamBuilder: " in text

    own = "CPUAdamBuilder.library = lambda self: self.NAME"
    told = "print([each.library() for each in prebuild.distinct([FusedAdamBuilder(), CPUAdamBuilder()])])"
    found = "print([(record.name, record.origin) for record in provenance.records()])"
    status, text = run("\n".join([loading.replace("*;", "*\n" + own + ";"), told, found]), **environment)
    assert (status, text) == (0, "['adam', 'cpu_adam']\n[('fused_adam', 'cache'), ('cpu_adam', 'compiled')]\n")


FORKED = """
import os, signal, threading
from ds_plugin_sdk import CppOpBuilder

fork, forked = threading.Event(), threading.Event()

class SlowBuilder(CppOpBuilder):
    NAME = "zap_slow"

    def sources(self):
        fork.set()
        forked.wait()
        raise SystemExit

class FusedAdamBuilder(CppOpBuilder):
    NAME = "fused_adam"

    def sources(self):
        return [self.kernel_path("no.cpp")]

threading.Thread(target=lambda: SlowBuilder().load()).start()
fork.wait()
child = os.fork()
if not child:
    signal.alarm(60)
    FusedAdamBuilder().load()
    os._exit(0)
forked.set()
print(os.waitpid(child, 0)[1])
"""


def test_a_forked_process_loads_ops_while_another_thread_did(tmp_path: Path) -> None:
    (tmp_path / "zap_forked.py").write_text(FORKED, encoding="utf-8")
    status, text = run("import zap_forked", PYTHONPATH=str(tmp_path))
    assert (status, text.splitlines()[0]) == (0, "0"), text


PYBIND = """
#include <pybind11/pybind11.h>
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("answer", [] { return 42; }); }
"""


def test_a_pybind11_op_is_its_own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "zap_native"
    package.mkdir()
    (package / "answer.cpp").write_text(PYBIND, encoding="utf-8")
    (package / "__init__.py").write_text(
        textwrap.dedent(
            """
            import pybind11
            from ds_plugin_sdk import CppOpBuilder

            class AnswerBuilder(CppOpBuilder):
                NAME = "zap_answer"
                KIND = "python_module"

                def sources(self):
                    return [self.kernel_path("answer.cpp")]

                def include_paths(self):
                    return [pybind11.get_include()]
            """
        ),
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    status, text = run("from zap_native import AnswerBuilder; print(AnswerBuilder().load().answer())")
    assert (status, text) == (0, "42\n")


TWO_FOLDERS = """
import pybind11
from ds_plugin_sdk import CppOpBuilder

class SumBuilder(CppOpBuilder):
    NAME = "zap_sum"
    KIND = "python_module"

    def sources(self):
        return [self.kernel_path("module.cpp"), self.kernel_path("one/part.cpp"), self.kernel_path("two/part.cpp")]

    def include_paths(self):
        return [pybind11.get_include()]
"""


def test_files_of_one_name_in_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "zap_folders"
    for number, folder in enumerate(("one", "two"), start=1):
        (package / folder).mkdir(parents=True)
        (package / folder / "part.cpp").write_text(f"int {folder}() {{ return {number}; }}\n", encoding="utf-8")
    (package / "module.cpp").write_text(
        "#include <pybind11/pybind11.h>\nint one();\nint two();\n"
        'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("sum", [] { return one() + two(); }); }\n',
        encoding="utf-8",
    )
    (package / "__init__.py").write_text(TWO_FOLDERS, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    status, text = run("from zap_folders import SumBuilder; print(SumBuilder().load().sum())")
    assert (status, text) == (0, "3\n")


BROKEN = """
from ds_plugin_sdk import CppOpBuilder

class BrokenBuilder(CppOpBuilder):
    NAME = "zap_broken"
    KIND = "python_module"

    def sources(self):
        return [self.kernel_path("broken.cpp")]
"""


def test_a_source_that_does_not_compile_is_an_error_that_says_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "zap_broken"
    package.mkdir()
    (package / "broken.cpp").write_text("int main() { return undeclared; }\n", encoding="utf-8")
    (package / "__init__.py").write_text(BROKEN, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    status, text = run("from zap_broken import BrokenBuilder; BrokenBuilder().load()")
    assert status == 1
    assert "CompileError" in text
    assert "plugin 'zap-broken', op 'zap_broken'" in text
    assert "undeclared" in text


RAISES = """
from ds_plugin_sdk import CppOpBuilder

class FusedLionBuilder(CppOpBuilder):
    NAME = "fused_lion"

    def sources(self):
        return [self.kernel_path("lion.cpp")]

    {method}
"""


@pytest.fixture
def install_raising(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make the package ``zap_raises``, whose builder has one more method, and a kernel that registers nothing."""

    def install(method: str) -> None:
        package = tmp_path / "zap_raises"
        package.mkdir()
        (package / "lion.cpp").write_text("void nothing() {}\n", encoding="utf-8")
        (package / "__init__.py").write_text(RAISES.format(method=method), encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    return install


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("def sources(self): raise KeyError('ZAP_HOME')", "KeyError: 'ZAP_HOME'"),
        ("def sources(self): pass", "TypeError: sources() gives None, and must give a list of texts"),
        ("def include_paths(self): return '/opt/zap'", "TypeError: include_paths() gives '/opt/zap', and must give a"),
        ("def cxx_args(self): return '-O3 -g'", "TypeError: cxx_args() gives '-O3 -g', and must give a list of texts"),
        ("def libraries_args(self): return None", "TypeError: libraries_args() gives None, and must give a list"),
        (
            "def sources(self): return 2 * super().sources()",
            "NotImplementedError: FusedLionBuilder.sources() must list",
        ),
    ],
)
def test_a_builder_that_raises_or_gives_no_list_is_named_and_the_reference_serves(
    install_raising: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, method: str, says: str
) -> None:
    install_raising(method)
    load = "from zap_raises import FusedLionBuilder; print(FusedLionBuilder().load())"
    status, text = run(load)
    assert status == 0, text
    assert "op 'lion' falls back to its reference implementation" in text
    assert "an op's builder raises (plugin 'zap-raises', op 'fused_lion'): zap_raises.FusedLionBuilder: " + says in text
    monkeypatch.setenv("DS_PLUGIN_FALLBACK", "0")
    status, text = run(load)
    assert status == 1
    assert "BuildError: an op's builder raises (plugin 'zap-raises', op 'fused_lion')" in text


def test_a_builder_whose_init_calls_no_other_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init = "def __init__(self): self.toolkit = '/opt/zap'"
    (tmp_path / "zap_alone.py").write_text(RAISES.format(method=init), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    status, text = run("from zap_alone import FusedLionBuilder as B; print(B().name, B().error_log)")
    assert (status, text) == (0, "fused_lion None\n")


def test_an_accelerator_names_a_builder_whose_init_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init = "def __init__(self): raise OSError('no toolkit')"
    (tmp_path / "zap_alone.py").write_text(RAISES.format(method=init), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    status, text = run(
        "from ds_plugin_cpu.accelerator import CPU_Accelerator\n"
        "CPU_Accelerator.op_builders = 'zap_alone'\n"
        "CPU_Accelerator().create_op_builder('FusedLionBuilder')"
    )
    assert status == 1
    assert "BuildError: an op's builder raises (plugin 'zap-alone', op 'fused_lion'): zap_alone.FusedLionB" in text


def test_a_package_without_an_init_has_its_sources_in_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zap_spread").mkdir()
    (tmp_path / "zap_spread" / "ops.py").write_text(RAISES.format(method=""), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    status, text = run("from zap_spread.ops import FusedLionBuilder as B; print(B().sources())")
    assert (status, text) == (0, f"['{tmp_path}/zap_spread/lion.cpp']\n")


def test_plugins_that_share_a_namespace_have_their_own_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two distributions bring a package each into ``acme``, which has no ``__init__.py``."""
    for name in ("zip", "zap"):
        package = tmp_path / name / "acme" / name
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "ops.py").write_text(RAISES.format(method=""), encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / name), prepend=os.pathsep)
    status, text = run(
        "import acme.zip.ops, acme.zap.ops\n"
        "for module in (acme.zip.ops, acme.zap.ops):\n"
        "    builder = module.FusedLionBuilder()\n"
        "    print(builder.owner(), builder.kernel_root(), *builder.sources())"
    )
    folders = {name: f"{tmp_path}/{name}/acme/{name}" for name in ("zip", "zap")}
    assert status == 0, text
    assert text == "".join(f"acme-{name} {folder} {folder}/lion.cpp\n" for name, folder in folders.items())


def test_an_sdk_in_an_archive_has_no_sources_to_compile_and_says_so(tmp_path: Path) -> None:
    """A zipapp: Python imports from it, compilers do not."""
    archive = shutil.make_archive(str(tmp_path / "app"), "zip", Path(ds_plugin_sdk.__file__).parents[1])
    status, output = run(f"import sys; sys.path.insert(0, {archive!r})\n{ADAM_STEP}", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert status == 0, output
    assert "'reference'" in output and "True" in output
    assert f"the SDK's kernel sources cannot be found: '{archive}/ds_plugin_sdk' is no folder" in output


REGISTERS_NOTHING = """
import torch
from ds_plugin_sdk import op_builder
from ds_plugin_sdk.ops.lion import lion_

op_builder.use_package("cpu", "zap_raises")
w = torch.ones(4)
for _ in range(2):
    try:
        lion_([w], [torch.ones(4)], [torch.zeros(4)], lr=0.5)
        print(w.tolist())
    except Exception as error:
        print(type(error).__name__)
"""


def test_a_library_that_registers_no_kernel_is_not_taken_for_native(install_raising: Callable[[str], None]) -> None:
    """As where the macro's line is forgotten, or names another device's dispatch key."""
    install_raising("")
    status, text = run(REGISTERS_NOTHING)
    assert status == 0, text
    assert "[0.5, 0.5, 0.5, 0.5]\n[0.0, 0.0, 0.0, 0.0]\n" in text
    says = (
        "op 'lion' falls back to its reference implementation in plain torch, which is slower: a library registers no"
    )
    assert text.count(says) == 1
    assert "no kernel for device 'cpu' (plugin 'zap-raises', op 'fused_lion'): " in text
    assert 'DS_KERNELS_IMPL(CPU, m) { m.impl("<op>", ...); }' in text
    assert run(REGISTERS_NOTHING, DS_PLUGIN_FALLBACK="0") == (0, "ArtifactError\nArtifactError\n")


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("KIND = 'pybind'", "ValueError: kind 'pybind' of op 'lion' must be torch_library or python_module"),
        ("def sources(self): return []", "an op's builder lists no sources (plugin 'zap-raises', op 'fused_lion'): "),
    ],
)
def test_what_cannot_be_built_is_named(install_raising: Callable[[str], None], method: str, says: str) -> None:
    install_raising(method)
    status, text = run("from zap_raises import FusedLionBuilder; FusedLionBuilder().load()")
    assert status == 0, text
    assert says in text


KERNELS = """
import torch
from ds_plugin_sdk.ops import _first_call, lion

print(*(_first_call.has_kernels("lion", device) for device in ("cpu", "mtia", "zap")))
library = torch.library.Library("ds_plugin", "IMPL")
library.impl("lion_", lambda *args: None, {key!r}, allow_override=True)
print(_first_call.has_kernels("lion", "cpu"))
"""


@pytest.mark.parametrize(
    ("key", "has"), [("CPU", "True"), ("AutogradCPU", "True"), ("CompositeExplicitAutograd", "True"), ("XPU", "False")]
)
def test_a_kernel_counts_wherever_torch_would_call_it(key: str, has: str) -> None:
    """torch knows no device of the third name, and no autograd of the second's."""
    status, text = run(KERNELS.format(key=key))
    assert status == 0, text
    assert text.startswith("False False None\n" + has), text


OF_DEEPSPEED = """
from deepspeed.ops.op_builder.builder import OpBuilder

class FusedLionBuilder(OpBuilder):
    NAME = "fused_lion"

    def __init__(self): super().__init__(name=self.NAME)
    def absolute_name(self): return "zap.lion"
    def sources(self): return []
    def load(self, verbose=True): return self
"""


def test_a_builder_of_deepspeeds_own_base_serves_who_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zap_raises.py").write_text(OF_DEEPSPEED, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    status, text = run(REGISTERS_NOTHING)
    assert status == 0, text
    assert "[0.5, 0.5, 0.5, 0.5]\n[0.0, 0.0, 0.0, 0.0]\n" in text
