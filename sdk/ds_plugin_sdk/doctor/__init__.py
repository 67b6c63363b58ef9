"""What ``sdk doctor`` finds: whether a run will work on this machine, or on the hosts of a hostfile.

A host says what is there (`facts`). What that means is judged in one place (`findings`), where hosts are compared.
"""

from __future__ import annotations

from ds_plugin_sdk.doctor.facts import Facts, examine
from ds_plugin_sdk.doctor.findings import Finding, Verdict, compare
from ds_plugin_sdk.doctor.hosts import Heard, Silent, ask_all, read_hostfile

__all__ = ["Facts", "Finding", "Heard", "Silent", "Verdict", "ask_all", "compare", "examine", "read_hostfile"]
