"""``sdk new-plugin``: from nothing to a plugin that trains, without the hardware."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path
from typing import Literal

import typer

from ds_plugin_sdk import scaffold
from ds_plugin_sdk.cli.console import output


def new_plugin(
    name: str = typer.Argument(help="The plugin's name: a lower-case Python identifier, such as zap."),
    vendor: str = typer.Option("Your Company", help="Author of the project."),
    runtime: Literal["simulated", "torch"] = typer.Option(
        "simulated",
        help="simulated: a device without hardware, whose files you replace by yours one by one; "
        "torch: a device that torch, or your torch extension, knows already.",
    ),
    license: str = typer.Option("Apache-2.0", help=f"One of {', '.join(scaffold.LICENSES)}."),
    into: Path = typer.Option(Path(), "--output", help="Folder in which the project's folder is made."),
) -> None:
    """Generate a plugin project that builds, passes its tests and trains under DeepSpeed."""
    project = scaffold.Project(name, vendor=vendor, runtime=runtime, license=license, output=into)
    folder = scaffold.generate(project)
    say = functools.partial(output.print, markup=False, highlight=False, soft_wrap=True)
    say(f"Made {folder}: plugin '{name}', device '{project.device_type}'.")
    if project.device_type == f"{project.letters}sim":
        say(f"torch has a device '{project.letters}' itself, so the simulated one is called '{project.device_type}'.")
    elif project.device_type != name:
        say("torch takes no digits in a device's name.")
    say("Next:")
    say(f"  pip install --no-build-isolation -e {shlex.quote(str(folder))}")
    say("  sdk list")
    say(f"  DS_ACCELERATOR={name} python {shlex.quote(str(folder / 'examples' / 'train.py'))}")
