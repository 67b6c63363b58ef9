"""``sdk fuzz``: random calls of the ops on a plugin's device, against their references and formulas.

Exit status: 0, all agreed; 1, something did not; 2, wrong use, or the plugin cannot be had.
"""

from __future__ import annotations

import shlex

import typer

from ds_plugin_sdk.cli.console import errors, output, table
from ds_plugin_sdk.conformance.outcome import BROKEN, HOLDS, UNUSABLE
from ds_plugin_sdk.errors import ConformanceError


def fuzz(
    name: str = typer.Argument(help="An installed plugin, such as cpu, or a class: package.module:Class."),
    seconds: float = typer.Option(60.0, min=0, help="How long."),
    seed: int = typer.Option(0, help="Of the first case; the next ones count on."),
    op: list[str] = typer.Option([], help="Only this op. Repeatable."),
    dtype: list[str] = typer.Option([], help="This dtype, instead of those the plugin declares. Repeatable."),
    case: str = typer.Option("", help="Run this one case alone, as it was printed."),
) -> None:
    """Random calls of every op: kernel, reference and formula must agree. Exit status 1: they do not; 2: wrong use."""
    from ds_plugin_sdk.conformance.campaign import Fuzzer
    from ds_plugin_sdk.conformance.fuzz import Found, Fuzzed

    def tell(failed: Fuzzed, found: Found) -> None:
        output.print(_explained(name, failed, found), markup=False, highlight=False, soft_wrap=True)

    try:
        with Fuzzer(name) as fuzzer:
            if case:
                found = fuzzer.run(Fuzzed.of(case))
                tell(Fuzzed.of(case), found)
                raise typer.Exit(BROKEN if found.failure else HOLDS)
            tally = fuzzer.campaign(seconds, seed, ops=op, dtypes=dtype, tell=tell)
    except ConformanceError as error:
        errors.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(UNUSABLE) from None
    failed = [failure[0].op for failure in tally.failures]
    rows = [
        [each, calls, tally.rejected[each], failed.count(each) or ""] for each, calls in sorted(tally.calls.items())
    ]
    table(f"Random calls on {name}, from seed {seed}", ["op", "calls", "rejected by both", "failed"], rows)
    output.print(f"{sum(tally.calls.values())} calls, {len(failed)} failed.", highlight=False)
    raise typer.Exit(BROKEN if failed else HOLDS)


def _explained(name: str, case: object, found: object) -> str:
    from ds_plugin_sdk.conformance.fuzz import Found, Fuzzed

    assert isinstance(case, Fuzzed) and isinstance(found, Found)
    verdict = f"FAILED: {found.failure}" if found.failure else "holds" + (", rejected by both" * found.rejected)
    return f"{verdict}\n  {found.call}\n  sdk fuzz {shlex.quote(name)} --case {case.id}"
