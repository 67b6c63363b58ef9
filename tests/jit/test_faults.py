"""What may go wrong with compilers, disks and binaries, and how it is told; other users: test_shared_cache.py."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from small_op import (
    EXPORT,
    CountingCompiler,
    Project,
    Spawn,
    SpawnIn,
    answer,
    entry_folder,
    finish,
    in_namespace,
    make_project,
    script,
)

from ds_plugin_sdk.errors import ArtifactError, CompileError, CompileForbiddenError, ToolchainError
from ds_plugin_sdk.jit import Source, acquire, cache, failure, obtain, store

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


@pytest.mark.parametrize(
    "names",
    [
        ("headers",),
        ("binary", "bytes"),
        ("created",),
        ("reason",),
        ("key", "toolchain"),
        ("key", "abi", "torch"),
        ("key", "request", "op"),
    ],
    ids=".".join,
)
@pytest.mark.parametrize("there", [False, True], ids=["missing", "null"])
def test_a_key_that_lacks_something_is_named_and_stops_nothing(
    project: Project, names: tuple[str, ...], there: bool
) -> None:
    """Nobody but the SDK writes such files; but another op, and `sdk cache`, have nothing to do with it."""
    file = acquire(project.spec()).path.parent / "key.json"
    record = part = json.loads(file.read_text())
    for name in names[:-1]:
        part = part[name]
    del part[names[-1]]
    if there:
        part[names[-1]] = None
    file.write_text(json.dumps(record))
    (told,) = cache.verify()
    assert str(file) in told and f"damaged: {'.'.join(names)}" in told
    assert [each.strip() for each in cache.why("answer")[1:]] == ["key.json cannot be read"]
    assert acquire(project.spec(cxx_args=("-DOTHER",))).origin == "compiled"
    assert len(cache.entries()) == 2


def test_a_key_that_is_damaged_further_in_is_named(project: Project) -> None:
    file = acquire(project.spec()).path.parent / "key.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "headers": [1]}))
    acquire(project.spec(cxx_args=("-DOTHER",)))
    assert "key.json is damaged" in "\n".join(cache.why("answer"))


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
        ("echo What a nice day; exit 0", CompileError, "made no answer.cpp.o: What a nice day"),
        ("exit 0", CompileError, "made no answer.cpp.o: is it a compiler"),
        ("echo usage: cat FILE >&2; exit 2", ToolchainError, "exited with 2: usage: cat FILE"),
        (
            'for l; do :; done; echo junk | tee "$l" answer.so; echo > answer.cpp.d',
            CompileError,
            "made no shared library",
        ),
        ('[ "$1" = --version ] && exec {real} "$@"; kill -9 $$', CompileError, "Killed"),
    ],
    ids=["nonsense", "silence", "usage", "junk", "dies"],
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


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("#error on purpose", "made no answer.cpp.o: .*error: #error on purpose"),
        ("void nobody(); void f() { nobody(); }", "made no answer.so: .*undefined reference"),
    ],
    ids=["compile", "link"],
)
def test_errors_are_told_where_the_system_tells_no_exit_status(project: Project, source: str, told: str) -> None:
    """As where a program, or the one that started it, ignores SIGCHLD."""
    (project.root / "answer.cpp").write_text(source)
    usual = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(CompileError, match=told):
            acquire(project.spec())
    finally:
        signal.signal(signal.SIGCHLD, usual)


def test_a_compiler_that_is_not_there(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/g++ -m64")
    with pytest.raises(ToolchainError, match="CXX names it"):
        acquire(project.spec())


STRING = "#include <iostream>\nvoid say() { std::cout << 1; }"
QUOTIENT = "int quotient(int a, int b) { return a / b; }"
OF_17 = "#include <type_traits>\nbool b = std::is_same_v<int, int>;"


@pytest.mark.parametrize(
    ("source", "spec", "first_line", "hint"),
    [
        ("int answer() { return nonsense; }", {}, "error: .nonsense. was not declared", ""),
        ("#include <Python.h>\n", {}, "Python.h: No such file", "python3-dev"),
        ("", {"cxx_args": ("-march=z80000",)}, "z80000", "too old for this CPU"),
        ("", {"cxx_args": ("--no-such-option",)}, "no-such-option", "does not know an argument"),
        ("", {"link_args": ("-lnosuchlibrary",)}, "cannot find -lnosuchlibrary", "extra_ldflags"),
        ("void nobody(); void f() { nobody(); }", {}, "undefined reference", "extra_ldflags"),
        (STRING, {"link_args": ("-nodefaultlibs",)}, "undefined reference", "is CXX a C compiler"),
        (OF_17, {"cxx_args": ("-std=c++14",)}, "is_same_v", "older -std="),
        ("", {"link_args": ("-static", "-lnosuchlibrary")}, "cannot find -lnosuchlibrary", ""),
        (QUOTIENT, {"cxx_args": ("-fsanitize=undefined",)}, "undefined reference to .__ubsan", "LDFLAGS must ask for"),
        ("", {"link_args": ("-pie",)}, "undefined reference to .main'", "leave it out"),
        ("", {"link_args": ("-Wl,--no-such",)}, r"ld(\.bfd)?: unrecognized option '--no-such'", "LDFLAGS"),
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


def test_a_linker_that_is_not_there(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of -fuse-ld=lld: collect2 alone tells that, and then that it ends."""
    said = "collect2: fatal error: cannot find 'ld'"
    body = f"""\
        case "$*" in *-shared*) echo "{said}"; echo "compilation terminated."; exit 1;; esac >&2
        exec {REAL} "$@"
        """
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", body)))
    with pytest.raises(CompileError) as caught:
        acquire(project.spec())
    assert caught.value.why == said
    assert "-fuse-ld=" in caught.value.hint


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


