# SPDX-License-Identifier: Apache-2.0
"""Files in pieces, for machines that take and give only small ones."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from vllm_dflash.errors import option_error

PIECE_BYTES = 15_000_000


def split(file: Path, folder: Path, piece_bytes: int = PIECE_BYTES) -> list[Path]:
    """Cut a file into `NAME.part00` ...; `NAME.pieces.json` says what belongs together.

    Returns:
        Everything that was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    pieces: list[Path] = []
    with file.open("rb") as source:
        while data := source.read(piece_bytes):
            digest.update(data)
            piece = folder / f"{file.name}.part{len(pieces):02d}"
            piece.write_bytes(data)
            pieces.append(piece)
    index = folder / f"{file.name}.pieces.json"
    words = {
        "name": file.name,
        "sha256": digest.hexdigest(),
        "pieces": [piece.name for piece in pieces],
    }
    index.write_text(json.dumps(words, indent=1) + "\n", encoding="utf-8")
    return [*pieces, index]


def join(index: Path, folder: Path) -> Path:
    """Put the pieces beside an index together again.

    Raises:
        ValueError: A piece is missing or damaged.
    """
    words = json.loads(index.read_text(encoding="utf-8"))
    name = Path(words["name"]).name
    absent = [p for p in words["pieces"] if not (index.parent / p).is_file()]
    if absent:
        raise _incomplete(index, f"missing are {', '.join(absent)}")
    folder.mkdir(parents=True, exist_ok=True)
    part, digest = folder / f"{name}.part", hashlib.sha256()
    with part.open("wb") as out:
        for piece in words["pieces"]:
            data = (index.parent / Path(piece).name).read_bytes()
            digest.update(data)
            out.write(data)
    if digest.hexdigest() != words["sha256"]:
        part.unlink()
        raise _incomplete(index, f"their SHA-256 is {digest.hexdigest()}")
    part.replace(folder / name)
    return folder / name


def _incomplete(index: Path, got: str) -> ValueError:
    return option_error(
        f"the pieces of {index} don't make the file (got {got})",
        "All the pieces that it names are allowed, unchanged",
        f"{index} with its pieces beside it",
    )
