"""Finding installed plugins: metadata first, then each manifest guarded by itself."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

from ds_plugin_sdk import SDK_API
from ds_plugin_sdk.errors import PluginConflictError, PluginError, PluginLoadError, PluginVersionError, SettingError
from ds_plugin_sdk.registry import deadline
from ds_plugin_sdk.registry.plugin import ENTRY_POINT_GROUP, Plugin, Probe
from ds_plugin_sdk.settings import settings


@dataclass(frozen=True)
class Candidate:
    """A plugin as its distribution's metadata shows it; nothing of it is imported yet.

    What it says of itself is asked for once in a process, each time within ``DS_PLUGIN_PROBE_TIMEOUT``.
    """

    name: str
    distribution: str
    version: str
    entry_point: importlib.metadata.EntryPoint
    folder: str = ""

    @property
    def manifest(self) -> Plugin:
        """The plugin's manifest, imported at first use.

        Raises:
            PluginLoadError: the module cannot be imported, or holds no `Plugin` of this name.
            PluginVersionError: the plugin was written for another SDK interface.
        """
        manifest = _manifest(self)
        if isinstance(manifest, PluginError):
            raise manifest
        return manifest

    def probe(self) -> Probe:
        """The plugin's answer, or `Probe.broken` where it cannot give one."""
        return _probe(self)

    def read_manifest(self) -> Plugin:
        """`manifest`, imported and checked now."""
        plugin = self._import()
        if not isinstance(plugin, Plugin) or plugin.name != self.name:
            found, hint = repr(plugin), f'write {self.name} = "{self.entry_point.module}:plugin", and there plugin = '
            if isinstance(plugin, Plugin):
                found, hint = f"a Plugin named '{plugin.name}'", "give the entry point and the Plugin one name: "
            raise PluginLoadError(
                "a plugin's entry point does not give its manifest",
                plugin=self.name,
                why=f"{self.entry_point.value} of {self} is {found}",
                hint=f"{hint}ds_plugin_sdk.Plugin(name={self.name!r}, ...)",
            )
        problem = plugin.problem()
        if problem is not None:
            raise PluginLoadError(
                "a plugin's manifest cannot be used",
                plugin=self.name,
                why=f"{self.entry_point.value} of {self}: {problem}",
                hint="the fields are described in ds_plugin_sdk.Plugin",
            )
        self._check_version(plugin)
        return plugin

    def _import(self) -> object:
        self._check_entry_point()
        try:
            return deadline.call(self.entry_point.load)
        except deadline.ExceededError as error:
            raise PluginLoadError(
                "a plugin cannot be imported",
                plugin=self.name,
                why=f"{self}: importing {self.entry_point.module} {error}",
                hint=f"its manifest must import nothing heavy; pip uninstall {self.distribution}, or wait longer "
                f"with {type(settings).probe_timeout.variable}",
            ) from None
        except SettingError as error:
            raise PluginLoadError(
                "a plugin cannot be imported", plugin=self.name, why=f"{error.what}: {error.why}", hint=error.hint
            ) from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            ours = missing is not None and self.entry_point.module.startswith(missing.split(".")[0])
            if missing and not ours:
                hint = f"install what it needs: pip install {missing}"
            elif isinstance(error, TypeError) and "Plugin.__init__() got an unexpected" in str(error):
                hint = "it may be written for a newer SDK: pip install --upgrade ds-plugin-sdk"
            else:
                hint = f"reinstall or remove it: pip uninstall {self.distribution}"
            raise PluginLoadError(
                "a plugin cannot be imported",
                plugin=self.name,
                why=f"{self.entry_point.value} of {self}: {type(error).__name__}: {error}",
                hint=hint,
            ) from error

    def _check_entry_point(self) -> None:
        """Python itself says of a text that names nothing only that None has no attribute."""
        if self.entry_point.pattern.match(self.entry_point.value) is None:
            raise PluginLoadError(
                "a plugin's entry point cannot be read",
                plugin=self.name,
                why=f"{self.entry_point.value!r} of {self} is no 'module:object'",
                hint=_registration(self.name),
            )

    def _check_version(self, plugin: Plugin) -> None:
        major, minor = plugin.sdk_api
        if (major, minor) <= SDK_API and major == SDK_API[0]:
            return
        newer = (major, minor) > SDK_API
        raise PluginVersionError(
            f"plugin and SDK do not fit: it needs SDK interface {major}.{minor}, "
            f"this SDK offers {SDK_API[0]}.{SDK_API[1]}",
            plugin=self.name,
            why=f"{self} is {'newer' if newer else 'older'} than this SDK allows",
            hint=f"pip install --upgrade {'ds-plugin-sdk' if newer else self.distribution}",
        )

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@functools.cache
def _manifest(candidate: Candidate) -> Plugin | PluginError:
    try:
        return candidate.read_manifest()
    except PluginError as error:
        return error