@pytest.mark.parametrize("folder", ["a tab\tand", "back\\ slash", "a $ and # and %"])
def test_headers_are_known_in_folders_of_any_name(tmp_path: Path, folder: str) -> None:
    project = make_project(tmp_path / folder / "op", tmp_path / folder / "shared")
    assert answer(acquire(project.spec()).path) == 42
    (project.shared / "shared.h").write_text("#define SHARED 3\n")
    assert answer(acquire(project.spec()).path) == 43


def test_a_header_whose_name_the_compiler_cannot_list_is_told(tmp_path: Path) -> None:
    project = make_project(tmp_path / "a\nb" / "op", tmp_path / "shared")
    with pytest.raises(CompileError, match=r"lists a header '.*', which does not exist: .* a line break"):
        acquire(project.spec())


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
    _, err = process.communicate(timeout=200)
    assert process.returncode
    assert "CompileError" in err and "answer" in err
    assert "ulimit -f" in err
    assert cache.entries() == []
    assert list((cache.root() / "v1" / ".build").iterdir()) == []
    assert finish(spawn()) == "compiled 42"


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
    out, err = process.communicate(timeout=200)
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


def test_a_clock_that_is_days_ahead_removes_no_build(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a node without a time server, or in a program whose tests set the time."""
    ahead = time.time() + 3 * 24 * 3600
    monkeypatch.setattr(time, "time", lambda: ahead)
    place = store.Store(store.root())
    with place.workplace("answer") as building, place.workplace("discarded"):
        assert building.is_dir()
    assert answer(acquire(project.spec()).path) == 42


def test_a_file_system_that_takes_the_clients_clock_removes_no_build(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SSHFS, from a server whose clock is days behind: new folders have its time, touched ones the client's."""
    utime = os.utime

    def by_the_client(path: str | Path, times: tuple[float, float] | None = None) -> None:
        ahead = time.time() + 3 * 86_400
        utime(path, times or (ahead, ahead))

    monkeypatch.setattr(os, "utime", by_the_client)
    assert acquire(project.spec()).origin == "compiled"
    assert acquire(project.spec()).origin == "cache"


def test_arguments_may_be_of_any_bytes(project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder that an old system named in Latin-1."""
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/M\xfcller"))
    folder.mkdir()
    monkeypatch.setenv("CFLAGS", f"-I{folder}")
    artifact = acquire(project.spec())
    assert answer(artifact.path) == 42
    assert "M\\udcfcller" in (artifact.path.parent / "build.log").read_text()


def test_folders_have_names_in_the_encoding_of_the_file_system(spawn_in: SpawnIn, tmp_path: Path) -> None:
    """The compiler writes the names of headers as the system has them."""
    folder = tmp_path / "v\xe4v"
    folder.mkdir()
    _, spawn = spawn_in(folder)
    process = spawn(prefix=["env", "LC_ALL=C", "PYTHONUTF8=0", "PYTHONCOERCECLOCALE=0"])
    assert finish(process) == "compiled 42"


def test_programs_are_found_where_the_system_has_them(spawn: Spawn) -> None:
    """Without PATH Python finds the compiler, which is to find its assembler and its linker."""
    assert finish(spawn(prefix=["env", "-u", "PATH", "HOME=/nonexistent"])) == "compiled 42"


def test_a_build_that_goes_while_it_is_chosen_is_made_anew(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when another process prunes the cache."""
    acquire(project.spec())
    with monkeypatch.context() as patch:
        patch.setattr(store, "touch", lambda _: cache.prune(everything=True))
        assert obtain(project.spec())[0].origin == "compiled"
    cache.prune(everything=True)
    monkeypatch.setattr("ds_plugin_sdk.jit.failures.forget", lambda *_: cache.prune(everything=True))
    with pytest.raises(ArtifactError, match="gone or damaged"):
        acquire(project.spec())


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSPC])
def test_what_cannot_be_renamed_is_removed_in_place(
    project: Project, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire(project.spec())
    folder = entry_folder()

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "rename", refuse)
    place = store.Store(cache.root())
    assert place.discard(folder) == ""
    assert not folder.parent.exists()
    assert place.discard(folder) == ""
