#!/usr/bin/env bash
# Trains handwritten digits on $DEVICES devices, checks that this is the training run of one device, then compares one
# device, both engines and torch's own on the same task.
# With fewer GPUs than that, the ranks are CPU processes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
devices=${DEVICES:-2} venv=${VENV:-.venv}

num_gpus=$("$venv/bin/python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$num_gpus" -lt "$devices" ]; then
    export CUDA_VISIBLE_DEVICES=
fi

show() {
    printf '\n$ lockstep %s\n' "$*"
    "$venv/bin/lockstep" "$@"
}
show train examples/digits.py --strategy ddp --devices "$devices"
show verify examples/digits.py --devices "$devices"
show compare examples/digits.py --devices "$devices"
