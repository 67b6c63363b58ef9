"""Questions to the torch backend of a device that is not there yet."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from ds_plugin_sdk import privateuse1

privateuse1.reset_fallback_counts()
assert privateuse1.fallback_counts() == {}
assert privateuse1.installed_name() is None
assert privateuse1.installed_builders() == ()
assert privateuse1.runtime_library() is None
"""


def test_nothing_is_counted_or_named() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
