"""Every error the SDK raises.

    SdkError
    ├── SettingError                (ValueError)    an environment variable has a value we cannot use
    ├── PluginError
    │   ├── PluginLoadError                         a plugin's module could not be imported, or is not a Plugin
    │   ├── PluginConflictError                     two distributions offer one plugin name
    │   ├── PluginVersionError                      plugin and SDK do not fit together
    │   └── UnknownAcceleratorError (ValueError)    no plugin of the requested name
    ├── InvalidAcceleratorError     (TypeError)     an accelerator that contradicts itself
    ├── DeviceNameError             (ValueError)    a torch device cannot be made under this name
    ├── BuildError
    │   ├── ToolchainError                          no usable compiler
    │   ├── CompileError                            the compiler or linker failed
    │   ├── CompileForbiddenError                   settings forbid compiling, and nothing prebuilt or cached fits
    │   └── ArtifactError                           a binary is damaged, foreign, or cannot be loaded
    ├── MissingLibraryError         (ImportError)   a library that an integration is for is not here, or too old
    ├── HostfileError               (ValueError)    a hostfile cannot be used
    ├── SourceError                 (ValueError)    a source cannot be read, or is not Python
    ├── ScaffoldError                               a project cannot be generated
    ├── ConformanceError                            the conformance suite cannot run, or its expectations cannot be read
    ├── CollectiveError             (RuntimeError)  a rank has ended, or does not join a collective
    └── OpError
        ├── OpNotImplementedError   (ValueError)    this plugin does not offer this op
        ├── InvalidTensorError      (ValueError, RuntimeError)  an op does not support a tensor that it was given
        ├── UnsupportedOptionError  (ValueError)    an optimizer does not implement an option of a group or checkpoint
        ├── CheckpointError         (ValueError)    an optimizer cannot go on from a state dict
        ├── GraphCaptureError       (RuntimeError)  an optimizer's step cannot be captured in a device graph
        └── FileError               (OSError)       a tensor cannot be read from a file, or written to it

Each error says what happened, to which plugin or op, why, and what to do next, in that order; the parts are
attributes. Errors survive pickling, because launchers carry them from process to process.
"""

from __future__ import annotations

from typing import Any

# Where hints send the reader: packages carry no pages.
DOCUMENTATION = "https://github.com/ds-plugin-sdk/ds-plugin-sdk/blob/main/docs"


class SdkError(Exception):
    """Root of the SDK's errors.

    Args:
        what: what happened, one clause.
        plugin: name of the plugin concerned, if any.
        op: name of the op concerned, if any.
        why: the cause.
        hint: what the reader can do next.
    """

    def __init__(
        self, what: str, *, plugin: str | None = None, op: str | None = None, why: str = "", hint: str = ""
    ) -> None:
        self.what, self.plugin, self.op, self.why, self.hint = what, plugin, op, why, hint
        super().__init__(what)

    def __str__(self) -> str:
        subject = ", ".join(f"{kind} '{name}'" for kind, name in (("plugin", self.plugin), ("op", self.op)) if name)
        text = f"{self.what} ({subject})" if subject else self.what
        if self.why:
            text += f": {self.why}"
        if self.hint:
            text += f"\n  -> {self.hint}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        state = {"plugin": self.plugin, "op": self.op, "why": self.why, "hint": self.hint}
        return _rebuild, (type(self), self.what, state)


def _rebuild(cls: type[SdkError], what: str, state: dict[str, Any]) -> SdkError:
    return cls(what, **state)


class SettingError(SdkError, ValueError):
    """An environment variable has a value the SDK cannot use."""


class PluginError(SdkError):
    """Something is wrong with a plugin."""


class PluginLoadError(PluginError):
    """A plugin's entry point could not be imported, or did not give a `Plugin`."""


class PluginConflictError(PluginError):
    """Two distributions offer a plugin of the same name."""


class PluginVersionError(PluginError):
    """A plugin was written for an SDK interface that this SDK does not offer."""


class UnknownAcceleratorError(PluginError, ValueError):
    """An accelerator was requested by a name that nothing installed offers."""


class InvalidAcceleratorError(SdkError, TypeError):
    """An accelerator object contradicts itself or is not an accelerator."""


class DeviceNameError(SdkError, ValueError):
    """A torch device cannot be made under this name."""


class BuildError(SdkError):
    """A native kernel could not be built, found or loaded."""


class ToolchainError(BuildError):
    """No usable compiler was found."""


class CompileError(BuildError):
    """The compiler or linker failed."""


class CompileForbiddenError(BuildError):
    """Settings forbid compiling, and no prebuilt or cached binary fits."""


class ArtifactError(BuildError):
    """A binary is damaged, belongs to another machine, or cannot be loaded."""


class MissingLibraryError(SdkError, ImportError):
    """The library that an integration is for is not installed, or is older than the integration needs."""


class HostfileError(SdkError, ValueError):
    """A hostfile cannot be read, or has something else than hosts and their slots."""


class SourceError(SdkError, ValueError):
    """A source cannot be read, or is not Python."""


class ScaffoldError(SdkError):
    """A plugin project cannot be generated."""


class ConformanceError(SdkError):
    """The conformance suite cannot run: its target or its expectations cannot be loaded."""


class CollectiveError(SdkError, RuntimeError):
    """A rank that takes part in a collective has ended, or did not join in time."""


class OpError(SdkError):
    """An op cannot do what was asked."""


class OpNotImplementedError(OpError, ValueError):
    """The current plugin does not offer this op. A ValueError, because DeepSpeed's fallbacks catch that type."""


class InvalidTensorError(OpError, ValueError, RuntimeError):
    """An op does not support the device, dtype, shape or layout of a tensor that it was given.

    A ValueError, and a RuntimeError, because that is what torch's ops and DeepSpeed's raise.
    """


class UnsupportedOptionError(OpError, ValueError):
    """An optimizer does not implement an option that would change its result."""


class CheckpointError(OpError, ValueError):
    """A state dict lacks what an optimizer needs to go on from it."""


class GraphCaptureError(OpError, RuntimeError):
    """An optimizer's step was captured in a device graph, which would repeat one step number and learning rate."""


class FileError(OpError, OSError):
    """A tensor could not be read from a file or written to it. `errno` says why, where the system did."""
