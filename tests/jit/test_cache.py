"""What is a hit and what is a miss, for each thing that a binary depends on."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from small_op import EXPORT, CountingCompiler, Project, answer, entry_folder, make_project, other_torch, script
from typer.testing import CliRunner

from ds_plugin_sdk.cli.app import app
from ds_plugin_sdk.jit import BuildSpec, Source, acquire, cache, explain, machine, plan, target

pytestmark = pytest.mark.compiler


Change = Callable[[Project, Path], object]


def key_of(spec: BuildSpec) -> str:
    return plan.make_plan(plan.make_request(spec)).direct


def test_compiles_once_then_finds_it(project: Project, counting: CountingCompiler) -> None:
    first, second = acquire(project.spec()), acquire(project.spec())
    assert (first.origin, second.origin) == ("compiled", "cache")
    assert first.path == second.path
    assert answer(first.path) == 42
    assert counting.count() == 1
    assert "first build" in first.reason


def test_the_key_tells_what_was_built(project: Project) -> None:
    artifact = acquire(project.spec(cxx_args=("-march=native",)))
    key = artifact.key["key"]
    assert key["cpu"] == target.here().level
    text = (artifact.path.parent / "key.json").read_text()
    assert "native" not in text
    assert "$test/answer.cpp" in text
    assert str(project.root) not in text


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("checkout/answer.cpp", f"{EXPORT} int answer() {{ return 7; }}", "$test/answer.cpp changed"),
        ("checkout/answer.h", "#define ANSWER 50", "header $test/answer.h changed"),
        ("shared/shared.h", "#define SHARED 12", "shared.h changed"),
    ],
    ids=["source", "own header", "foreign header"],
)
def test_changed_files_are_compiled_again(project: Project, file: str, text: str, told: str, tmp_path: Path) -> None:
    before = acquire(project.spec())
    assert answer(before.path) == 42
    (tmp_path / file).write_text(text)
    after = acquire(project.spec())
    assert after.origin == "compiled"
    assert told in after.reason
    assert answer(after.path) != 42
    assert acquire(project.spec()).origin == "cache"


def test_a_change_taken_back_is_a_hit(project: Project, counting: CountingCompiler) -> None:
    header = project.root / "answer.h"
    original = header.read_text()
    first = acquire(project.spec())
    header.write_text("#define ANSWER 1\n")
    acquire(project.spec())
    header.write_text(original)
    assert acquire(project.spec()).path == first.path
    assert counting.count() == 2


def test_a_reason_that_two_builds_share_is_told_once(project: Project) -> None:
    header = project.root / "answer.h"
    for number in (1, 2, 3):
        header.write_text(f"#define ANSWER {number}\n")
        told = acquire(project.spec()).reason
    assert told.count("header $test/answer.h changed") == 1


def test_own_headers_are_read_even_when_their_time_stamps_lie(project: Project) -> None:
    header = project.root / "answer.h"
    acquire(project.spec())
    state = header.stat()
    header.write_text("#define ANSWER 41\n")  # as long as before
    os.utime(header, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert answer(acquire(project.spec()).path) == 43


def test_foreign_headers_may_be_copied_about(project: Project, counting: CountingCompiler) -> None:
    """Another time stamp alone is not another header."""
    acquire(project.spec())
    os.utime(project.shared / "shared.h", (1, 1))
    assert acquire(project.spec()).origin == "cache"
    assert counting.count() == 1


@pytest.mark.parametrize(
    "named",
    [
        "-lzap",
        "-Wl,-Bstatic -lzap -Wl,-Bdynamic",
        "-l:libzap.a",
        "{archive}",
        "-Wl,--whole-archive,{archive},--no-whole-archive",
    ],
)
def test_a_static_library_that_was_made_anew_is_linked_anew(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """Or an object file: their code is copied into the library."""
    monkeypatch.setenv("LDFLAGS", f"-L{tmp_path}")
    archive, source = tmp_path / "libzap.a", project.root / "answer.cpp"
    source.write_text(f'int zap(); extern "C" {EXPORT} int answer() {{ return zap(); }}', encoding="utf-8")
    spec = project.spec(link_args=tuple(named.format(archive=archive).split()))
    if "-Bstatic" in named:  # a shared one is there, too, and is not linked
        subprocess.run(["c++", "-shared", "-xc++", "/dev/null", "-o", tmp_path / "libzap.so"], check=True)

    def make(number: int) -> None:
        (tmp_path / "zap.cpp").write_text(f"int zap() {{ return {number}; }}", encoding="utf-8")
        subprocess.run(["c++", "-fPIC", "-c", "zap.cpp"], cwd=tmp_path, check=True)
        archive.unlink(missing_ok=True)
        subprocess.run(["ar", "rcs", archive, "zap.o"], cwd=tmp_path, check=True)

    for number in (1, 2):
        make(number)
        first, second = acquire(spec), acquire(spec)
        assert (first.origin, second.origin, answer(first.path)) == ("compiled", "cache", number)
    make(3)
    assert any("rebuilt: linked: " in line for line in explain(spec))


def test_a_header_that_is_gone_is_told(project: Project) -> None:
    acquire(project.spec())
    (project.shared / "shared.h").unlink()
    assert any("shared.h is gone" in line for line in explain(project.spec()))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cxx_args": ("-O1",)}, "cxx_args: nothing -> -O1"),
        ({"link_args": ("-Wl,-O1",)}, "link_args: nothing -> -Wl,-O1"),
        ({"include_dirs": "more"}, "commands"),
    ],
)
def test_arguments_are_part_of_the_key(project: Project, changes: dict[str, object], told: str, tmp_path: Path) -> None:
    acquire(project.spec())
    if "include_dirs" in changes:
        changes = {"include_dirs": (*project.spec().include_dirs, tmp_path)}
    again = acquire(project.spec(**changes))
    assert again.origin == "compiled"
    assert told in again.reason


def test_tagged_units_of_one_file(project: Project) -> None:
    unit = 'extern "C" int LEVEL() { return 1; }\n'
    (project.root / "level.cpp").write_text(unit)
    levels = tuple(Source(project.root / "level.cpp", (f"-DLEVEL={name}",), name) for name in ("low", "high"))
    spec = project.spec(sources=(*project.spec().sources, *levels))
    artifact = acquire(spec)
    assert answer(artifact.path) == 42
    assert key_of(spec) != key_of(replace(spec, sources=spec.sources[:2]))


@pytest.mark.parametrize("variable", ["CFLAGS", "CXXFLAGS", "LDFLAGS", "CPATH", "LD_RUN_PATH"])
def test_the_environment_is_part_of_the_key(
    project: Project, variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = key_of(project.spec())
    monkeypatch.setenv(variable, str(tmp_path) if variable.endswith("PATH") else "-g")
    assert key_of(project.spec()) != before


@pytest.mark.parametrize("by", ["LDFLAGS", "link_args"])
def test_what_only_the_link_depends_on_compiles_nothing_again(
    project: Project, counting: CountingCompiler, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = acquire(project.spec())
    monkeypatch.setenv("LDFLAGS", "-Wl,-soname,ldflags.so" if by == "LDFLAGS" else "")
    after = acquire(project.spec(link_args=("-Wl,-soname,args.so",) if by == "link_args" else ()))
    assert (after.origin, counting.count()) == ("compiled", 1)
    assert after.path != before.path and after.path.read_bytes() != before.path.read_bytes()
    assert answer(after.path) == 42
    assert after.key["headers"] == before.key["headers"]
    assert "The objects are those of an earlier build." in (after.path.parent / "build.log").read_text()


def spoil(folder: Path) -> None:
    with (folder / "answer.cpp.o").open("r+b") as file:
        file.write(b"x")


@pytest.mark.parametrize(
    "change",
    [
        lambda project, _: (project.root / "answer.h").write_text("#define ANSWER 50\n"),
        lambda project, _: (project.shared / "shared.h").write_text("#define SHARED 12\n"),
        lambda _, folder: spoil(folder),
        lambda _, folder: (folder / "answer.cpp.o").unlink(),
        lambda _, folder: (folder / "key.json").write_text("{}"),
        lambda _, folder: folder.chmod(0o777),
        lambda *_: cache.prune(older_than=1e9),
    ],
    ids=["own header", "foreign header", "spoiled", "gone", "no key", "open to others", "pruned"],
)
def test_objects_of_something_else_are_not_linked(
    project: Project, counting: CountingCompiler, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire(project.spec())
    (folder,) = (cache.root() / "v1" / ".objects").iterdir()
    change(project, folder)
    monkeypatch.setenv("LDFLAGS", "-Wl,-O1")
    expected = {"#define ANSWER 50\n": 52, "#define ANSWER 40\n": 42}[(project.root / "answer.h").read_text()]
    expected += 10 * ("12" in (project.shared / "shared.h").read_text())
    assert answer(acquire(project.spec()).path) == expected
    assert counting.count() == 2


def test_objects_are_kept_for_a_day(project: Project) -> None:
    acquire(project.spec(cxx_args=("-O1",)))
    (old,) = (cache.root() / "v1" / ".objects").iterdir()
    os.utime(old, (time.time() - 25 * 3600,) * 2)
    acquire(project.spec(cxx_args=("-O2",)))
    (new,) = (cache.root() / "v1" / ".objects").iterdir()
    assert new != old


def test_the_users_flags_reach_the_compiler(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    (project.root / "answer.cpp").write_text(f"{EXPORT} int answer() {{ return FROM_C + FROM_CXX; }}")
    monkeypatch.setenv("CFLAGS", "-DFROM_C=1")
    monkeypatch.setenv("CXXFLAGS", "-DFROM_CXX=2")
    assert answer(acquire(project.spec()).path) == 3


def test_another_compiler_is_another_key(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is upgraded in its place says another version; the reason names both."""
    acquire(project.spec())
    real = shutil.which("c++")
    fake = script(
        tmp_path / "c++-99", f'[ "$1" = --version ] && {{ echo "g++ (Test) 99.1.0"; exit; }}\nexec {real} "$@"\n'
    )
    monkeypatch.setenv("CXX", str(fake))
    upgraded = acquire(project.spec())
    assert upgraded.origin == "compiled"
    assert "99.1.0" in upgraded.reason and "rebuilt: cxx " in upgraded.reason


