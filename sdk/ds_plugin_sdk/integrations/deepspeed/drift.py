"""The SDK's accelerator contract against that of the installed DeepSpeed, both ways.

DeepSpeed's abstract class grows. What a release has and the SDK's class lacks is filled in when DeepSpeed is imported
(`fill`), so that plugins written earlier keep working; `contract` says what was filled in, what DeepSpeed has given
up, where signatures differ, and which of DeepSpeed's builders the SDK does not serve.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ds_plugin_sdk import op_builder, registry
from ds_plugin_sdk.accelerator import DeepSpeedAccelerator
from ds_plugin_sdk.errors import PluginVersionError, SdkError
from ds_plugin_sdk.integrations.deepspeed import rebind
from ds_plugin_sdk.op_builder import op_table

Status = Literal["abstract", "default", "missing"]
Kind = Literal["only DeepSpeed", "only the SDK", "abstractness", "signature", "builder"]

# What `fill` added to the SDK's class, with DeepSpeed's members.
_filled: dict[str, Any] = {}


@dataclass(frozen=True)
class Difference:
    """One member or builder that the SDK and the installed DeepSpeed do not have alike.

    Attributes:
        name: the member of the accelerator, or the builder's class name.
        ours: the SDK's: ``abstract``, ``default`` or ``missing``; for a builder ``default`` means that it is served.
        theirs: the same of the installed DeepSpeed.
        kind: what differs.
        consequence: what follows for a plugin.
    """

    name: str
    ours: Status
    theirs: Status
    kind: Kind
    consequence: str


@dataclass(frozen=True)
class Contract:
    """All differences between the SDK's contract and one DeepSpeed."""

    deepspeed_version: str
    differences: tuple[Difference, ...]

    def of(self, kind: str) -> dict[str, Difference]:
        """The differences of a kind, by name."""
        return {difference.name: difference for difference in self.differences if difference.kind == kind}

    def rows(self) -> list[tuple[str, str, str]]:
        """Lines to print: name, what differs, what follows. The SDK's defaults, which are its purpose, get one line."""
        relieved = [each for each in self.differences if each.kind == "abstractness" and each.ours == "default"]
        rows: list[tuple[str, str, str]] = [
            (each.name, each.kind, each.consequence) for each in self.differences if each not in relieved
        ]
        if relieved:
            rows.append((f"{len(relieved)} members", "abstractness", "abstract in DeepSpeed; the SDK has a default"))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "deepspeed_version": self.deepspeed_version,
            "differences": [asdict(difference) for difference in self.differences],
        }


def fill(theirs: type) -> None:
    """Give the SDK's class the members that DeepSpeed's has and it lacks.

    A default is taken over. An abstract member becomes one that raises `PluginVersionError` when it is used, so that
    accelerators still construct.
    """
    for name, member in vars(theirs).items():
        if not _is_contract(name) or hasattr(DeepSpeedAccelerator, name):
            continue
        abstract = getattr(member, "__isabstractmethod__", False)
        setattr(DeepSpeedAccelerator, name, _unanswered(name, member) if abstract else member)
        _filled[name] = member


def complete_subclasses(theirs: type) -> None:
    """Give each class that will be derived from DeepSpeed's the SDK's default of every member that it lacks.

    Python refuses to make an instance of a class that lacks one, such as a class written for an earlier release. What
    the SDK has no default for stays abstract, and Python names it.
    """
    inherited = theirs.__init_subclass__

    def complete(cls: Any, /, **options: Any) -> None:
        inherited(**options)
        for name in getattr(theirs, "__abstractmethods__", ()):
            if inspect.getattr_static(cls, name) is vars(theirs)[name]:
                default = inspect.getattr_static(DeepSpeedAccelerator, name)
                if not getattr(default, "__isabstractmethod__", False):
                    setattr(cls, name, default)

    theirs.__init_subclass__ = classmethod(complete)  # type: ignore[assignment]  # mypy wants a plain method


def contract() -> Contract:
    """Compare with the installed DeepSpeed, which is imported for it.

    Raises:
        SdkError: DeepSpeed is not installed.
    """
    try:
        theirs = importlib.import_module("deepspeed.accelerator").DeepSpeedAccelerator
    except ModuleNotFoundError as error:
        raise SdkError(
            "there is no DeepSpeed to compare with",
            why=str(error),
            hint="pip install 'ds-plugin-sdk[deepspeed]'",
        ) from error
    version = str(importlib.import_module("deepspeed").__version__)  # a clone on PYTHONPATH has no metadata
    return Contract(version, (*compare(theirs), *_builders()))


