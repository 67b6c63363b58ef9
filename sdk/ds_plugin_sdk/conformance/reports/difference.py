"""Two runs side by side: what broke, what was fixed, what is new."""

from __future__ import annotations

from dataclasses import dataclass

from ds_plugin_sdk.conformance.outcome import FAILURES, Report
from ds_plugin_sdk.conformance.reports.summary import Table


@dataclass(frozen=True)
class Change:
    """A case that did not end as before; a verdict is empty where there was no such case."""

    case: str
    before: str
    after: str

    @property
    def worse(self) -> bool:
        """Whether it fails now and did not before."""
        return self.after in FAILURES and self.before not in FAILURES


def changes(old: Report, new: Report) -> list[Change]:
    """The cases that ended otherwise, those that are worse first."""
    before = {outcome.item.id: str(outcome.verdict) for outcome in old.outcomes}
    after = {outcome.item.id: str(outcome.verdict) for outcome in new.outcomes}
    found = [Change(case, before.get(case, ""), after.get(case, "")) for case in {**before, **after}]
    return sorted((each for each in found if each.before != each.after), key=lambda each: not each.worse)


def table(old: Report, new: Report) -> Table:
    """The same as a table."""
    rows = [[each.case, each.before or "not there", each.after or "not there"] for each in changes(old, new)]
    return Table(f"From {_name(old)} to {_name(new)}", ["case", "before", "after"], rows)


def _name(report: Report) -> str:
    return f"{report.target} of {report.started}"
