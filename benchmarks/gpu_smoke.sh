#!/usr/bin/env bash
# The first thing to run on a CUDA GPU. Checks of what only a GPU shows (benchmarks/gpu_checks.py: continuous batching,
# fp16, the head, memory under a cap, a step of every method with full weights, LoRA and QLoRA, ...), in a few minutes.
# Then every file of ds_configs/: KTO and CPO, 5 steps of a 0.5B-shaped model with random weights, capped at 24 GB, in
# under 10 minutes. Prints a table of what was found, and one of peak memory and tokens per second; needs no network.
#
#   benchmarks/gpu_smoke.sh                      # all checks and rows
#   benchmarks/gpu_smoke.sh --checks fp16        # those whose name contains it
#   benchmarks/gpu_smoke.sh --rows kto/zero3     # those whose name contains it
#   PYTHON=python3.12 PYTHONPATH=$PWD/site benchmarks/gpu_smoke.sh
#   benchmarks/gpu_smoke.sh --cpu --tiny         # the same code on a CPU with a tiny model
#
# PYTHON is the interpreter that has the package's requirements: unset, .venv's if there is one, else python3.
# All rows are followed by Liger's kernels, if it is installed: log-probs and gradients with and without, type by type.
# Exit code: 0, 1 when a check or a row failed or differs (the others are run all the same), 2 when nothing can be run.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
command -v "$python" >/dev/null || python=python3
status=0
"$python" "$root/benchmarks/gpu_smoke.py" "$@" || status=$?
if [[ $# -eq 0 && $status -ne 2 ]] && "$python" -c "import liger_kernel" 2>/dev/null; then
    echo
    (cd "$root" && "$python" -m tools.architectures.liger) || status=1  # Liger's kernels, type by type
fi
exit "$status"
