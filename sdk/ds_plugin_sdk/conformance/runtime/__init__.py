"""Level ``runtime``: every member of the accelerator's contract, by what it is for.

device         R1   names, indices, the current device
surroundings   R1   what a call leaves alone
flags          R2   the four behaviour flags against what the device does
random         R3   seeds, states, generators
streams        R4   streams, what they order and what they leave
events         R4   events, as they are asked and timed
memory         R5   statistics, in bytes
dtypes         R6   the types one can train in, tensor factories
pinned         R7   page-locked host memory
communication  R8   collective and compile backends, Triton
profiling      R9   ranges and graphs
manifest       R10  what a plugin says of itself
processes      R11  ranks, launchers, fork and spawn
builders       R12  op builders by DeepSpeed's names
"""

import importlib

for _module in (
    "device",
    "surroundings",
    "flags",
    "random",
    "streams",
    "events",
    "memory",
    "dtypes",
    "pinned",
    "communication",
    "profiling",
    "manifest",
    "processes",
    "builders",
):
    importlib.import_module(f"{__name__}.{_module}")
