"""From a spec to a binary: prebuilt, else cached, else compiled."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from ds_plugin_sdk.errors import ArtifactError, BuildError, CompileError, CompileForbiddenError, ToolchainError
from ds_plugin_sdk.jit import compile as compiling
from ds_plugin_sdk.jit import entry, failures, lock, objects, store
from ds_plugin_sdk.jit.entry import DamagedError, Record, Search
from ds_plugin_sdk.jit.load import load
from ds_plugin_sdk.jit.plan import Plan, Request, differences, make_plan, make_request
from ds_plugin_sdk.jit.spec import Artifact, BuildSpec, Origin
from ds_plugin_sdk.jit.store import Store
from ds_plugin_sdk.jit.target import LEVELS, CpuTarget, is_level
from ds_plugin_sdk.settings import settings

_AHEAD = "built ahead of time"

_log = logging.getLogger("ds_plugin_sdk.jit")


def acquire(spec: BuildSpec) -> Artifact:
    """A binary of `spec` that fits this machine: prebuilt, else from the cache, else compiled into the cache.

    Raises:
        ToolchainError: it must be compiled, and there is no usable compiler, or torch is too old.
        CompileError: the compiler failed, the disk is full, a source is missing ...
        CompileForbiddenError: it must be compiled, and ``DS_PLUGIN_COMPILE=0``.
        SettingError: an environment variable cannot be understood.
    """
    start = time.perf_counter()
    with _as_build_errors(spec):
        choice = _choose(spec)
        plan = _permitted(choice) if choice.origin == "compiled" else None
        if plan is not None and (why_not := choice.store.make()) and not _use_private(choice, plan, why_not):
            plan = _permitted(choice)  # to load from there, too
        if choice.origin == "cache":
            store.touch(choice.found)
        if choice.origin == "compiled" and plan is not None:
            return _build(plan, choice, start)
        return _artifact(choice.request, choice.found, choice.origin, choice.trail[-1], start, choice.record)


def obtain(spec: BuildSpec) -> tuple[Artifact, ModuleType | ctypes.CDLL]:
    """`acquire` and `load`. A binary made earlier that no longer loads, say because a library that it was linked with
    has been upgraded, is built again, once.

    Raises:
        ArtifactError: what was made now does not load either; and all that `acquire` raises.
    """
    artifact = acquire(spec)
    try:
        return artifact, load(artifact, spec)
    except ArtifactError as error:
        if artifact.origin == "compiled":
            raise
        _log.warning("%s", error)
    artifact = acquire(spec)
    return artifact, load(artifact, spec)


def find(spec: BuildSpec) -> Artifact | None:
    """The binary that `acquire` would take without compiling, or None; nothing is changed. Raises SettingError."""
    start = time.perf_counter()
    with _as_build_errors(spec):
        choice = _choose(spec)
        if choice.origin == "compiled":
            return None
        return _artifact(choice.request, choice.found, choice.origin, choice.trail[-1], start, choice.record)


def explain(spec: BuildSpec) -> list[str]:
    """Why `acquire` would take what it would take, a line each; nothing is changed."""
    try:
        with _as_build_errors(spec):
            choice = _choose(spec)
            if choice.origin == "compiled":
                return [f"to be compiled: {_why_compiled(choice, _permitted(choice))}"]
            return choice.trail
    except BuildError as error:
        return str(error).splitlines()


def refusal(spec: BuildSpec) -> str:
    """Why `acquire` would not even try to compile what it needs to; empty if it would, or needs not."""
    try:
        with _as_build_errors(spec):
            choice = _choose(spec)
            if choice.origin == "compiled":
                _permitted(choice)
    except BuildError as error:
        return str(error)
    return ""


def failure(spec: BuildSpec) -> str:
    """When and why the latest build of `spec`, as it is now, failed, and where its log is; empty if none did."""
    with _as_build_errors(spec):
        choice = _choose(spec)
        return failures.latest(choice.store, choice.plan) if isinstance(choice.plan, Plan) else ""


def build_into(spec: BuildSpec, directory: Path) -> Artifact:
    """Compile `spec` into the folder ``<directory>/<owner>/<op>``, replacing what is there.

    Args:
        directory: one of the `prebuilt_dirs` to be.

    Raises:
        ToolchainError, CompileError, SettingError: as for `acquire`.
    """
    start = time.perf_counter()
    with _as_build_errors(spec):
        plan = make_plan(make_request(spec))
        _expect_level(plan)
        target = directory.absolute() / spec.owner / spec.name
        target.parent.mkdir(parents=True, exist_ok=True)
        with store.private_folder(target.parent, ".build-") as work:
            made, _ = _make(plan, work, _AHEAD)
            (made / entry.LOG_FILE).unlink()  # the folders of this machine are nobody's business elsewhere
            if target.exists():
                target.rename(work / "replaced")
            made.rename(target)
        return _artifact(plan.request, target, "compiled", _AHEAD, start)


def _expect_level(plan: Plan) -> None:
    """That it is known which machines will run what is built for others."""
    cpu, arch = plan.request.cpu, plan.request.machine.target.arch
    if plan.spec.portable and not is_level(arch, cpu):
        levels = [str(CpuTarget(arch, level).flag) for level, _ in LEVELS.get(arch, ())]
        raise CompileError(
            "the binary would stop on other CPUs than it is made for, at an illegal instruction",
            plugin=plan.spec.owner,
            op=plan.spec.name,
            why=f"CFLAGS, CXXFLAGS or CXX has {cpu}",
            hint="leave that out: the SDK's kernels have code for every level of CPU"
            + (f"; or name a level: {', '.join(levels)}" if levels else ""),
        )


@dataclass
class _Choice:
    """What `acquire` will do, and how that came about.

    Attributes:
        origin: "compiled" means that nothing was found.
        found: the entry's folder, unless compiling.
        record: the entry's ``key.json``.
        trail: the steps of the decision, in words; the last one is why.
        plan: how to compile it, or why that is impossible.
        store: where a build would go.
    """

    request: Request
    origin: Origin = "compiled"
    found: Path = Path()
    record: Record = field(default_factory=dict)
    trail: list[str] = field(default_factory=list)
    plan: Plan | ToolchainError = field(default_factory=lambda: ToolchainError("no compiler was looked for"))
    store: Store = field(default_factory=lambda: Store(store.root()))

    def take(self, origin: Origin, search: Search, why: str) -> bool:
        """Note the outcome of a search; true if it ends the choosing."""
        said = dict.fromkeys(f"{origin}: {reason}" for reason in search.reasons)  # several builds may have one
        self.trail += [each for each in said if each not in self.trail]
        if search.path is None:
            return False
        self.origin, self.found, self.record = origin, search.path, search.record
        self.trail.append(f"{origin} {search.path}: {why}")
        return True


def _choose(spec: BuildSpec) -> _Choice:
    choice = _Choice(make_request(spec))
    found = _take_prebuilt(choice) or _take_cached(choice)
    if not found and not (settings.compile and isinstance(choice.plan, Plan)):
        _take_alike(choice)
    return choice


def _take_prebuilt(choice: _Choice) -> bool:
    request = choice.request
    folders = [folder / request.spec.owner / request.spec.name for folder in request.spec.prebuilt_dirs]
    there = (folder for folder in folders if folder.is_dir())
    search = entry.search(there, lambda record: entry.misfit(record, request), check=entry.check_whole)
    return choice.take("prebuilt", search, "made of these sources")


def _take_cached(choice: _Choice) -> bool:
    """Look for this very build, in the cache and, where that cannot be written, in the private one."""
    try:
        plan = choice.plan = make_plan(choice.request)
    except ToolchainError as error:
        choice.plan = error
        return False
    if choice.take("cache", choice.store.lookup(plan), "the key matches"):
        return True
    why_not = choice.store.unusable(choice.store.home(plan))
    return bool(why_not) and _use_private(choice, plan, why_not)


def _use_private(choice: _Choice, plan: Plan, why_not: str) -> bool:
    """Use the private cache in the place of one that cannot be written; true if the build is there."""
    choice.store = Store(store.private_root())
    choice.trail.append(f"cache: {why_not}; using {choice.store.root}")
    return choice.take("cache", choice.store.lookup(plan), "the key matches")


def _take_alike(choice: _Choice) -> bool:
    """Where nothing can be compiled, a binary of the same sources is used, whichever compiler made it."""
    search = Store(store.root()).lookup_alike(choice.request)
    why = "made of these sources, and nothing can be compiled here"
    if search.path is not None and (args := entry.user_args(search.record)) != choice.request.user_args:
        why += f"; with other arguments: {' '.join(args) or 'none'}"
    return choice.take("cache", search, why)


def _permitted(choice: _Choice) -> Plan:
    """The plan, if it may and can be carried out."""
    spec, trail = choice.request.spec, "; ".join(choice.trail)
    if not settings.compile:
        raise CompileForbiddenError(
            "nothing fits, and compiling is forbidden",
            plugin=spec.owner,
            op=spec.name,
            why=f"DS_PLUGIN_COMPILE=0; {trail or f'nothing prebuilt, nothing in {choice.store.root}'}",
            hint=f"`sdk build` on a machine with a compiler, into {store.root()}, or unset DS_PLUGIN_COMPILE",
        )
    if isinstance(choice.plan, ToolchainError):
        error = choice.plan
        why = "; ".join(part for part in (error.why, trail) if part)
        raise ToolchainError(error.what, plugin=spec.owner, op=spec.name, why=why, hint=error.hint)
    if reason := choice.store.noexec():
        raise CompileError(
            "what is compiled could not be loaded",
            plugin=spec.owner,
            op=spec.name,
            why="; ".join([*choice.trail, reason]),
            hint="DS_PLUGIN_CACHE_DIR: a folder on a file system that is mounted without noexec",
        )
    return choice.plan


def _build(plan: Plan, choice: _Choice, start: float) -> Artifact:
    """Compile into the store, once among all processes that want the same."""
    spec, place = plan.spec, choice.store
    locks = place.base / ".locks"
    place.make_folder(locks)
    home = place.home(plan)
    known = {*store.children(home)}

    def delivered() -> bool:
        return not known.issuperset(store.children(home))  # entries also go: damaged ones are removed

    file, group = locks / f"{plan.direct}.lock", store.shared_by_group(locks)
    with lock.building(file, spec.name, timeout=settings.lock_timeout, done=delivered, group=group):
        search = place.lookup(plan)  # another process may have built it meanwhile
        if search.path is not None:
            why = "another process has just compiled it"
            return _artifact(plan.request, search.path, "cache", why, start, search.record)
        left = [folder for folder in search.useless if place.discard(folder)]  # whose owner alone can remove them
        if search.useless:
            _log.warning("op '%s': %s; it is built again", spec.name, "; ".join(search.reasons))
        reason = _why_compiled(choice, plan)
        level = logging.INFO if place.root == store.root() else logging.WARNING  # the cache asked for is not used
        _log.log(level, "op '%s': compiling; %s", spec.name, reason)
        with place.workplace(spec.name) as work:
            try:
                made, content = _make(plan, work, reason, place)
            except CompileError as error:
                failures.keep(error, work / "entry" / entry.LOG_FILE, place, plan)
                raise
            name = content if home / content not in left else f"{content}-{secrets.token_hex(4)}"
            path = place.publish(made, home / name)
            failures.forget(place, plan)
    return _artifact(plan.request, path, "compiled", reason, start)


def _make(plan: Plan, work: Path, reason: str, place: Store | None = None) -> tuple[Path, str]:
    """Carry out `plan` in `work`; objects are taken from `place`, and kept there. Returns the finished entry's folder,
    and its content key.
    """
    start = time.perf_counter()
    made = work / "entry"
    made.mkdir(mode=0o755)  # an umask of 0 must not make it anybody's
    headers = _objects_and_link(plan, work, made / entry.LOG_FILE, place)
    (work / plan.spec.library).rename(made / plan.spec.library)
    entry.write(made, plan, headers, seconds=time.perf_counter() - start, reason=reason)
    for file in made.iterdir():  # nor may what is in it be
        if (mode := file.stat().st_mode) & 0o022:  # where chmod is refused nothing need be changed, with a usual umask
            file.chmod(mode & ~0o022)
    return made, entry.content_key(plan.direct, headers)


def _objects_and_link(plan: Plan, work: Path, log: Path, place: Store | None) -> list[entry.Header]:
    """Make the library in `work`, by the linker alone where that will do. Returns the headers."""
    headers = objects.take(plan, place, work) if place is not None else None
    if headers is not None:
        _log.info("op '%s': only the link has changed", plan.spec.name)
        compiling.relink(plan, work, log)
        return headers
    headers = entry.describe_headers(compiling.run(plan, work, log), plan.request.tokens)
    if place is not None:
        objects.keep(plan, place, work, headers)
    return headers


def _why_compiled(choice: _Choice, plan: Plan) -> str:
    """Why nothing else fits, and what changed since the latest build of this op."""
    latest = choice.store.newest(plan.spec.owner, plan.spec.name)
    if latest is None:
        return "; ".join([*choice.trail, "first build"])
    # The commands follow from the rest; they are shown only if nothing else explains the difference.
    old, new = ({**key, "commands": ()} for key in (latest["key"], plan.key))
    changes = differences(old, new) or differences(latest["key"], plan.key)
    return "; ".join([*choice.trail, *(f"rebuilt: {change}" for change in changes)])


def _artifact(
    request: Request, folder: Path, origin: Origin, reason: str, start: float, record: Record | None = None
) -> Artifact:
    """What is in `folder`; a `record` that was read already is not read again: the folder may be gone by now."""
    path = folder / request.spec.library
    return Artifact(path, origin, time.perf_counter() - start, reason, record or entry.read(folder))


@contextlib.contextmanager
def _as_build_errors(spec: BuildSpec) -> Iterator[None]:
    """Name op and plugin in errors that lack them, and make typed errors of the operating system's."""
    try:
        yield
    except BuildError as error:
        error.op, error.plugin = error.op or spec.name, error.plugin or spec.owner
        raise
    except DamagedError as error:  # as when another process prunes the cache between the choice and its use
        raise ArtifactError("the binary is gone or damaged", plugin=spec.owner, op=spec.name, why=str(error)) from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "free some space, or put the cache elsewhere with DS_PLUGIN_CACHE_DIR" if full else ""
        raise CompileError(
            "the kernel could not be built", plugin=spec.owner, op=spec.name, why=str(error), hint=hint
        ) from error
