"""A cache that is shared with other users, that they could change, or that this user or file system cannot use."""

from __future__ import annotations

import grp
import os
import pwd
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_op import (
    CountingCompiler,
    Project,
    Spawn,
    SpawnIn,
    entry_folder,
    finish,
    in_namespace,
)

from ds_plugin_sdk.errors import CompileError
from ds_plugin_sdk.jit import acquire, cache, explain, refusal, store

pytestmark = pytest.mark.compiler


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


# Of this worker alone: a limit of processes counts all that a user runs, those of another worker or container too. By
# chance, since in containers that are made alike the workers have the same process ids.
ANOTHER = 10_000 + secrets.randbelow(50_000)

GROUP = ANOTHER + 3

# What a process does before it builds: all imports, since the new user may not be allowed to read Python's folders.
AS_ANOTHER = f"""\
import os, resource, sys
sys.path[:0] = [{str(Path(__file__).parents[2] / "sdk")!r}, {str(Path(__file__).parent)!r}]
import small_op
from ds_plugin_sdk.jit import acquire, machine
machine.here()
os.setgroups([]); os.setgid({ANOTHER}); os.setuid({ANOTHER})
"""


def test_what_root_has_built_serves_other_users(for_everybody: Path, spawn_in: SpawnIn) -> None:
    project, spawn = spawn_in(for_everybody)
    before = os.umask(0o022)
    try:
        assert finish(spawn()) == "compiled 42"
    finally:
        os.umask(before)
    assert finish(spawn(AS_ANOTHER)) == "cache 42"
    (project.root / "answer.h").write_text("#define ANSWER 50\n")
    process = spawn(AS_ANOTHER)
    out, err = process.communicate(timeout=200)
    assert out == "compiled 52\n", err
    assert "cannot be written; using " in err
    assert finish(spawn(AS_ANOTHER)) == "cache 52"


def as_member(user: int) -> str:
    """As `AS_ANOTHER`, of a group that has the number of another user; what they make is nobody else's by default."""
    identity = f"os.setgroups([{GROUP}]); os.setgid({user}); os.setuid({user}); os.umask(0o077)\n"
    return AS_ANOTHER.rpartition("os.setgroups")[0] + identity


