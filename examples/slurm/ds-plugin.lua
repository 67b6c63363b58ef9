-- The environment that prepare.sh made, for Lmod: DS_HOME=/shared/ds-plugin module load ds-plugin
help([[DeepSpeed with the plugin of this site's devices, and its compiled kernels]])
whatis("Name: ds-plugin")

local home = os.getenv("DS_HOME") or pathJoin(os.getenv("HOME"), "ds-plugin")

prepend_path("PATH", pathJoin(home, "venv", "bin"))
setenv("VIRTUAL_ENV", pathJoin(home, "venv"))
setenv("DS_PLUGIN_CACHE_DIR", pathJoin(home, "kernels"))
setenv("DS_PLUGIN_COMPILE", "0")
setenv("HF_HUB_OFFLINE", "1")