def compare(theirs: type) -> Iterator[Difference]:
    """The differences between the SDK's class and a class of DeepSpeed's, member by member."""
    ours = {name: value for name, value in vars(DeepSpeedAccelerator).items() if name not in _filled}
    # What the SDK's class needs for itself begins with an underscore; what DeepSpeed's has so, subclasses override.
    names = {name for name in ours if not name.startswith("_")} | {name for name in vars(theirs) if _is_contract(name)}
    for name in sorted(names):
        difference = _difference(name, ours.get(name), vars(theirs).get(name))
        if difference is not None:
            yield difference


def _difference(name: str, our: Any, their: Any) -> Difference | None:
    kind: Kind
    match _status(our), _status(their):
        case "missing", "default":
            kind, consequence = "only DeepSpeed", "DeepSpeed's default is taken over"
        case "missing", "abstract":
            kind, consequence = "only DeepSpeed", "plugins must define it; until then its use raises PluginVersionError"
        case _, "missing":
            kind, consequence = "only the SDK", "this DeepSpeed does not ask for it"
        case _ if not _accepts(our, their):
            kind, consequence = "signature", f"DeepSpeed has {name}{_signature(their)}, the SDK {name}{_signature(our)}"
        case "default", "abstract":
            kind, consequence = "abstractness", "the SDK has a default; plugins need not define it"
        case "abstract", "default":
            kind, consequence = "abstractness", "DeepSpeed has a default; plugins must define it here"
        case _:
            return None
    return Difference(name, _status(our), _status(their), kind, consequence)


def _status(member: Any) -> Status:
    if member is None:
        return "missing"
    return "abstract" if getattr(member, "__isabstractmethod__", False) else "default"


def _is_contract(name: str) -> bool:
    return not name.startswith(("__", "_abc_"))


def _accepts(our: Any, their: Any) -> bool:
    """Whether every call that fits DeepSpeed's signature fits the SDK's."""
    if not (inspect.isfunction(our) and inspect.isfunction(their)):
        return isinstance(our, property) == isinstance(their, property)
    mine = list(inspect.signature(our).parameters.values())[1:]
    asked = list(inspect.signature(their).parameters.values())[1:]
    if len(mine) < len(asked):
        return False
    shared = all(
        (own.name, own.kind) == (other.name, other.kind)
        and (own.default is not own.empty or other.default is other.empty)
        for own, other in zip(mine, asked, strict=False)
    )
    return shared and all(own.default is not own.empty for own in mine[len(asked) :])


def _signature(member: Any) -> str:
    """``(self, seed)``: names and defaults, no types, since DeepSpeed states none."""
    if not inspect.isfunction(member):
        return f" ({type(member).__name__})"
    signature = inspect.signature(member)
    unannotated = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(inspect.Signature(unannotated))


def _builders() -> Iterator[Difference]:
    current = registry.current()
    device, package = ("cpu", None) if current is None else (current.device_name(), current.op_builders)
    asked = rebind.builder_names()
    for name in sorted(asked):
        builder = op_builder.find(name, package, device)
        if issubclass(builder, op_builder.NotImplementedBuilder) and name != "NotImplementedBuilder":
            yield Difference(name, "missing", "default", "builder", f"not offered on '{device}': load() raises")
    parts = {op.builder for op in op_table.OPS if not op.deepspeed}
    ours = {name for name in op_builder.builders(package, device) if name not in parts}
    for name in sorted(ours - set(asked)):
        yield Difference(name, "default", "missing", "builder", "this DeepSpeed does not ask for it")


def _unanswered(name: str, member: Any) -> Any:
    """A member that can be there without an answer, until it is used."""

    def unanswered(self: DeepSpeedAccelerator, *args: Any, **kwargs: Any) -> Any:
        raise PluginVersionError(
            f"DeepSpeed asks for {name}, which the accelerator does not have",
            plugin=self.device_name(),
            why=f"{name}{_signature(member)} is newer than this SDK, and {type(self).__name__} does not define it",
            hint=f"define {name} in {type(self).__name__}, upgrade ds-plugin-sdk, or use an older DeepSpeed",
        )

    unanswered.__name__ = name
    kind: Callable[..., Any] = property if isinstance(member, property) else (lambda function: function)
    return kind(unanswered)
