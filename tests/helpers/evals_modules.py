# SPDX-License-Identifier: Apache-2.0
"""The scripts of evals/, which find each other by the folder they are in."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

EVALS = Path(__file__).resolve().parents[2] / "evals"


def import_evals(**modules: str) -> SimpleNamespace:
    """Import modules of evals/; attribute -> module."""
    sys.path.insert(0, str(EVALS))
    try:
        found = {name: importlib.import_module(path) for name, path in modules.items()}
    finally:
        sys.path.remove(str(EVALS))
    return SimpleNamespace(**found)
