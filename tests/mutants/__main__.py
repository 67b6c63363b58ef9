"""``python -m mutants``: which check finds which seeded defect; ``make mutants``.

Exit status 1 unless each mutant is killed by the check of its clause, and each check kills one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from ds_plugin_sdk.conformance import suite
from ds_plugin_sdk.conformance.outcome import LEVELS
from ds_plugin_sdk.conformance.selection import matches
from mutants import Mutant, all_mutants
from mutants.hunt import Hunt, hunt, idle, keep, kept


def main() -> int:
    """Run what the arguments select."""
    arguments = _arguments()
    mutants = [each for each in all_mutants() if _selected(each, arguments.level, arguments.k)]
    if arguments.list:
        _table([[each.name, each.clause, each.target.rpartition(":")[2], each.description] for each in mutants])
        return 0
    start = time.monotonic()
    file: Path | None = arguments.resume

    def tell(each: Hunt) -> None:
        _progress(each)
        if file is not None:
            keep(each, file)

    hunts = hunt(mutants, arguments.jobs, tell, kept(file, mutants) if file is not None else None)
    # Some of a clause's mutants say nothing of the checks; all mutants of a level do.
    levels = () if arguments.k else arguments.level or LEVELS
    unproven = idle([check.name for check in suite.checks() if check.level in levels], hunts)
    _print(hunts, unproven)
    killed = sum(each.killed for each in hunts)
    _say(f"{killed} of {len(hunts)} mutants killed, {len(unproven)} checks kill none, {time.monotonic() - start:.0f} s")
    return int(killed < len(hunts) or bool(unproven) or not hunts)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("--list", action="store_true", help="list the mutants, try none")
    parser.add_argument("--level", choices=LEVELS, action="append", help="only mutants of this level")
    parser.add_argument("-k", default="", help="only mutants of this name or clause, * for any text, or part of a name")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="keep the ends in FILE, and do not try again what it has as killed"
    )
    parser.add_argument("--jobs", type=int, default=2, help="how many to try at a time")
    return parser.parse_args()


def _selected(mutant: Mutant, levels: Sequence[str] | None, pattern: str) -> bool:
    named = pattern in mutant.name or matches(pattern, mutant.name) or pattern == mutant.clause
    return named and (not levels or mutant.level in levels)


def _progress(each: Hunt) -> None:
    end = "killed  " if each.killed else "SURVIVED"
    sys.stderr.write(f"{end} {each.mutant.clause:<6} {each.seconds:5.1f} s  {each.mutant.name}\n")


def _print(hunts: Sequence[Hunt], unproven: Iterable[str]) -> None:
    _table([[each.mutant.name, each.mutant.clause, each.check, _said(each)] for each in hunts if each.killed])
    for each in hunts:
        if not each.killed:
            _say(f"SURVIVED: {each.mutant.name} ({each.mutant.clause}): {each.mutant.description}\n  {each.survived}")
    for check in unproven:
        _say(f"KILLS NONE: {check}")


def _said(each: Hunt) -> str:
    """How the killer put it."""
    outcome = each.killer
    if outcome is None or outcome.failure is None:
        return ""
    return f"{outcome.verdict}: {outcome.failure.what.splitlines()[0] if outcome.failure.what else ''}"


def _table(rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need to be, the last one as it is."""
    widths = [max((len(cell) for cell in column), default=0) for column in zip(*rows, strict=True)][:-1]
    for row in rows:
        _say("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
