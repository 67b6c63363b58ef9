"""The SDK's settings, and the variables that an accelerator names, on every node of a job.

DeepSpeed's launcher carries the variables that it or the accelerator names, and ``DS_ACCELERATOR`` is not among them. A
ported accelerator names none of the SDK's, nor does DeepSpeed's own, which is used with ``DS_PLUGIN_AUTOLOAD=0``.
"""

from __future__ import annotations

import functools
import shlex
from typing import Any

from ds_plugin_sdk.registry import current, get_accelerator
from ds_plugin_sdk.settings import child_environment, for_other_nodes


def carry_settings(multinode_runner: Any) -> None:
    """Let each launcher of several nodes begin with the settings; a ``.deepspeed_env`` may still change them.

    Args:
        multinode_runner: ``deepspeed.launcher.multinode_runner``.
    """
    base, pdsh, slurm = (getattr(multinode_runner, name) for name in ("MultiNodeRunner", "PDSHRunner", "SlurmRunner"))
    original, add_own = base.__init__, base.add_export

    def carry(self: Any, variables: dict[str, str]) -> None:
        if isinstance(self, slurm):
            return  # srun's --export=ALL has the whole environment, and its list of variables cuts values at commas
        # A shell reads pdsh's command alone; add_export()'s double quotes become part of the others' values.
        quote = shlex.quote if isinstance(self, pdsh) else str
        self.exports.update({name: quote(value) for name, value in variables.items()})

    @functools.wraps(original)
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        carry(self, for_other_nodes())

    @functools.wraps(add_own)
    def add_export(self: Any, key: str, var: str) -> None:
        accelerator = get_accelerator()
        # A line of .deepspeed_env ends with a newline: it is no value of this environment.
        if child_environment().get(key) != var or not key.startswith(tuple(accelerator.export_envs())):
            add_own(self, key, var)
        elif current() is None or key not in accelerator.visible_devices_envs():  # a prefix may be that of these, too
            carry(self, {key: var})

    base.__init__, base.add_export = begin, add_export
