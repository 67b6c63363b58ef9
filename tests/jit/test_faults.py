"""What may go wrong with compilers, disks and binaries, and how it is told."""

from __future__ import annotations

import grp
import json
import os
import pwd
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_op import EXPORT, CountingCompiler, Project, Spawn, SpawnIn, answer, entry_folder, finish, script

from ds_plugin_sdk.errors import ArtifactError, CompileError, CompileForbiddenError, ToolchainError
from ds_plugin_sdk.jit import Source, acquire, cache, explain, failure, obtain, store

pytestmark = pytest.mark.compiler

REAL = shutil.which("c++")


def truncate(folder: Path) -> None:
    with (folder / "answer.so").open("r+b") as file:
        file.truncate(1000)


def tamper(folder: Path) -> None:
    with (folder / "answer.so").open("r+b") as file:
        file.seek(4000)
        file.write(b"tampered")


def empty_key(folder: Path) -> None:
    (folder / "key.json").write_text("")


def hollow_key(folder: Path) -> None:
    record = json.loads((folder / "key.json").read_text())
    (folder / "key.json").write_text(json.dumps({"key": record["key"]}))


def other_key(folder: Path) -> None:
    record = json.loads((folder / "key.json").read_text())
    record["key"]["request"]["cxx_args"] = ["-Dsomething=else"]
    (folder / "key.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (truncate, "has 1000 bytes instead of"),
        (tamper, "does not match its SHA-256"),
        (lambda folder: (folder / "answer.so").unlink(), "No such file"),
        (lambda folder: (folder / "key.json").unlink(), "No such file"),
        (empty_key, "is damaged"),
        (hollow_key, "is damaged"),
        (other_key, "does not belong"),
    ],
    ids=["truncated", "tampered", "no binary", "no key", "empty key", "hollow key", "other key"],
)
def test_a_damaged_build_is_made_anew(
    project: Project, counting: CountingCompiler, damage, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = acquire(project.spec()).path
    damage(first.parent)
    again = acquire(project.spec())
    assert (again.origin, again.path) == ("compiled", first)
    assert counting.count() == 1, "its objects are whole: it is only linked"
    assert told in again.reason
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert told in warning.getMessage()
    assert cache.verify() == []
    assert answer(acquire(project.spec()).path) == 42


def test_a_build_that_no_longer_loads_is_made_anew(
    project: Project, counting: CountingCompiler, tmp_path: Path
) -> None:
    """A library that it was linked with goes away and comes back: the message is the loader's, a new build helps."""
    (tmp_path / "dep.c").write_text("int dep() { return 1; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libdep.so", tmp_path / "dep.c"], check=True)
    (project.root / "answer.cpp").write_text(f'extern "C" int dep();\n{EXPORT} int answer() {{ return dep(); }}\n')
    needs = ("-Wl,--no-as-needed", f"-L{tmp_path}", "-ldep", f"-Wl,-rpath,{tmp_path}")
    spec = project.spec(link_args=needs)
    (tmp_path / "libdep.so").rename(tmp_path / "libdep.so.1")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libdep.so", tmp_path / "dep.c"], check=True)
    acquire(spec)
    (tmp_path / "libdep.so").unlink()
    with pytest.raises(CompileError, match="ldep"):  # found in the cache, does not load, cannot be linked again
        obtain(spec)
    (tmp_path / "libdep.so.1").rename(tmp_path / "libdep.so")
    artifact, library = obtain(spec)
    assert (artifact.origin, library.answer()) == ("compiled", 1)
    assert obtain(spec)[0].origin == "cache"


def test_a_new_build_that_does_not_load_is_an_error(project: Project) -> None:
    (project.root / "answer.cpp").write_text(
        f'extern "C" int nobody();\n{EXPORT} int answer() {{ return nobody(); }}\n'
    )
    spec = project.spec(link_args=("-Wl,-z,undefs", "-Wl,-z,now"))
    # Ours come after the builder's: only the linker's last word counts.
    with pytest.raises((ArtifactError, CompileError), match="nobody") as caught:
        obtain(spec)
    assert "answer" in str(caught.value)


