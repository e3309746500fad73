#!/usr/bin/env bash
# Trains handwritten digits on $DEVICES devices, checks that this is the training run of one device, then compares one
# device, both engines and torch's own on a small GPT. Ends with three sentences: what each of them has shown.
# With fewer GPUs than that, the ranks are CPU processes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
devices=${DEVICES:-2} venv=${VENV:-.venv}
found=$(mktemp -d)
trap 'rm -rf "$found"' EXIT

num_gpus=$("$venv/bin/python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$num_gpus" -lt "$devices" ]; then
    export CUDA_VISIBLE_DEVICES=
fi

show() {
    printf '\n$ lockstep %s\n' "$*"
    "$venv/bin/lockstep" "$@"
}
show train examples/digits.py --strategy ddp --devices "$devices" --run-dir "$found/run"
show verify examples/digits.py --devices "$devices" --json "$found/verify.json"
# A small transformer: its operations are too short for several threads, so that ranks use the cores better. For the
# digits, one process with two threads is as fast as two ranks, and the verdict would be noise.
show compare examples/gpt.py --devices "$devices" --rounds 10 --steps 6 --json "$found/compare.json"
"$venv/bin/python" - "$found" "$devices" <<'END'
import json, pathlib, sys

found, devices = pathlib.Path(sys.argv[1]), sys.argv[2]
lines = [json.loads(line) for line in (found / "run/rank-0.jsonl").read_text().splitlines()]
accuracy = [line["metrics"]["accuracy"] for line in lines if line.get("event") == "evaluation"][-1]
steps = sum(line["num_steps"] for line in lines if line["kind"] == "step")
print(f"\nTraining: after {steps} steps on {devices} devices, {accuracy:.1%} of the test digits are read right.")
for name in ("verify", "compare"):
    verdict = json.loads((found / f"{name}.json").read_text())["verdict"]
    sentences = verdict["sentences"] if isinstance(verdict, dict) else verdict
    # On a busy machine, compare's verdict follows a sentence that says so.
    until = int(sentences[0].startswith("The machine is not quiet"))
    print(f"{name.capitalize()}: {' '.join(sentences[:until + 1])}")
END
