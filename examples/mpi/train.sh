#!/bin/bash
# Ranks by mpirun of Open MPI, MPICH or Intel MPI, whichever is first in PATH: train.sh HOSTFILE [arguments of train.py ...]
# The hostfile is DeepSpeed's: a line `worker-1 slots=4` for each host. Each MPI gets it in its own form.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
hostfile=${1:?a hostfile}
shift

hosts=$(sed -E 's/#.*//; /^\s*$/d' "$hostfile")
ranks=$(awk '{ split($2, slots, "="); sum += slots[2] } END { print sum }' <<< "$hosts")
MASTER_ADDR=${MASTER_ADDR:-$(awk '{ print $1; exit }' <<< "$hosts")}
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500}

# What the other hosts are to have of this environment; not every mpirun carries it by itself.
carried=() exports=()
for name in PATH LD_LIBRARY_PATH PYTHONPATH MASTER_ADDR MASTER_PORT OMP_NUM_THREADS DS_ACCELERATOR \
    CC CXX CFLAGS CXXFLAGS LDFLAGS CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH LIBRARY_PATH COMPILER_PATH GCC_EXEC_PREFIX \
    CUDA_HOME PYTORCH_NVCC NVCC_CCBIN NVCC_PREPEND_FLAGS NVCC_APPEND_FLAGS TORCH_CUDA_ARCH_LIST MAX_JOBS "${!DS_PLUGIN@}" "${!HF_@}"; do
    if [ -n "${!name:-}" ]; then carried+=("$name") exports+=(-x "$name"); fi
done

command=(python -u "$root/examples/ranks.py" "$root/examples/tiny_gpt/train.py" "$@")
version=$(mpirun --version 2>&1 || true)
case $version in
    *"Open MPI"* | *OpenRTE* | *PRTE*)
        # Bound to its share of the cores, a rank takes all of them; unbound ranks take a fair share each.
        exec mpirun -np "$ranks" --hostfile "$hostfile" --map-by slot --bind-to none \
            "${exports[@]}" "${command[@]}"
        ;;
    *Intel* | *HYDRA* | *MPICH*)
        machines=$(mktemp)
        trap 'rm -f "$machines"' EXIT
        awk '{ split($2, slots, "="); print $1 ":" slots[2] }' <<< "$hosts" > "$machines"
        mpirun -n "$ranks" -machinefile "$machines" -genvlist "$(IFS=,; echo "${carried[*]}")" "${command[@]}"
        ;;
    *)
        echo "no mpirun of Open MPI, MPICH or Intel MPI in PATH; it says: ${version%%$'\n'*}" >&2
        exit 1
        ;;
esac
