#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The two environments of compare_sglang.py: .venv (vLLM and this package, by
# scripts/setup.sh) and .venv-sglang. Each has its own torch and transformers, so neither
# can share one.
#
#   bash evals/sglang_envs.sh          make both
#   bash evals/sglang_envs.sh check    only look whether this machine can
#
# PYTHON names the Python of .venv-sglang. A finished environment is left as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

SGLANG_VERSION=0.5.23
# What that version names: torch 2.14.1 is built for CUDA 13, its first driver is 580.
TORCH_VERSION=2.14.1
MIN_DRIVER=580
MIN_GLIBC=2.34
MIN_FREE_GB=30
VENV="$PWD/.venv-sglang"

say() { printf '== %s\n' "$*"; }
die() { printf '\nsglang_envs: %s\n' "$*" >&2; exit 1; }

at_least() { [[ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" == "$2" ]]; }

check_machine() {
    command -v nvidia-smi >/dev/null ||
        die "there is no nvidia-smi. SGLang's DFLASH needs a CUDA device; run this on a machine that has one."
    local driver glibc free_gb
    driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)"
    at_least "$driver" "$MIN_DRIVER" ||
        die "the NVIDIA driver is ${driver:-unknown}. torch $TORCH_VERSION needs $MIN_DRIVER or later (CUDA 13). Update the driver."
    glibc="$(getconf GNU_LIBC_VERSION | cut -d ' ' -f 2)"
    at_least "$glibc" "$MIN_GLIBC" ||
        die "glibc is $glibc. The wheel of sglang $SGLANG_VERSION needs $MIN_GLIBC or later (Ubuntu 22.04, Debian 12)."
    free_gb="$(df --output=avail -BG . | tail -n 1 | tr -dc 0-9)"
    ((free_gb >= MIN_FREE_GB)) ||
        die "$free_gb GB are free here; the two environments need about $MIN_FREE_GB GB."
    say "driver $driver, glibc $glibc, $free_gb GB free"
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.12 python3.11 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
            >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "no Python 3.11 or 3.12 found${PYTHON:+ (PYTHON=$PYTHON)}. Type PYTHON=/path/to/python3.12 bash evals/sglang_envs.sh"
}

installed() {
    [[ -x "$VENV/bin/python" ]] && "$VENV/bin/python" - "$SGLANG_VERSION" <<'EOF'
import sys
from importlib import metadata
try:
    sys.exit(metadata.version("sglang") != sys.argv[1])
except metadata.PackageNotFoundError:
    sys.exit(1)
EOF
}

make_sglang() {
    if installed; then
        say "sglang $SGLANG_VERSION is in .venv-sglang"
        return
    fi
    local python
    python="$(find_python)"
    say "creating .venv-sglang with $("$python" --version)"
    [[ -x "$VENV/bin/python" ]] || "$python" -m venv "$VENV"
    # flash-attn-4, which sglang names, has pre-releases only; they are allowed for it
    # alone by naming one.
    "$VENV/bin/python" -m pip --disable-pip-version-check install \
        "sglang==$SGLANG_VERSION" "torch==$TORCH_VERSION" "flash-attn-4>=4.0.0b18" ||
        die "pip could not install sglang $SGLANG_VERSION; its message is above. Run the same command again to continue."
}

[[ "${1:-}" == "" || "$1" == "check" ]] || die "'$1' is not known. Type check, or nothing."
check_machine
[[ "${1:-}" == "check" ]] && exit 0
VLLM_DFLASH_DEVICE=cuda bash scripts/setup.sh bench
make_sglang
say "ready: .venv/bin/python evals/compare_sglang.py --model TARGET --draft-model DRAFT"