def test_no_compiler(project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match="no C\\+\\+ compiler") as caught:
        acquire(project.spec())
    assert (caught.value.op, caught.value.plugin) == ("answer", "ds-plugin-test")
    assert "install g++" in caught.value.hint


def test_without_a_compiler_what_another_machine_built_is_used(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The login node has a compiler, the compute node has none; they share the cache."""
    built = acquire(project.spec()).path
    monkeypatch.setenv("PATH", str(tmp_path))
    found = acquire(project.spec())
    assert (found.origin, found.path) == ("cache", built)
    assert "nothing can be compiled here" in found.reason
    (project.root / "answer.h").write_text("#define ANSWER 1\n")
    with pytest.raises(ToolchainError, match=r"header \$test/answer\.h changed"):
        acquire(project.spec())


def test_compiling_forbidden(project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DS_PLUGIN_COMPILE", "0")
    with pytest.raises(CompileForbiddenError, match="nothing prebuilt") as caught:
        acquire(project.spec(prebuilt_dirs=(tmp_path / "prebuilt",)))
    assert str(cache.root()) in str(caught.value)
    assert not cache.root().exists()
    monkeypatch.delenv("DS_PLUGIN_COMPILE")
    acquire(project.spec())
    monkeypatch.setenv("DS_PLUGIN_COMPILE", "0")
    assert acquire(project.spec()).origin == "cache"
    (project.root / "answer.h").write_text("#define ANSWER 1\n")
    with pytest.raises(CompileForbiddenError, match=r"answer\.h changed"):
        acquire(project.spec())


@pytest.mark.parametrize(
    ("body", "error", "told"),
    [
        ("echo What a nice day; exit 0", CompileError, "made no"),
        ("echo usage: cat FILE >&2; exit 2", ToolchainError, "exited with 2: usage: cat FILE"),
        ('for last; do :; done; echo junk > "$last"; echo > answer.cpp.d', CompileError, "made no shared library"),
        ('[ "$1" = --version ] && exec {real} "$@"; kill -9 $$', CompileError, "Killed"),
    ],
    ids=["nonsense", "usage", "junk", "dies"],
)
def test_a_wrong_compiler(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, error, told: str
) -> None:
    monkeypatch.chdir(tmp_path)  # one of them writes where it stands
    monkeypatch.setenv("CXX", str(script(tmp_path / "strange-c++", body.replace("{real}", str(REAL)))))
    with pytest.raises(error, match=told) as caught:
        acquire(project.spec())
    assert "strange-c++" in str(caught.value)
    assert cache.entries() == []


def test_a_compiler_that_is_not_there(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/g++ -m64")
    with pytest.raises(ToolchainError, match="CXX names it"):
        acquire(project.spec())


@pytest.mark.parametrize(
    ("source", "spec", "first_line", "hint"),
    [
        ("int answer() { return nonsense; }", {}, "error: .nonsense. was not declared", ""),
        ("#include <Python.h>\n", {}, "Python.h: No such file", "python3-dev"),
        ("", {"cxx_args": ("-march=z80000",)}, "z80000", "too old for this CPU"),
        ("", {"cxx_args": ("--no-such-option",)}, "no-such-option", "does not know an argument"),
        ("", {"link_args": ("-lnosuchlibrary",)}, "cannot find -lnosuchlibrary", "extra_ldflags"),
        ("void nobody(); void f() { nobody(); }", {}, "undefined reference", "extra_ldflags"),
    ],
)
def test_what_the_compiler_says(
    project: Project, source: str, spec: dict[str, object], first_line: str, hint: str
) -> None:
    (project.root / "answer.cpp").write_text(source)
    with pytest.raises(CompileError, match=first_line) as caught:
        acquire(project.spec(**spec))
    error = caught.value
    assert (error.op, error.plugin) == ("answer", "ds-plugin-test")
    assert hint in error.hint
    log = Path(error.hint.rpartition("log: ")[2])
    assert error.why in log.read_text()
    assert list((cache.root() / "v1" / ".build").iterdir()) == []


def test_a_failure_is_known_until_a_file_changes_or_the_op_is_built(project: Project) -> None:
    header, whole = project.root / "answer.h", "#define ANSWER 40\n"
    assert failure(project.spec()) == ""
    header.write_text("#error not finished\n")
    with pytest.raises(CompileError):
        acquire(project.spec())
    said = failure(project.spec())
    assert "failed: " in said and "not finished" in said
    assert "not finished" in Path(said.rpartition("log: ")[2]).read_text()
    header.write_text(whole)
    assert failure(project.spec()) == ""
    acquire(project.spec())
    header.write_text("#error not finished\n")
    assert failure(project.spec()) == "", "the latest build is no failure"


@pytest.mark.parametrize("note", ["", "7", "{}", '{"direct": 1, "headers": {}, "time": "never"}'])
def test_a_note_of_a_failure_that_cannot_be_read_is_none(project: Project, note: str) -> None:
    (project.root / "answer.h").write_text("#error not finished\n")
    with pytest.raises(CompileError):
        acquire(project.spec())
    (file,) = (cache.root() / "v1" / ".failed").glob("*.json")
    file.write_text(note)
    assert failure(project.spec()) == ""


def test_the_command_to_reproduce_works(project: Project, tmp_path: Path) -> None:
    (project.root / "answer.cpp").write_text("#error on purpose\n")
    with pytest.raises(CompileError) as caught:
        acquire(project.spec())
    (command,) = [line for line in caught.value.hint.splitlines() if "to reproduce: " in line]
    again = subprocess.run(
        command.partition("to reproduce: ")[2], shell=True, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert again.returncode
    assert "on purpose" in again.stderr


def test_a_source_that_is_missing(project: Project) -> None:
    with pytest.raises(CompileError, match="No such file") as caught:
        acquire(project.spec(sources=(Source(project.root / "gone.cpp"),)))
    assert "gone.cpp" in str(caught.value)


def test_a_header_edited_during_the_compilation_is_read_again(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header, edited = project.root / "answer.h", tmp_path / "edited"
    edit = f"[ -e {edited} ] || {{ touch {edited}; echo '#define ANSWER 5' > {header}; }}"
    body = f'{REAL} "$@" || exit\ncase "$*" in *" -c "*) {edit};; esac\n'
    monkeypatch.setenv("CXX", str(script(tmp_path / "editing-c++", body)))
    assert answer(acquire(project.spec()).path) == 7
    assert acquire(project.spec()).origin == "cache"


def test_a_header_edited_by_another_clock_is_read_again(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file server whose clock is an hour behind: its time stamp says that it is older than the compilation."""
    header, edited = project.root / "answer.h", tmp_path / "edited"
    edit = f"touch {edited}; echo '#define ANSWER 5' > {header}; touch -d '1 hour ago' {header}"
    body = f'{REAL} "$@" || exit\ncase "$*" in *" -c "*) [ -e {edited} ] || {{ {edit}; }};; esac\n'
    monkeypatch.setenv("CXX", str(script(tmp_path / "editing-c++", body)))
    assert answer(acquire(project.spec()).path) == 7


@pytest.mark.parametrize("file", ["answer.h", "shared.h"])
def test_a_header_that_only_gets_new_time_stamps_is_no_error(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    touched = project.root / file if file == "answer.h" else project.shared / file
    body = f'case "$*" in *" -c "*) sleep 0.05; touch {touched};; esac\nexec {REAL} "$@"\n'
    monkeypatch.setenv("CXX", str(script(tmp_path / "touching-c++", body)))
    spec = project.spec(include_dirs=(project.root,), cxx_args=(f"-isystem{project.shared}",))
    assert answer(acquire(spec).path) == 42


@pytest.mark.parametrize(
    ("file", "told"), [("answer.h", "answer.h was changed"), ("answer.cpp", "a source was changed")]
)
def test_files_that_keep_changing_the_compilation(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, told: str
) -> None:
    body = f'case "$*" in *" -c "*) sleep 0.05; echo "// more" >> {project.root / file};; esac\nexec {REAL} "$@"\n'
    monkeypatch.setenv("CXX", str(script(tmp_path / "editing-c++", body)))
    with pytest.raises(CompileError, match=told):
        acquire(project.spec())
    assert cache.entries() == []


def test_a_file_size_limit(project: Project, spawn: Spawn) -> None:
    """As a full disk, but at a place of our choice: the object fits, the library does not."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))

    process = spawn(limit=limit)
    _, err = process.communicate(timeout=60)
    assert process.returncode
    assert "CompileError" in err and "answer" in err
    assert "ulimit -f" in err
    assert cache.entries() == []
    assert list((cache.root() / "v1" / ".build").iterdir()) == []
    assert finish(spawn()) == "compiled 42"


def in_namespace(*mounts: str) -> list[str]:
    """Command prefix that runs a program with mounts of its own; empty where that is not permitted."""
    user = [] if os.geteuid() == 0 else ["-r"]
    prefix = ["unshare", "-m", *user, "sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh"]
    probe = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    return prefix if probe.returncode == 0 else []


def test_a_full_disk(project: Project, spawn: Spawn) -> None:
    """A real file system of 24 kB: the compiler, the linker or we run out of it."""
    root = cache.root()
    root.mkdir()
    prefix = in_namespace(f"mount -t tmpfs -o size=24k,mode=700 none {root}")
    if not prefix:
        pytest.skip("no mounts in this sandbox; test_a_file_size_limit covers the path")
    # The file system is gone with the process, so the process itself says what is left.
    list_files = f"import atexit, pathlib; atexit.register(lambda: print(*pathlib.Path({str(root)!r}).rglob('*')))\n"
    process = spawn(list_files, prefix=prefix)
    out, err = process.communicate(timeout=60)
    assert "CompileError" in err and "No space left" in err
    assert "DS_PLUGIN_CACHE_DIR" in err
    assert ".build" in out
    assert [path for path in out.split() if "/.build/" in path or path.endswith((".so", "key.json"))] == []


def read_only_prefix() -> list[str]:
    root = cache.root()
    if prefix := in_namespace(f"mount --bind {root} {root}", f"mount -o remount,ro,bind {root}"):
        return prefix
    if os.geteuid() == 0:  # without mounts, root can write everywhere
        pytest.skip("root without the right to mount: nothing is read-only here")
    for folder in [root, *root.rglob("*")]:
        folder.chmod(folder.stat().st_mode & ~0o222)
    return []


def test_a_read_only_cache(project: Project, spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    acquire(project.spec())
    os.utime(entry_folder() / "key.json", (1000, 1000))
    prefix = read_only_prefix()
    # A hit needs no write at all.
    assert finish(spawn(prefix=prefix)) == "cache 42"
    assert list(temporary.iterdir()) == []
    # A miss goes to a private cache, which serves later runs.
    (project.root / "answer.h").write_text("#define ANSWER 50\n")
    assert finish(spawn(prefix=prefix)) == "compiled 52"
    assert finish(spawn(prefix=prefix)) == "cache 52"
    (private,) = temporary.iterdir()
    assert private.name == f"ds-plugin-sdk-{os.geteuid()}"
    assert private.stat().st_mode & 0o777 == 0o700
    assert len(cache.entries()) == 1


@pytest.fixture
def for_everybody(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that every user can enter, the project in it; the temporary folder of other users is in it too."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "tmp").mkdir()
        (folder / "tmp").chmod(0o1777)
        monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
        monkeypatch.setenv("DS_PLUGIN_CACHE_DIR", str(folder / "cache"))
        yield folder


# What a process does before it builds: all imports, since the new user may not be allowed to read Python's folders.
AS_NOBODY = f"""\
import os, resource, sys
sys.path[:0] = [{str(Path(__file__).parents[2] / "sdk")!r}, {str(Path(__file__).parent)!r}]
import small_op
from ds_plugin_sdk.jit import acquire, machine
machine.here()
os.setgroups([]); os.setgid(65534); os.setuid(65534)
"""


def test_what_root_has_built_serves_other_users(for_everybody: Path, spawn_in: SpawnIn) -> None:
    project, spawn = spawn_in(for_everybody)
    before = os.umask(0o022)
    try:
        assert finish(spawn()) == "compiled 42"
    finally:
        os.umask(before)
    assert finish(spawn(AS_NOBODY)) == "cache 42"
    (project.root / "answer.h").write_text("#define ANSWER 50\n")
    process = spawn(AS_NOBODY)
    out, err = process.communicate(timeout=60)
    assert out == "compiled 52\n", err
    assert "cannot be written; using " in err
    assert finish(spawn(AS_NOBODY)) == "cache 52"


def test_a_user_without_a_home_builds_into_the_temporary_folder(
    for_everybody: Path, spawn_in: SpawnIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that was given a number for a user."""
    _, spawn = spawn_in(for_everybody)
    for variable in ("DS_PLUGIN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    as_number = AS_NOBODY.replace("65534", "23456").replace("import small_op", "import platformdirs.unix, small_op")
    assert finish(spawn(as_number)) == "compiled 42"
    assert (for_everybody / "tmp" / "ds-plugin-sdk-23456" / "v1").is_dir()
    assert finish(spawn(as_number)) == "cache 42"


@pytest.mark.parametrize("closed", ["", "v1"])
def test_a_cache_that_cannot_be_entered_is_not_used(for_everybody: Path, spawn_in: SpawnIn, closed: str) -> None:
    _, spawn = spawn_in(for_everybody)
    assert finish(spawn()) == "compiled 42"
    (cache.root() / closed).chmod(0o700)
    process = spawn(AS_NOBODY)
    out, err = process.communicate(timeout=60)
    assert out == "compiled 42\n", err
    assert f"{cache.root() / closed} cannot be entered by this user; using {for_everybody / 'tmp'}" in err
    assert finish(spawn(AS_NOBODY)) == "cache 42"
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            AS_NOBODY
            + "from ds_plugin_sdk.jit import cache; print(cache.entries(), cache.unreadable(), cache.unusable())",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.startswith("[] ") and told.stdout.count("cannot be entered by this user") == 2


@pytest.mark.parametrize(
    ("processes", "told"),
    [(4, "compiled 42\n"), (1, "c++ cannot be run (plugin 'ds-plugin-test', op 'answer'): ")],
    ids=["no threads", "no processes"],
)
def test_a_limit_of_processes(for_everybody: Path, spawn_in: SpawnIn, processes: int, told: str) -> None:
    """Four are this one, the compiler, and two that the compiler starts to link; threads count as processes."""
    _, spawn = spawn_in(for_everybody)
    limit = f"resource.setrlimit(resource.RLIMIT_NPROC, ({processes}, {processes}))\n"
    asked = "from ds_plugin_sdk.jit import toolchains; toolchains.CxxToolchain().compiler()\n"  # `--version`
    out, err = spawn(AS_NOBODY + asked + limit).communicate(timeout=60)
    assert told in out + err
    assert "see `ulimit -u`" in err or processes == 4


@pytest.mark.parametrize("name", ["file", "x" * 300], ids=["file", "long"])
def test_a_cache_that_cannot_be_made_is_not_used(
    project: Project, private_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DS_PLUGIN_CACHE_DIR", str(tmp_path / name / "cache"))
    built = acquire(project.spec())
    assert built.path.is_relative_to(private_root)
    assert "is no folder" in built.reason or "File name too long" in built.reason
    assert cache.unusable() and cache.unreadable()
    assert cache.entries() == [] and explain(project.spec())[0].startswith("cache: ")


def test_a_cache_that_is_mounted_noexec_is_not_used(
    project: Project, spawn: Spawn, counting: CountingCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    acquire(project.spec())
    root = cache.root()
    prefix = in_namespace(f"mount --bind {root} {root}", f"mount -o remount,noexec,bind {root}")
    if not prefix:
        pytest.skip("no mounts in this sandbox")
    out, err = spawn(prefix=prefix).communicate(timeout=60)
    assert out == "compiled 42\n", err
    assert f"{root} lies on a file system that is mounted noexec" in err
    assert finish(spawn(prefix=prefix)) == "cache 42"
    assert counting.count() == 2
    assert len(cache.entries()) == 1, "what is in it serves where it is mounted otherwise"
    assert finish(spawn()) == "cache 42"


def test_where_everything_is_mounted_noexec_nothing_is_compiled(
    project: Project, spawn: Spawn, counting: CountingCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    prefix = in_namespace(f"mount --bind {tmp_path} {tmp_path}", f"mount -o remount,noexec,bind {tmp_path}")
    if not prefix:
        pytest.skip("no mounts in this sandbox")
    monkeypatch.delenv("CXX")
    _, err = spawn(prefix=prefix).communicate(timeout=60)
    assert "CompileError: what is compiled could not be loaded (plugin 'ds-plugin-test', op 'answer')" in err
    assert "mounted noexec" in err and "-> DS_PLUGIN_CACHE_DIR" in err
    assert cache.entries() == []


def foreign(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `folder` belong to somebody else."""
    if os.geteuid() == 0:
        os.chown(folder, 12345, 12345)
    else:
        me = os.geteuid()
        real = store.distrust
        monkeypatch.setattr(
            store, "distrust", lambda path: f"{path} belongs to another user ({me})" if path == folder else real(path)
        )


@pytest.fixture
def private_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store.private_root.cache_clear()
    yield tmp_path / f"ds-plugin-sdk-{os.geteuid()}"
    store.private_root.cache_clear()


def test_a_cache_of_somebody_else_is_not_used(
    project: Project, counting: CountingCompiler, monkeypatch: pytest.MonkeyPatch, private_root: Path
) -> None:
    acquire(project.spec())
    foreign(cache.root(), monkeypatch)
    built = acquire(project.spec())
    assert built.origin == "compiled"
    assert "belongs to another user" in built.reason
    assert built.path.is_relative_to(private_root)
    assert acquire(project.spec()).path == built.path
    assert counting.count() == 2


def test_a_cache_open_to_everybody_is_not_used(project: Project, private_root: Path) -> None:
    acquire(project.spec())
    cache.root().chmod(0o777)
    built = acquire(project.spec())
    assert (built.origin, built.path.is_relative_to(private_root)) == ("compiled", True)
    assert "can be written by everybody" in built.reason
    assert any("can be written by everybody" in line for line in explain(project.spec()))


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A group with other members, to which the cache's folders can be given."""
    others = [gid for gid in (12345, *os.getgroups()) if gid and (os.geteuid() == 0 or gid != 12345)]
    if not others:
        pytest.skip("not root, and in no group but one")
    store._is_own_group.cache_clear()
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="nobody else"))
    yield others[0]
    store._is_own_group.cache_clear()


def open_to(folder: Path, group: int, mode: int = 0o775) -> None:
    os.chown(folder, -1, group)
    folder.chmod(mode)


@pytest.mark.parametrize("above", [False, True])
def test_a_cache_that_a_group_can_write_is_not_used(
    project: Project,
    private_root: Path,
    group: int,
    above: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor one in whose place its members can put another."""
    folder = tmp_path / "project" / "cache"
    monkeypatch.setenv("DS_PLUGIN_CACHE_DIR", str(folder))
    acquire(project.spec())
    open_to(folder.parent if above else folder, group)
    built = acquire(project.spec())
    assert (built.origin, built.path.is_relative_to(private_root)) == ("compiled", True)
    assert "can be written by its group (`chmod g-w` it, or set DS_PLUGIN_CACHE_TRUST_GROUP=1)" in built.reason
    assert any("can be written by its group" in line for line in cache.verify())
    assert [record.levelname for record in caplog.records if "by its group" in record.getMessage()] == ["WARNING"]
    monkeypatch.setenv("DS_PLUGIN_CACHE_TRUST_GROUP", "1")
    assert acquire(project.spec()).path.is_relative_to(folder)


def test_a_cache_behind_a_link_is_judged_where_it_lies(
    project: Project, private_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open" / "cache").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "open" / "cache")
    monkeypatch.setenv("DS_PLUGIN_CACHE_DIR", str(tmp_path / "link"))
    acquire(project.spec())
    (tmp_path / "open").chmod(0o777)
    assert acquire(project.spec()).path.is_relative_to(private_root)
    (tmp_path / "open").chmod(0o1777)  # as /tmp
    assert acquire(project.spec()).path.is_relative_to(tmp_path / "link")


def test_a_cache_of_the_users_own_group_is_used(
    project: Project, group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each user has a group of their own, their folders are commonly open to it (umask 002)."""
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name="nobody else", gr_mem=["nobody else"]))
    acquire(project.spec())
    open_to(cache.root(), group)
    assert acquire(project.spec()).origin == "cache"


@pytest.mark.parametrize("name", ["answer.so", "key.json"])
def test_a_file_that_a_group_can_write_is_made_anew(project: Project, group: int, name: str) -> None:
    folder = acquire(project.spec()).path.parent
    open_to(folder / name, group)
    again = acquire(project.spec())
    assert again.origin == "compiled" and "can be written by its group" in again.reason
    assert (folder / name).stat().st_mode & 0o022 == 0


def test_a_single_build_open_to_everybody_is_made_anew(project: Project) -> None:
    first = acquire(project.spec()).path
    first.parent.chmod(0o777)
    again = acquire(project.spec())
    assert (again.origin, again.path) == ("compiled", first)
    assert store.distrust(first.parent) == ""


def test_an_umask_that_opens_everything(project: Project) -> None:
    before = os.umask(0)
    try:
        acquire(project.spec())
        assert acquire(project.spec()).origin == "cache"
        assert cache.verify() == []
    finally:
        os.umask(before)


def test_a_private_cache_that_somebody_else_prepared_is_not_used(
    project: Project, monkeypatch: pytest.MonkeyPatch, private_root: Path
) -> None:
    private_root.mkdir(mode=0o777)
    private_root.chmod(0o777)
    acquire(project.spec())
    cache.root().chmod(0o777)
    built = acquire(project.spec())
    assert not built.path.is_relative_to(private_root)
    assert not built.path.is_relative_to(cache.root())


@pytest.mark.parametrize("target", ["", "mine", "gone"])
def test_a_link_that_somebody_planted_is_not_followed(
    project: Project, private_root: Path, tmp_path: Path, spawn: Spawn, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """Not even to a folder of one's own, and what takes its place is gone with the process."""
    (tmp_path / "mine").mkdir(mode=0o700)
    if target:
        private_root.symlink_to(tmp_path / target)
    else:
        private_root.write_text("no folder")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    cache.root().mkdir()
    cache.root().chmod(0o777)
    assert finish(spawn()) == "compiled 42"
    assert list((tmp_path / "mine").iterdir()) == []
    assert not (tmp_path / "gone").exists()
    assert list(tmp_path.glob("ds-plugin-sdk-*")) == [private_root]
    assert private_root.is_symlink() == bool(target)


def test_remains_of_killed_builds_are_removed_after_a_day(project: Project) -> None:
    acquire(project.spec())
    parent = cache.root() / "v1" / ".build"
    for name, hours in (("old", 25), ("fresh", 1)):
        (parent / name).mkdir()
        (parent / name / "answer.o").write_text("x")
        os.utime(parent / name, (time.time() - hours * 3600,) * 2)
    (project.root / "answer.h").write_text("#define ANSWER 1\n")
    acquire(project.spec())
    assert [folder.name for folder in parent.iterdir()] == ["fresh"]
