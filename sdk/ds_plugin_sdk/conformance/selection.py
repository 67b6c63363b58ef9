"""Which cases to run, and the patterns by which cases are named."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ds_plugin_sdk.conformance.outcome import Item
from ds_plugin_sdk.errors import ConformanceError


def matches(pattern: str, case: str) -> bool:
    """Whether a pattern names a case: its id, in which ``*`` stands for any text."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), case) is not None


@dataclass(frozen=True)
class Selection:
    """Which cases to run. What is empty selects everything.

    Attributes:
        levels: of these levels.
        ops: of these ops.
        dtypes: in these dtypes.
        patterns: one of these: an id, an id with ``*``, or a part of an id.
    """

    levels: Sequence[str] = ()
    ops: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    patterns: Sequence[str] = ()

    def of(self, items: Sequence[Item]) -> list[Item]:
        """The selected ones, in their order.

        Raises:
            ConformanceError: no case has an op or a dtype that is asked for.
        """
        for parameter, wanted in (("op", self.ops), ("dtype", self.dtypes)):
            there = {item.parameters.get(parameter) for item in items}
            if unknown := [each for each in wanted if each not in there]:
                raise ConformanceError(
                    f"no case has the {parameter} {unknown[0]!r}", hint="sdk conformance NAME --list has ops and dtypes"
                )
        named = {item.id for pattern in self.patterns for item in _named(pattern, items)}
        return [
            item
            for item in items
            if (not self.levels or item.level in self.levels)
            and (not self.ops or item.parameters.get("op") in self.ops)
            and (not self.dtypes or item.parameters.get("dtype") in self.dtypes)
            and (not self.patterns or item.id in named)
        ]


def _named(pattern: str, items: Sequence[Item]) -> list[Item]:
    """Cases by id, else by pattern, else by a part of their ids: so that an id never selects more than its case."""
    exact = [item for item in items if matches(pattern, item.id)]
    return exact or [item for item in items if pattern in item.id]