@functools.cache
def _probe(candidate: Candidate) -> Probe:
    try:
        answer = deadline.call(candidate.manifest.probe)
    except PluginError as error:
        return Probe.broken(str(error))
    except deadline.ExceededError as error:
        return Probe.broken(f"its probe {error}")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Probe.broken(f"its probe raised {type(error).__name__}: {error}")
    problem = answer.problem() if isinstance(answer, Probe) else "not a Probe"
    return answer if problem is None else Probe.broken(f"its probe gave {answer!r}, {problem}")


def scan() -> dict[str, list[Candidate]]:
    """The installed plugins by name, from metadata alone; more than one under a name is a conflict."""
    found: dict[str, list[Candidate]] = {}
    seen: set[tuple[str, str]] = set()
    for entry_point in sorted(
        importlib.metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: (entry.name, entry.value)
    ):
        distribution = entry_point.dist
        title = _metadata(distribution, "Name") or _folder_name(distribution)
        version = _metadata(distribution, "Version") or "unknown"
        folder = str(distribution.locate_file("")) if distribution is not None else ""
        # The same distribution may be on sys.path twice (an editable install and its source folder).
        if (entry_point.name, title) not in seen:
            seen.add((entry_point.name, title))
            found.setdefault(entry_point.name, []).append(
                Candidate(entry_point.name, title, version, entry_point, folder)
            )
    return found


def _metadata(distribution: importlib.metadata.Distribution | None, field: str) -> str:
    """A field of METADATA; empty where the file, or the field in it, is missing, or the file cannot be read."""
    try:
        found = distribution.metadata if distribution is not None else None
    except (OSError, ValueError):  # it may be in another encoding
        return ""
    return found[field] if found is not None and field in found else ""


def _folder_name(distribution: importlib.metadata.Distribution | None) -> str:
    """A distribution's name by its folder ``<name>-<version>.dist-info``."""
    folder = getattr(distribution, "_path", None)
    return PurePath(str(folder)).stem.partition("-")[0] if folder is not None else "unknown"


def how_to_have(name: str) -> str:
    """What to do where no plugin of a name is installed."""
    similar = next((other for other in scan() if _folded(other) == _folded(name)), None)
    if similar is not None:
        return f"the installed one is called '{similar}'"
    if not _NAME.fullmatch(name):
        return "name one accelerator, as `sdk list` shows them"
    distribution = f"ds-plugin-{name.replace('_', '-')}"
    try:
        version = importlib.metadata.version(distribution)
    except (importlib.metadata.PackageNotFoundError, ValueError):  # a name that is empty, or none
        # No `pip install`: a typing error would install what somebody else has published under that name.
        return f"install the device vendor's plugin, by convention called {distribution}; `sdk list` has what is here"
    return f"{distribution} {version} is here and registers no plugin '{name}': {_registration(name)}"


def _folded(name: str) -> str:
    return name.strip().lower().replace("-", "_")


# Of a plugin, as packages are named.
_NAME = re.compile(r"[a-z0-9]+([-_][a-z0-9]+)*")


def _registration(name: str) -> str:
    group = f'[project.entry-points."{ENTRY_POINT_GROUP}"]'
    return f'write {name} = "package:plugin" under {group} of its pyproject.toml, and install it again'


def only(candidates: Iterable[Candidate]) -> Candidate:
    """The one candidate of a name; `PluginConflictError` if several distributions offer it."""
    first, *others = candidates
    if others:
        both = " and ".join(map(str, (first, *others)))
        raise PluginConflictError(
            "two distributions offer the same plugin",
            plugin=first.name,
            why=f"{both} both register it",
            hint=f"remove one: pip uninstall {others[-1].distribution}",
        )
    return first
