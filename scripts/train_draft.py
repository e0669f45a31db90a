# SPDX-License-Identifier: Apache-2.0
"""Make a DFlash draft for a target: data, training, checkpoint, acceptance.

python scripts/train_draft.py --config training/configs/embedded.yaml

See docs/training.md.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "training"), str(ROOT), str(ROOT / "kernels")]

from vllm_dflash_training.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
