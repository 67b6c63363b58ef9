#!/bin/bash
# What login and compute nodes have in common: source it. DS_HOME is a folder that all of them see.
# shellcheck disable=SC1091  # the files are the site's
export DS_HOME=${DS_HOME:-$HOME/ds-plugin}

if command -v module > /dev/null; then
    module purge
    module load "${COMPILER_MODULE:-gcc}" "${PYTHON_MODULE:-python}"
fi
[ -f "$DS_HOME/venv/bin/activate" ] && source "$DS_HOME/venv/bin/activate"

export DS_PLUGIN_CACHE_DIR=$DS_HOME/kernels
# Of the compute nodes, which may be older than the login node. Elsewhere than on x86-64 set it, or it is the login node's.
if [ "$(uname -m)" = x86_64 ]; then export DS_PLUGIN_CPU_LEVEL=${DS_PLUGIN_CPU_LEVEL:-x86-64-v3}; fi
export HF_HUB_OFFLINE=1  # nodes have no network: fail at once instead of waiting
