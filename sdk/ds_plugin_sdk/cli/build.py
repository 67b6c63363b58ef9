"""``sdk build``: compile ops ahead of time, into the cache or into a folder."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ds_plugin_sdk import prebuild
from ds_plugin_sdk.cli.console import errors, table
from ds_plugin_sdk.errors import BuildError


def build(
    plugin: str = typer.Argument(help="Name of an installed plugin, such as cpu."),
    ops: str | None = typer.Option(None, help="Comma-separated op names; all ops of the plugin if not given."),
    into: Path | None = typer.Option(
        None,
        help="Put the binaries into this folder, portable across machines of this architecture, "
        "instead of into this user's cache.",
    ),
) -> None:
    """Compile a plugin's ops now, so that no job has to: on a login node, or for nodes without a compiler."""
    wanted = tuple(filter(None, (name.strip() for name in (ops or "").split(","))))
    if ops is not None and not wanted:
        raise typer.BadParameter("no op is named; without --ops all are built")
    builders = prebuild.builders_of(plugin, wanted)
    if into is not None:
        prebuild.check_writable(into)
    rows: list[tuple[str, str, str, str]] = []
    failed: list[BuildError] = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
    ) as progress:
        task = progress.add_task("building", total=len(builders))
        for builder in builders:
            progress.update(task, description=f"building {builder.name}")
            try:
                artifact = prebuild.build(builder, into)
                rows.append((builder.name, artifact.origin, f"{artifact.seconds:.1f} s", str(artifact.path)))
            except BuildError as error:
                failed.append(error)
                rows.append((builder.name, "broken", "", error.why or error.what))
            progress.advance(task)
        progress.update(task, description="built")
    table(f"Ops of plugin {plugin}", ("op", "from", "time", "binary"), rows)
    if failed:
        others = [error.op or error.what for error in failed[1:]]
        errors.print(f"[bold red]error:[/] {escape(str(failed[0]))}", soft_wrap=True)
        if others:
            errors.print(escape(f"and these failed too: {', '.join(others)}"), soft_wrap=True)
        raise typer.Exit(1)
