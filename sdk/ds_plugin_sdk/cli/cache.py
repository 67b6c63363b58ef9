"""``sdk cache``: the compiled kernels on this machine."""

from __future__ import annotations

import re
import time

import typer

from ds_plugin_sdk.cli.console import output, table
from ds_plugin_sdk.errors import OpError
from ds_plugin_sdk.jit import cache as store

cache = typer.Typer(name="cache", help="List, explain, verify and prune compiled kernels.", no_args_is_help=True)

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}


@cache.command("ls")
def ls() -> None:
    """List the compiled kernels."""
    entries = list(store.entries())
    if entries:
        _list(entries)
    else:
        why = store.unreadable()
        output.print(
            f"The cache {store.root()} {f'cannot be read: {why}' if why else 'is empty'}.", soft_wrap=True, markup=False
        )
    if unusable := store.unusable():
        output.print(f"Nothing can be built into it: {unusable}.", soft_wrap=True, markup=False)
        output.print("Builds go to a temporary folder; DS_PLUGIN_CACHE_DIR names another.")


def _list(entries: list[store.Entry]) -> None:
    table(
        f"{store.root()}",
        ("op", "owner", "size", "built", "last used", "folder"),
        [
            (
                entry.op,
                entry.owner,
                _size(entry.bytes),
                _ago(entry.created),
                _ago(entry.last_used),
                entry.path.name,
            )
            for entry in sorted(entries, key=lambda entry: (entry.owner, entry.op, -entry.created))
        ],
    )
    output.print(f"{len(entries)} binaries, {_size(sum(entry.bytes for entry in entries))}")


@cache.command("why")
def why(op: str = typer.Argument(help="Name of an op, as `sdk cache ls` shows it.")) -> None:
    """Say what an op was built from, and what had changed since the build before."""
    lines = store.why(op)
    if not lines:
        there = sorted({entry.op for entry in store.entries()})
        raise OpError(
            "the cache has no build of this op",
            op=op,
            why=f"{store.root()} has builds of {', '.join(there) or 'nothing'}",
            hint="`sdk report` says where each op comes from",
        )
    for line in lines:
        output.print(line, markup=False, highlight=False, soft_wrap=True)


@cache.command("verify")
def verify() -> None:
    """Check every binary against its digest. Exit status 1 if any is damaged."""
    problems = list(store.verify())
    for problem in problems:
        output.print(str(problem), markup=False, highlight=False, soft_wrap=True)
    count = len(list(store.entries()))
    output.print(f"{count} binaries checked, {len(problems)} damaged; a damaged one is rebuilt at its next use.")
    if problems:
        raise typer.Exit(1)


@cache.command("prune")
def prune(
    max_size: str = typer.Option("", help="Keep the most recently used up to this size, such as 500M."),
    older_than: float | None = typer.Option(None, min=0, help="Remove what was not used for so many days."),
    everything: bool = typer.Option(False, "--all", help="Remove everything."),
) -> None:
    """Remove compiled kernels; whatever is needed again is compiled again. Exit status 1 if any cannot be removed."""
    if not (max_size or older_than is not None or everything):
        raise typer.BadParameter("say what to remove: --max-size, --older-than or --all")
    removed, kept = store.prune(
        max_bytes=_bytes(max_size) if max_size else None,
        older_than=None if older_than is None else older_than * 86400,
        everything=everything,
    )
    output.print(f"{len(removed)} binaries removed, {_size(sum(entry.bytes for entry in removed))}")
    if kept:
        output.print(f"{len(kept)} cannot be removed: {kept[0][1]}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([kmg]?)i?b?", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; write 500M or 2G")
    return int(match[1]) * _UNITS[match[2]]


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _ago(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "just now"
