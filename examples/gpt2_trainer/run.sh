#!/bin/bash
# ZeRO-2 and ZeRO-3, each whole and again from its checkpoint: run.sh [OUT] [arguments of train.py ...]
# LAUNCHER has the launcher's arguments: LAUNCHER="--hostfile hosts" run.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-out/gpt2_trainer}
shift || true
read -ra launcher <<< "${LAUNCHER:---num_accelerators 2}"

train() {
    echo "--- $*"
    deepspeed "${launcher[@]}" "$here/train.py" "$@"
}

for stage in 2 3; do
    train --deepspeed "$here/zero$stage.json" --out "$out/zero$stage" "$@"
    checkpoint=$(find "$out/zero$stage" -maxdepth 1 -name 'checkpoint-*' | sort -V | head -1)
    train --deepspeed "$here/zero$stage.json" --out "$out/zero$stage-resumed" --resume "$checkpoint" "$@"
done
