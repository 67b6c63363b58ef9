"""``sdk new-plugin``: a vendor's project from the template that the SDK ships."""

from __future__ import annotations

import keyword
import re
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ds_plugin_sdk import __version__, registry, simulator
from ds_plugin_sdk.errors import ScaffoldError

Runtime = Literal["simulated", "torch"]

LICENSES = ("Apache-2.0", "MIT", "BSD-3-Clause", "Proprietary")

# Device types that torch's c10 library knows (c10/core/DeviceType.h): a simulated device cannot take their names.
# Lines as wide as they may be, rather than one for each name.
# fmt: off
TORCH_DEVICES = frozenset({
    "cpu", "cuda", "fpga", "hip", "hpu", "ideep", "ipu", "lazy", "maia", "meta", "metal", "mkldnn", "mps", "mtia",
    "opencl", "opengl", "privateuseone", "ve", "vulkan", "xla", "xpu",
})
# fmt: on

# Collectives that torch knows, with or without having them (torch/distributed/distributed_c10d.py).
TORCH_COLLECTIVES = frozenset({"fake", "gloo", "mpi", "nccl", "ucc", "xccl"})

# Names of the SDK's own plugins and commands, and those that would hide what every program imports.
_TAKEN = frozenset({"cpu", "cuda", "cls", "deepspeed", "meta", "privateuseone", "sdk", "self", "simulator", "torch"})

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")  # pip takes a__b and a_b for one project
_LONGEST = 30
_NOT_SOURCE = shutil.ignore_patterns("__pycache__")


@dataclass(frozen=True)
class Project:
    """What to generate.

    Attributes:
        name: the plugin's name, as in ``DS_ACCELERATOR=<name>``.
        vendor: author of the project.
        runtime: ``simulated`` brings a device that needs no hardware, to be replaced file by file; ``torch``
            is for a device that torch, or the vendor's torch extension, knows already.
        license: one of `LICENSES`.
        output: folder in which the project's folder is made.
    """

    name: str
    vendor: str = "Your Company"
    runtime: Runtime = "simulated"
    license: str = "Apache-2.0"
    output: Path = Path()

    @property
    def folder(self) -> Path:
        return self.output / f"ds-plugin-{self.name.replace('_', '-')}"

    @property
    def device_type(self) -> str:
        """torch's name of the device.

        torch takes letters and underscores alone; and where torch has a device of the plugin's name itself, the
        simulated one has another.
        """
        if self.runtime == "torch":
            return self.letters
        return f"{self.letters}sim" if self.letters in TORCH_DEVICES else self.letters

    @property
    def letters(self) -> str:
        """The name without its digits."""
        return re.sub(r"[0-9]+", "", self.name).strip("_")


def generate(project: Project) -> Path:
    """Render the template. Returns the project's folder, which is there as a whole or not at all.

    Raises:
        ScaffoldError: the name cannot be used, the folder exists or cannot be written, or cookiecutter is missing.
    """
    _check(project)
    _require_cookiecutter(project)
    from cookiecutter.exceptions import CookiecutterException

    try:
        project.output.mkdir(parents=True, exist_ok=True)
        # An absolute path: cookiecutter takes one like me@work/... for an address.
        with tempfile.TemporaryDirectory(dir=project.output.absolute(), prefix=".new-plugin-") as scratch:
            made = _render(project, Path(scratch))
            made.rename(project.folder)  # raises for a folder created meanwhile, unless it is empty
    except OSError as error:
        raise _unwritten(project, error.strerror or str(error)) from error
    except CookiecutterException as error:
        raise _unwritten(project, str(error)) from error
    return project.folder


def _unwritten(project: Project, why: str) -> ScaffoldError:
    return ScaffoldError(
        "the project cannot be written",
        plugin=project.name,
        why=f"{project.folder}: {why}",
        hint="choose another place with --output",
    )


def template_folder() -> Path:
    """The template: inside the wheel, or in a source checkout."""
    package = Path(__file__).parent.resolve()
    installed = package / "template"
    return installed if installed.is_dir() else package.parents[1] / "plugins" / "xyz_template"