def test_a_compiler_by_another_of_its_names_says_so(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same file, but clang is another compiler by the name clang++; GCC says in `--version` what it was called."""
    acquire(project.spec())
    other = tmp_path / "other-g++"
    other.symlink_to(Path(str(shutil.which("c++"))).resolve())
    monkeypatch.setenv("CXX", str(other))
    reason = acquire(project.spec()).reason
    assert re.search(r"rebuilt: (cxx|commands).* -> .*other-g\+\+", reason), reason


def test_a_reason_names_what_has_changed_beside_the_users_arguments(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which conda sets always."""
    monkeypatch.setenv("CXXFLAGS", "-DMORE=1")
    acquire(project.spec())
    monkeypatch.setenv("LDFLAGS", "-Wl,-O1")
    reason = acquire(project.spec()).reason
    assert "-Wl,-O1" in reason and "user_args" not in reason


def test_a_compiler_replaced_in_place_is_seen(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.which("c++")
    body = '[ "$1" = --version ] && {{ echo "g++ {version}"; exit; }}\nexec {real} "$@"\n'
    fake = script(tmp_path / "g++", body.format(version="9.1.0", real=real))
    monkeypatch.setenv("CXX", str(fake))
    acquire(project.spec())
    script(fake, body.format(version="10.2.0", real=real))
    again = acquire(project.spec())
    assert again.origin == "compiled"
    assert "cxx 9.1.0 -> 10.2.0" in again.reason
    assert any("cxx 9.1.0 -> 10.2.0" in line for line in cache.why("answer"))


def test_the_stable_abi_serves_every_torch_and_the_exact_one_does_not(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    stable, exact = project.spec(), project.spec(cxx_args=("-UTORCH_TARGET_VERSION",))
    before = key_of(stable), key_of(exact)
    other_torch(monkeypatch, "2.99.0")
    assert key_of(stable) == before[0]
    assert key_of(exact) != before[1]


def test_python_modules_depend_on_the_python(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    library, module = project.spec(), project.spec(kind="python_module")
    before = key_of(library), key_of(module)
    other = replace(machine.here(), python_abi="cpython-399-test")
    monkeypatch.setattr(machine, "here", lambda: other)
    assert key_of(library) == before[0]
    assert key_of(module) != before[1]


def test_the_cpu_counts_only_for_code_made_for_it(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    anywhere, native = project.spec(), project.spec(cxx_args=("-march=native",))
    before = key_of(anywhere), key_of(native)
    level = "x86-64-v2" if machine.here().target.level != "x86-64-v2" else "x86-64-v3"  # another one than here
    other = replace(machine.here(), target=target.CpuTarget("x86_64", level))
    monkeypatch.setattr(machine, "here", lambda: other)
    assert key_of(anywhere) == before[0]
    assert key_of(native) != before[1]


def test_two_checkouts_share_one_build(tmp_path: Path, counting: CountingCompiler) -> None:
    one = make_project(tmp_path / "one", tmp_path / "shared")
    two = make_project(tmp_path / "two" / "deeper", tmp_path / "shared")
    # Folders outside the roots stand in the key as they are.
    assert acquire(one.spec()).path == acquire(two.spec()).path
    assert counting.count() == 1


def test_explain_changes_nothing(project: Project) -> None:
    assert explain(project.spec()) == ["to be compiled: first build"]
    assert not cache.root().exists()
    path = acquire(project.spec()).path.parent
    assert explain(project.spec()) == [f"cache {path}: the key matches"]


def test_entries_tell_size_age_and_use(project: Project) -> None:
    start = time.time()
    folder = acquire(project.spec()).path.parent
    (entry,) = cache.entries()
    assert (entry.owner, entry.op, entry.path) == ("ds-plugin-test", "answer", folder)
    assert entry.bytes == sum(file.stat().st_size for file in folder.iterdir())
    assert start - 1 <= entry.created <= time.time()
    long_ago = start - 7200
    os.utime(folder / "key.json", (long_ago, long_ago))
    acquire(project.spec())
    assert cache.entries()[0].last_used >= start - 1


def test_verify_names_what_is_damaged(project: Project) -> None:
    folder = acquire(project.spec()).path.parent
    assert cache.verify() == []
    with (folder / "answer.so").open("r+b") as file:
        file.write(b"x")
    (problem,) = cache.verify()
    assert "answer.so does not match its SHA-256" in problem
    folder.chmod(0o777)
    assert any("can be written by everybody" in problem for problem in cache.verify())


def test_prune_takes_the_least_recently_used(project: Project) -> None:
    paths = []
    for number in range(3):
        (project.root / "answer.h").write_text(f"#define ANSWER {number}\n")
        paths.append(acquire(project.spec()).path.parent)
        os.utime(paths[-1] / "key.json", (1000 + number, 1000 + number))
    size = cache.entries()[0].bytes
    assert {entry.path for entry in cache.prune(max_bytes=int(2.5 * size)).removed} == {paths[0]}
    assert {entry.path for entry in cache.prune(older_than=time.time() - 1001.5).removed} == {paths[1]}
    assert [entry.path for entry in cache.entries()] == [paths[2]]
    assert cache.prune() == ([], [])
    assert len(cache.prune(everything=True).removed) == 1
    assert cache.entries() == []


def test_prune_says_what_it_could_not_remove(project: Project) -> None:
    """As another user's cache is to those who may only read it; root may write everywhere, but in no file."""
    path = acquire(project.spec()).path.parent
    workplaces = cache.root() / "v1" / ".build"
    workplaces.rmdir()
    workplaces.touch()
    removed, ((kept, why_not),) = cache.prune(everything=True)
    assert (removed, kept.path) == ([], path)
    assert "Not a directory" in why_not
    done = CliRunner().invoke(app, ["cache", "prune", "--all"])
    assert done.exit_code == 1
    assert "0 binaries removed" in done.stdout and "1 cannot be removed: [Errno 20] Not a directory" in done.stdout


def test_why_without_a_build() -> None:
    assert cache.why("nothing") == []


def test_the_users_cache_is_private(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DS_PLUGIN_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    folder = acquire(project.spec()).path.parent
    while folder != tmp_path / "home":
        assert folder.stat().st_mode & 0o077 == 0 or folder == entry_folder(), folder
        folder = folder.parent


def test_a_file_system_that_refuses_to_change_modes_keeps_kernels(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a usual umask nothing need be changed."""
    monkeypatch.setattr(Path, "chmod", Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted")))
    assert acquire(project.spec()).origin == "compiled"
    assert acquire(project.spec()).origin == "cache"


@pytest.mark.parametrize(
    ("umask", "folders", "files"), [(0o022, 0o755, 0o644), (0o027, 0o750, 0o640), (0, 0o755, 0o644)]
)
def test_a_cache_that_was_named_can_be_read_as_the_umask_allows(
    project: Project, umask: int, folders: int, files: int
) -> None:
    """What one builds on the login node is there for all; nobody else can write to it."""
    before = os.umask(umask)
    try:
        binary = acquire(project.spec()).path
    finally:
        os.umask(before)
    assert binary.stat().st_mode & files == files and binary.stat().st_mode & 0o022 == 0
    for folder in binary.parents[: len(binary.relative_to(cache.root().parent).parts) - 1]:
        assert folder.stat().st_mode & 0o777 == folders, folder


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"name": "Answer"}, "op name"),
        ({"name": "../up"}, "op name"),
        ({"owner": "../up"}, "owner"),
        ({"owner": ".hidden"}, "owner"),
        ({"sources": ()}, "distinct"),
        ({"kind": "python_module", "name": "0"}, "Python module"),
    ],
)
def test_names_that_cannot_be_folders_are_rejected(project: Project, fields: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        project.spec(**fields)


def test_headers_by_relative_paths_are_found_again(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ccache lists them where CCACHE_BASEDIR is set."""
    shared = project.shared / "shared.h"
    body = f"""\
        {shutil.which("c++")} "$@" || exit
        for file in *.d; do
            test -e "$file" && sed -i "s#{shared}#$(realpath --relative-to=. {shared})#" "$file"
        done
        exit 0
        """
    monkeypatch.setenv("CXX", str(script(tmp_path / "relative-c++", body)))
    assert [acquire(project.spec()).origin for _ in range(2)] == ["compiled", "cache"]


def test_objects_take_the_place_of_old_ones(project: Project) -> None:
    """Also where those are the only ones, whose folder goes with them."""
    acquire(project.spec())
    shared = project.shared / "shared.h"
    shared.write_text("#define SHARED 12\n")
    acquire(project.spec())
    (folder,) = (cache.root() / "v1" / ".objects").iterdir()
    assert (folder / "key.json").is_file()


def test_a_library_folder_that_cannot_be_entered_has_no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    assert not list(plan._linked_files(["-L/root/lib", "-lm", "/root/lib/x.a"]))
