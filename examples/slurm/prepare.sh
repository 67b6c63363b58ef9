#!/bin/bash
# On the login node, once: an environment and the kernels, in a folder that all nodes see.
# PLUGIN=cuda prepare.sh for another device; TORCH=torch==2.13.0 for a version of torch, which pip's settings say where to find;
# WHEELS=1 also packs wheels, for nodes that do not see the folder.
# shellcheck disable=SC1091  # the environment is made here
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
plugin=${PLUGIN:-cpu}
source "$here/env.sh"
mkdir -p "$DS_HOME"

python3 -m venv "$DS_HOME/venv"
source "$DS_HOME/venv/bin/activate"
pip install "${TORCH:-torch}" "${repository}[demo,vendor]" "$repository/plugins/$plugin"

# Compiled here, so that no job has to. Nodes without a compiler take them from the cache.
sdk build "$plugin"

if [ "${WHEELS:-0}" = 1 ]; then
    # Everything that the environment has, and the plugin with its kernels inside.
    pip freeze --exclude-editable | grep -v '^ds-plugin' > "$DS_HOME/requirements.txt"
    pip wheel --wheel-dir "$DS_HOME/wheels" --requirement "$DS_HOME/requirements.txt"
    pip wheel --wheel-dir "$DS_HOME/wheels" --no-deps "$repository"
    DS_BUILD_OPS=1 pip wheel --wheel-dir "$DS_HOME/wheels" --no-build-isolation --no-deps "$repository/plugins/$plugin"
    echo "on a node: PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels pip install 'ds-plugin-sdk[demo]' ds-plugin-$plugin"
fi

mkdir -p "$DS_HOME/modules"
cp "$here/ds-plugin" "$DS_HOME/modules"

# A login node may be without the device; the job looks again on its own nodes.
sdk doctor || [ "$plugin" != cpu ]
echo "next: sbatch $here/train.sbatch"
