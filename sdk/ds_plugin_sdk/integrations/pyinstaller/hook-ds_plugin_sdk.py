"""What PyInstaller does when a program imports the SDK: it takes along the whole of it, and the installed plugins.

All that they find by name or read as files comes too: entry points, ops, prebuilt kernels. torch's headers do not, so
nothing compiles in the program: an op without a prebuilt kernel is its reference implementation there, with a warning.
"""

from importlib.metadata import entry_points

from PyInstaller.utils.hooks import collect_all, collect_dynamic_libs, collect_entry_point

PLUGINS = "ds_plugin_sdk.plugins"

datas, binaries, hiddenimports = [], [], []

# "torch.backends" is what makes torch call the SDK.
for group in ("torch.backends", PLUGINS):
    metadata, modules = collect_entry_point(group)
    datas += metadata
    hiddenimports += modules

packages = {entry_point.module.partition(".")[0] for entry_point in entry_points(group=PLUGINS)}
for package in sorted({"ds_plugin_sdk", *packages}):
    files, libraries, modules = collect_all(package)
    datas += files
    binaries += libraries
    hiddenimports += modules

# A kernel is called adam.so, and PyInstaller looks for lib*.so unless it is told.
for package in sorted(packages):
    binaries += collect_dynamic_libs(package, search_patterns=["*.so"])
