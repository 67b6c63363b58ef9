#!/bin/bash
# The three stages, each from the one before: run.sh [OUT] [arguments of train.py ...]
# LAUNCHER has the launcher's arguments: LAUNCHER="--hostfile hosts" run.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-out/opt_sft}
shift || true
read -ra launcher <<< "${LAUNCHER:---num_accelerators 2}"

stage() {
    echo "--- $*"
    deepspeed "${launcher[@]}" "$here/train.py" "$@"
}

stage --config "$here/zero3.json" --data text --out "$out/1-text" "$@"
# A --model among the arguments is the one to begin with: the last of two counts.
stage --config "$here/offload.json" --data answers "$@" --model "$out/1-text" --out "$out/2-answers"
stage --config "$here/zero3.json" --data names --lora 8 --gradient-checkpointing "$@" \
    --model "$out/2-answers" --out "$out/3-lora"
