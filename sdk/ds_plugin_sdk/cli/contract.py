"""``sdk contract``: the SDK's accelerator contract against that of the installed DeepSpeed."""

from __future__ import annotations

import typer

from ds_plugin_sdk.cli.console import output, print_json, table


def contract(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
    """Print what the installed DeepSpeed asks that the SDK does not know, and the other way round."""
    from ds_plugin_sdk.integrations.deepspeed import drift

    difference = drift.contract()
    if as_json:
        print_json(difference.to_dict())
        return
    rows = difference.rows()
    table(f"SDK against DeepSpeed {difference.deepspeed_version}", ("member", "difference", "consequence"), rows)
    if not rows:
        output.print("No difference.")