@pytest.fixture
def for_the_group(for_everybody: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`for_everybody`, with a cache for `GROUP`."""
    monkeypatch.setenv("DS_PLUGIN_CACHE_TRUST_GROUP", "1")
    cache.root().mkdir()
    open_to(cache.root(), GROUP, 0o2775)
    return for_everybody


def test_what_another_member_cannot_remove_is_built_beside_it(for_the_group: Path, spawn_in: SpawnIn) -> None:
    _, spawn = spawn_in(for_the_group)
    one, other = as_member(ANOTHER), as_member(ANOTHER + 1)
    assert finish(spawn(one)) == "compiled 42"
    (entry_folder() / "answer.so").write_bytes(b"")
    out, err = spawn(other).communicate(timeout=200)
    assert out == "compiled 42\n" and "it is built again" in err
    assert finish(spawn(other)) == "cache 42"
    assert finish(spawn(one)) == "cache 42"


def test_members_of_a_trusted_group_share_what_they_build(
    for_the_group: Path, spawn_in: SpawnIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, spawn = spawn_in(for_the_group)
    one, other = as_member(ANOTHER), as_member(ANOTHER + 1)
    assert finish(spawn(one)) == "compiled 42"
    assert finish(spawn(other)) == "cache 42"
    (project.root / "answer.h").write_text("#define ANSWER 50\n")
    assert finish(spawn(other)) == "compiled 52"  # with the other's folders and lock
    assert finish(spawn(one)) == "cache 52"
    assert {entry.path.stat().st_uid for entry in cache.entries()} == {ANOTHER, ANOTHER + 1}
    assert not any(entry.path.stat().st_mode & 0o022 for entry in cache.entries())
    assert all(lock.stat().st_mode & 0o777 == 0o660 for lock in cache.root().glob("v*/.locks/*"))
    process = spawn(AS_ANOTHER.replace(str(ANOTHER), str(ANOTHER + 2)))  # of no such group
    assert process.communicate(timeout=200)[0] == "compiled 52\n"
    monkeypatch.setenv("DS_PLUGIN_CACHE_TRUST_GROUP", "0")
    assert "belongs to another user" in spawn(other).communicate(timeout=200)[1]


def test_a_lock_of_another_user_is_done_without(for_everybody: Path) -> None:
    path = for_everybody / "answer.lock"
    path.touch(0o600)
    program = f"""{AS_ANOTHER}
from pathlib import Path
from ds_plugin_sdk.jit import lock
with lock.building(Path({str(path)!r}), "answer", timeout=0, done=lambda: False):
    print("goes on")
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert told.stdout == "goes on\n", told.stderr


def test_a_user_without_a_home_builds_into_the_temporary_folder(
    for_everybody: Path, spawn_in: SpawnIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that was given a number for a user."""
    _, spawn = spawn_in(for_everybody)
    for variable in ("DS_PLUGIN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    as_number = AS_ANOTHER.replace("import small_op", "import platformdirs.unix, small_op")
    assert finish(spawn(as_number)) == "compiled 42"
    assert (for_everybody / "tmp" / f"ds-plugin-sdk-{ANOTHER}" / "v1").is_dir()
    assert finish(spawn(as_number)) == "cache 42"


def test_a_home_that_nobody_can_make_is_not_used(
    for_everybody: Path, spawn_in: SpawnIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, but in /proc, and where automatic mounts are, nobody makes a folder."""
    _, spawn = spawn_in(for_everybody)
    monkeypatch.setenv("DS_PLUGIN_CACHE_DIR", "/proc/nohome/cache")
    process = spawn()
    out, err = process.communicate(timeout=200)
    assert out == "compiled 42\n", err
    assert f"/proc/nohome cannot be made: No such file or directory; using {for_everybody / 'tmp'}" in err
    assert finish(spawn()) == "cache 42"


@pytest.mark.parametrize("closed", ["", "v1"])
def test_a_cache_that_cannot_be_entered_is_not_used(for_everybody: Path, spawn_in: SpawnIn, closed: str) -> None:
    _, spawn = spawn_in(for_everybody)
    assert finish(spawn()) == "compiled 42"
    (cache.root() / closed).chmod(0o700)
    process = spawn(AS_ANOTHER)
    out, err = process.communicate(timeout=200)
    assert out == "compiled 42\n", err
    assert f"{cache.root() / closed} cannot be entered by this user; using {for_everybody / 'tmp'}" in err
    assert finish(spawn(AS_ANOTHER)) == "cache 42"
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            AS_ANOTHER
            + "from ds_plugin_sdk.jit import cache; print(cache.entries(), cache.unreadable(), cache.unusable())",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.startswith("[] ") and told.stdout.count("cannot be entered by this user") == 2


@pytest.mark.parametrize(
    ("processes", "told"),
    [(5, "compiled 42\n"), (1, "c++ cannot be run (plugin 'ds-plugin-test', op 'answer'): ")],
    ids=["no threads", "no processes"],
)
def test_a_limit_of_processes(for_everybody: Path, spawn_in: SpawnIn, processes: int, told: str) -> None:
    """Five are this one, the compiler, what ends it, and two that it starts to link; threads count as processes."""
    _, spawn = spawn_in(for_everybody)
    limit = f"resource.setrlimit(resource.RLIMIT_NPROC, ({processes}, {processes}))\n"
    asked = "from ds_plugin_sdk.jit import toolchains; toolchains.CxxToolchain().compiler()\n"  # `--version`
    out, err = spawn(AS_ANOTHER + asked + limit).communicate(timeout=200)
    assert told in out + err
    assert "see `ulimit -u`" in err or processes == 5


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


@pytest.mark.parametrize("length", [4000, 4050])
def test_a_path_that_is_too_long_for_what_is_built_is_not_used(
    project: Project, private_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """The folder can be made, and a build in it cannot be named."""
    root = tmp_path
    while len(str(root)) < length:
        root /= "x" * min(200, max(1, length - len(str(root)) - 1))
    monkeypatch.setenv("DS_PLUGIN_CACHE_DIR", str(root))
    built = acquire(project.spec())
    assert built.path.is_relative_to(private_root) and "File name too long" in built.reason
    assert acquire(project.spec()).origin == "cache"


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
    out, err = spawn(prefix=prefix).communicate(timeout=200)
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
    _, err = spawn(prefix=prefix).communicate(timeout=200)
    assert "CompileError: what is compiled could not be loaded (plugin 'ds-plugin-test', op 'answer')" in err
    assert "mounted noexec" in err and "-> DS_PLUGIN_CACHE_DIR" in err
    assert cache.entries() == []


def test_what_could_not_be_loaded_is_refused_before_it_is_compiled(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(project.spec()) == ""
    monkeypatch.setattr(store.Store, "noexec", lambda place: f"{place.root} is mounted noexec")
    assert "what is compiled could not be loaded" in refusal(project.spec())
    assert "mounted noexec" in "".join(explain(project.spec()))


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


def test_without_any_folder_to_build_in_it_says_which_settings_name_one(
    project: Project, private_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DS_PLUGIN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [])  # as where all that Python tries is read-only
    with pytest.raises(CompileError, match=r"there is no folder to build in .*No usable temporary") as caught:
        acquire(project.spec())
    assert "TMPDIR or DS_PLUGIN_CACHE_DIR" in str(caught.value)
    assert "TMPDIR or DS_PLUGIN_CACHE_DIR" in "".join(explain(project.spec()))


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
    assert "can be written by everybody (`chmod o-w` it)" in built.reason
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
