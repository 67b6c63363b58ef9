"""Defects of the runtime: members that answer wrongly or do nothing, streams that do not order, memory that aliases.

One module for each of `ds_plugin_sdk.conformance.runtime`. Most defects are one member of the accelerator, replaced;
`support.member` declares those. Some lie below it, in what torch does on the device; `support.below` declares those.

Many replace a function of torch by a defective one, which is what the silenced assignments are.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
