"""pytest's front end: each case of a plugin's conformance is an item of the same id.

    pytest --ds-conformance zap                       once
    [tool.pytest.ini_options]
    ds_conformance = "zap"                            whenever pytest is started without files
    ds_conformance_levels = "runtime ops"

Cases run in workers, so that a crash fails one item only. Without either option this module does nothing, and imports
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ds_plugin_sdk.conformance.expectations import Expectations
    from ds_plugin_sdk.conformance.outcome import Item
    from ds_plugin_sdk.conformance.run import Runner


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ds-conformance", "conformance of a DeepSpeed accelerator plugin")
    group.addoption("--ds-conformance", metavar="NAME", help="check this plugin, or package.module:Class")
    group.addoption(
        "--ds-conformance-level",
        metavar="LEVEL",
        action="append",
        help="only this level: runtime, ops, training, distributed, features, deepspeed; repeatable",
    )
    group.addoption(
        "--ds-conformance-expectations", metavar="FILE", help="expected failures, instead of conformance.toml"
    )
    parser.addini("ds_conformance", "the plugin to check whenever no files are named")
    parser.addini("ds_conformance_levels", "its levels to run; all if empty", type="args")


def pytest_configure(config: pytest.Config) -> None:
    name = _name(config)
    if name is None:
        return
    from ds_plugin_sdk.conformance.outcome import LEVELS

    config.addinivalue_line("markers", "conformance: a case of the conformance suite")
    for level in LEVELS:
        config.addinivalue_line("markers", f"conformance_{level}: a case of the level {level}")
    asked = config.getoption("--ds-conformance") is not None
    config.pluginmanager.register(_Suite(name, _levels(config), asked), "ds-conformance-suite")


def _name(config: pytest.Config) -> str | None:
    """The plugin to check: as the command line says, or as the ini file says where no files are named."""
    given: str | None = config.getoption("--ds-conformance")
    stated: str | None = config.getini("ds_conformance") or None
    if given or stated is None or config.args_source == config.ArgsSource.ARGS:
        return given
    return stated


def _levels(config: pytest.Config) -> Sequence[str]:
    levels: Sequence[str] = config.getoption("--ds-conformance-level") or config.getini("ds_conformance_levels")
    return levels


class _Suite:
    """Adds the items, and holds the runner while they run."""

    def __init__(self, target: str, levels: Sequence[str], asked: bool) -> None:
        self._target, self._levels, self._asked = target, levels, asked
        self._runner: Runner | None = None

    @pytest.hookimpl(tryfirst=True)  # so that -k and -m choose among these items too
    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        from ds_plugin_sdk.errors import ConformanceError

        try:
            found = self._items(session, config.getoption("--ds-conformance-expectations"))
        except ConformanceError as error:
            raise pytest.UsageError(str(error)) from None
        items.extend(found)
        # Who counts what was collected does so by these reports.
        session.ihook.pytest_collectreport(report=pytest.CollectReport("conformance", "passed", None, [*found]))

    def pytest_report_header(self) -> str:
        return f"ds-conformance: {self._target}, levels: {' '.join(self._levels) or 'all'}"

    def pytest_unconfigure(self) -> None:
        if self._runner is not None:
            self._runner.close()

    def _items(self, session: pytest.Session, expectations_file: str | None) -> list[pytest.Item]:
        from ds_plugin_sdk.conformance.expectations import Expectations
        from ds_plugin_sdk.conformance.outcome import LEVELS
        from ds_plugin_sdk.conformance.run import Runner
        from ds_plugin_sdk.conformance.selection import Selection

        unknown = [level for level in self._levels if level not in LEVELS]
        if unknown:
            raise pytest.UsageError(f"there is no conformance level '{unknown[0]}'; the levels are {', '.join(LEVELS)}")
        absent = "" if self._asked else _absent(self._target)
        if absent:
            return [AbsentItem.from_parent(session, name="device", reason=absent)]
        expectations = Expectations.of(self._target, Path(expectations_file) if expectations_file else None)
        self._runner = Runner(self._target)
        cases = self._runner.items()
        problems = expectations.problems(cases)
        if problems:
            raise pytest.UsageError("\n".join(problems))
        chosen = Selection(levels=self._levels).of(cases)
        if not chosen:
            raise pytest.UsageError(f"no conformance case of {self._target} is selected, which is no success")
        return [
            CaseItem.from_parent(session, case=case, runner=self._runner, expectations=expectations) for case in chosen
        ]


def _absent(target: str) -> str:
    """Why a plugin's device is not on this machine, as its probe says; empty where it is."""
    from ds_plugin_sdk import registry

    candidates = registry.scan().get(target)
    probe = registry.only(candidates).probe() if candidates else None
    return str(probe) if probe is not None and probe.state == "absent" else ""


class AbsentItem(pytest.Item):
    """Says, as a skip, that the device is not here: the ordinary state of a vendor's laptop."""

    def __init__(self, *, reason: str, **more: Any) -> None:
        super().__init__(nodeid=f"conformance::{more['name']}", **more)
        self._reason = reason

    def runtest(self) -> None:
        pytest.skip(self._reason)


class _CaseFailedError(Exception):
    """A case failed; the text says all."""


class CaseItem(pytest.Item):
    """One case."""

    def __init__(self, *, case: Item, runner: Runner, expectations: Expectations, **more: Any) -> None:
        super().__init__(name=case.id, nodeid=f"conformance::{case.id}", **more)
        self._case, self._runner, self._expectations = case, runner, expectations
        self.add_marker("conformance")
        self.add_marker(f"conformance_{case.level}")

    def runtest(self) -> None:
        from ds_plugin_sdk.conformance.outcome import explain

        outcome = self._expectations.judge(self._runner.run(self._case))
        if outcome.verdict == "skipped":
            pytest.skip(outcome.reason)
        if outcome.verdict in ("expected failure", "DeepSpeed's limit"):
            pytest.xfail(outcome.reason)
        if outcome.failed:
            raise _CaseFailedError(explain(outcome, self._runner.target))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, _CaseFailedError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, f"conformance of {self._runner.target}: {self._case.id}"
