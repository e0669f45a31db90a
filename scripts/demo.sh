#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up, then serve a small model with trees, stream an answer and compare.
# Arguments go to `vllm-dflash demo`: see `bash scripts/demo.sh --help`.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$ROOT/scripts/setup.sh"
exec "$ROOT/.venv/bin/vllm-dflash" demo "$@"
