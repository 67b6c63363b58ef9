"""``sdk list``: the installed plugins, and which one is used here."""

from __future__ import annotations

import typer

from ds_plugin_sdk import integrations, registry
from ds_plugin_sdk.cli.console import errors, output, print_json, results_alone, table
from ds_plugin_sdk.errors import PluginConflictError, SdkError
from ds_plugin_sdk.integrations.deepspeed.builtin_names import builtin_names
from ds_plugin_sdk.registry import Candidate, Step
from ds_plugin_sdk.settings import settings


def list_plugins(
    explain: bool = typer.Option(False, "--explain", help="Print each step of the choice."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List the installed plugins, whether their device is here, and which one is chosen."""
    from ds_plugin_sdk.integrations.deepspeed import autoload  # imports torch

    problem: SdkError | None = None
    with results_alone():
        rows = [_row(candidates) for candidates in registry.scan().values()]
        try:
            decision = registry.preview(builtin_names())
        except SdkError as error:
            decision, problem = registry.Decision(), error
    chosen = decision.chosen.name if decision.chosen is not None else None
    steps = [*decision.steps, *_followers()]
    unseen = autoload.why_not_called() if chosen is not None or not rows else ""
    if unseen:
        steps.append(Step("torch", "does not call the SDK", f"{unseen}; {autoload.WHERE_NOT}"))
    if as_json:
        plugins = [dict(zip(("name", "distribution", "state", "priority"), row, strict=True)) for row in rows]
        print_json({"plugins": plugins, "chosen": chosen, "steps": [vars(step) for step in steps]})
    elif not rows:
        output.print("No plugins are installed. DeepSpeed uses its own accelerators.")
        if unseen:
            hint = "a plugin is found where it is installed: `pip install` it, and the SDK"
            errors.print(f"warning: {unseen}; {hint}", soft_wrap=True)
    else:
        table(
            "Plugins",
            ("name", "distribution", "state", "priority", ""),
            [(*row, "<- chosen" if row[0] == chosen else "") for row in rows],
        )
        if explain and steps:
            table(
                "Why",
                ("subject", "verdict", "reason"),
                [(step.subject, step.verdict, step.reason) for step in steps],
            )
        elif unseen:
            errors.print(f"warning: DeepSpeed does not see plugins: {unseen}; {autoload.WHERE_NOT}", soft_wrap=True)
    if problem is not None:
        raise problem


def _followers() -> list[Step]:
    """What becomes of the libraries that start DeepSpeed for the user."""
    if settings.autoload:
        verdict, reason = "follows", "where DeepSpeed is asked for, a plugin's accelerator is the device"
    else:
        verdict, reason = "left alone", "DS_PLUGIN_AUTOLOAD=0, until set_accelerator() is called"
    return [Step(f"{name} {version}", verdict, reason) for name, version in integrations.followers().items()]


def _row(candidates: list[Candidate]) -> tuple[str, str, str, str]:
    first = candidates[0]
    try:
        candidate = registry.only(candidates)
    except PluginConflictError as error:
        return first.name, ", ".join(map(str, candidates)), f"broken: {error.why}", ""
    if not registry.allowed(candidate.name):
        return candidate.name, str(candidate), "skipped: DS_PLUGINS does not list it", ""
    probe = candidate.probe()
    priority = "" if probe.state == "broken" else str(candidate.manifest.priority)
    return candidate.name, str(candidate), str(probe), priority
