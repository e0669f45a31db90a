#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up, lint, and run the tests that need neither a GPU nor minutes.
# Arguments go to pytest, after the markers: `bash scripts/test.sh -m slow` runs others,
# `-n 0` runs them in one process.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=(eval bench)
# One slow test needs more. What is there is asked for again, or set-up would start anew.
if [[ "$*" == *slow* && "$*" != *"not slow"* ]] ||
    .venv/bin/python -c 'import schemathesis' 2>/dev/null; then
    extras+=(test)
fi
bash scripts/setup.sh "${extras[@]}"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# A file stays in one process, which keeps what its tests share. Long files come first.
workers=$(env -u OMP_NUM_THREADS nproc)
if ((workers > 4)); then workers=4; fi
# Engines of several processes would have to share its memory.
if ((workers == 1)) || [[ "$(nvidia-smi -L 2>/dev/null)" == GPU* ]]; then workers=0; fi
exec .venv/bin/pytest -n "$workers" --dist loadfile --no-loadscope-reorder \
    -m "not gpu and not slow" "$@"
