"""What PyInstaller does when a program imports DeepSpeed: it takes along the SDK, which DeepSpeed does not import.

DeepSpeed lists the files of its own builders, so its modules are needed as files as well.
"""

from PyInstaller.utils.hooks import collect_all

datas, binaries, hiddenimports = collect_all("deepspeed")
hiddenimports = [*hiddenimports, "ds_plugin_sdk"]
