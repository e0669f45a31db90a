# SPDX-License-Identifier: Apache-2.0
"""Cut a file into pieces of at most 15 MB, or put them together again.

python scripts/file_pieces.py split MODEL.safetensors FOLDER
python scripts/file_pieces.py join FOLDER/MODEL.safetensors.pieces.json FOLDER
"""

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "training")]
sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from vllm_dflash_training.pieces import join, split  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["split", "join"])
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.action == "split":
        for path in split(args.file, args.folder):
            print(path)
    else:
        try:
            print(join(args.file, args.folder))
        except ValueError as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
