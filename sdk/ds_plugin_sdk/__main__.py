"""``python -m ds_plugin_sdk``: ``sdk`` without its script."""

from ds_plugin_sdk.cli import main

main()
