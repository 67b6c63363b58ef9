"""``known.json``: how DeepSpeed's tests are known to end, for a release of DeepSpeed and a commit of its tests.

    {"deepspeed": "0.19.8", "tests": "<commit>",
     "accelerators": {"deepspeed": {"unit/comm/test_dist.py": {"passed": [...], "failed": [...]}}, "cpu": {...}},
     "called": {"unit/comm/test_dist.py": 3},
     "reasons": {"unit/ops/lamb/*": "..."}}

"deepspeed" is DeepSpeed's own CPU accelerator, "cpu" is ds-plugin-cpu; "called" says in how many of its tests that
passed an op of the SDK was called. A reason says why a test fails on every device that follows the release; it names
``file::case``, with ``*`` for any text.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_plugin_sdk.conformance.selection import matches

_FILE = Path(__file__).with_name("known.json")

_FAILED = ("failed", "crashed", "timed out")


@dataclass(frozen=True)
class Known:
    """What the file says; attributes as there."""

    deepspeed: str
    tests: str
    accelerators: Mapping[str, Mapping[str, Mapping[str, list[str]]]]
    called: Mapping[str, int]
    reasons: Mapping[str, str]

    @staticmethod
    @functools.cache
    def read(path: Path = _FILE) -> Known:
        return Known(**json.loads(path.read_text(encoding="utf-8")))

    def excuse(self, file: str, case: str) -> str | None:
        """Why a test need not pass; None if it must."""
        reason = next((why for what, why in self.reasons.items() if matches(what, f"{file}::{case}")), None)
        if reason is not None:
            return reason
        own, cpu = (self.accelerators[name].get(file, {}) for name in ("deepspeed", "cpu"))
        if any(case in own.get(end, ()) for end in _FAILED) and case not in cpu.get("passed", ()):
            return "it fails on DeepSpeed's own CPU accelerator too"
        return None
