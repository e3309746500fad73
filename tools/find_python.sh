#!/usr/bin/env bash
# Prints a Python that can make a virtual environment and is new enough; $PYTHON, if set, is the only candidate.
set -u

if [ -n "${PYTHON:-}" ]; then
    candidates=("$PYTHON")
else
    candidates=(python3.11 python3.12 python3.13 python3.14 python3)
fi

found=()
for candidate in "${candidates[@]}"; do
    version=$("$candidate" -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null) || continue
    if ! "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        found+=("$candidate is Python $version")
    elif ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
        found+=("$candidate cannot make virtual environments (on Debian and Ubuntu: apt-get install python$version-venv)")
    else
        command -v "$candidate"
        exit 0
    fi
done

echo "No usable Python: Lockstep needs 3.11 or later. Looked for: ${candidates[*]}." >&2
for line in "${found[@]+"${found[@]}"}"; do
    echo "  $line" >&2
done
echo "Install one, or name it: make PYTHON=/path/to/python3.11" >&2
exit 1