def _check(project: Project) -> None:
    name = project.name
    if not _NAME.fullmatch(name) or len(name) > _LONGEST or keyword.iskeyword(name):
        raise ScaffoldError(
            f"{name!r} cannot be a plugin's name",
            why=f"a name begins with a letter from a to z, goes on with those, digits and single underscores between "
            f"them, has at most {_LONGEST} characters, and is no keyword of Python",
            hint="for example: sdk new-plugin zap",
        )
    if name in _TAKEN:
        raise ScaffoldError(f"the name '{name}' is taken", why="torch or the SDK itself uses it", hint="choose another")
    owner = _owner_in_torch(project)
    if owner is not None:
        raise ScaffoldError(
            f"the name '{name}' is taken",
            why=f"the device would be torch.{project.device_type}, and {owner} is there already",
            hint="choose another, which torch does not have",
        )
    if project.runtime == "simulated" and f"{project.device_type}ccl" in TORCH_COLLECTIVES:
        raise ScaffoldError(
            f"the name '{name}' is taken",
            why=f"the collectives of its device would be {project.device_type}ccl, which torch has itself",
            hint="choose another",
        )
    others = registry.scan().get(name)
    if others:
        raise ScaffoldError(
            f"the name '{name}' is taken",
            plugin=name,
            why=f"{others[0]} is installed here and has it",
            hint=f"choose another, or pip uninstall {others[0].distribution}",
        )
    if project.license not in LICENSES:
        raise ScaffoldError(
            f"the template has no licence '{project.license}'",
            why=f"it has {', '.join(LICENSES)}",
            hint="choose one of them, and replace the file LICENSE later",
        )
    if re.search(r"[\"\\{}]", project.vendor) or not project.vendor.isprintable() or not project.vendor.strip():
        raise ScaffoldError(
            f"{project.vendor!r} cannot be a vendor's name",
            why="it is written into pyproject.toml: no quotes, backslashes, braces, line breaks, control characters",
            hint="for example: --vendor 'Zap Devices Ltd.'",
        )
    if project.folder.exists():
        raise ScaffoldError(
            "the folder exists, and nothing is ever overwritten",
            plugin=name,
            why=str(project.folder.absolute()),
            hint="move it away, or choose another place with --output",
        )


def _owner_in_torch(project: Project) -> str | None:
    """What torch has under the device's name, if that is no device module: a function, a class, another module."""
    import torch

    device = project.device_type
    there = getattr(torch, device, None)
    # torch.ops and torch.classes have all attributes that one asks for.
    namespaces = (torch._ops._Ops, torch._classes._Classes)
    if there is not None and (isinstance(there, namespaces) or not hasattr(there, "device_count")):
        return f"torch.{device}"
    if project.runtime != "simulated" or there is not None:
        return None
    # A simulated device gives these a method of its name; a device that torch knows has it.
    storages = (torch.UntypedStorage, torch.TypedStorage)
    for kind in (torch.Tensor, torch.nn.Module, torch.nn.utils.rnn.PackedSequence, *storages):
        if hasattr(kind, device):
            return f"torch's {kind.__qualname__}.{device}"
    return None


def _require_cookiecutter(project: Project) -> None:
    try:
        import cookiecutter.main  # noqa: F401  # tried: it may not be installed
    except ImportError as error:
        raise ScaffoldError(
            "a project cannot be generated",
            plugin=project.name,
            why=f"cookiecutter, which renders the template, cannot be imported: {error}",
            hint="pip install 'ds-plugin-sdk[vendor]'",
        ) from error


def _render(project: Project, scratch: Path) -> Path:
    from cookiecutter.main import cookiecutter

    template = Path(shutil.copytree(template_folder(), scratch / "template", ignore=_NOT_SOURCE))
    made = cookiecutter(
        str(template),
        no_input=True,
        output_dir=str(scratch),
        # Nobody's ~/.cookiecutterrc changes what is generated, and nothing is written into their home, if there is one.
        default_config={"replay_dir": str(scratch / "replay"), "cookiecutters_dir": str(scratch / "cookiecutters")},
        extra_context={
            "name": project.name,
            "vendor": project.vendor,
            "runtime": project.runtime,
            "license": project.license,
            "device_type": project.device_type,
            "sdk_version": __version__,
        },
    )
    _finish(project, Path(made) / f"ds_plugin_{project.name}")
    for path in (Path(made), *Path(made).rglob("*")):  # the SDK may be installed where nobody can write
        path.chmod(path.stat().st_mode | stat.S_IWUSR)
    return Path(made)


def _finish(project: Project, package: Path) -> None:
    """Bring the simulated runtime, whose source is the SDK, or take away what only it needs."""
    if project.runtime == "simulated":
        shutil.copytree(simulator.sources_dir(), package / "runtime", ignore=_NOT_SOURCE, dirs_exist_ok=True)
        return
    shutil.rmtree(package / "runtime")
    (package / "csrc" / "fused_adam.cpp").unlink()
