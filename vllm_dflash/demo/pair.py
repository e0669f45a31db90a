# SPDX-License-Identifier: Apache-2.0
"""Which target and draft the demo runs: the embedded pair or the user's own."""

from dataclasses import dataclass
from pathlib import Path

from vllm_dflash.demo import convert, fetch

# The depth the embedded draft was trained for: its block of 16 less the bonus token.
DEFAULT_DEPTH = 15


@dataclass(frozen=True)
class ModelPair:
    """A target and its DFlash draft, as vLLM takes them: paths or hub names."""

    target: str
    draft: str
    served_name: str
    is_embedded: bool


def embedded_draft() -> Path:
    """Return the directory of the draft model that is part of this package."""
    return Path(__file__).parent / "draft"


def embedded_pair(log: fetch.Log) -> ModelPair:
    """Return the embedded pair, fetching and converting the target on first use.

    Raises:
        fetch.FetchError: the target could not be downloaded.
        convert.ConversionError: the download is not what the conversion knows.
    """
    cache = fetch.cache_dir()
    target = cache / convert.MODEL_NAME
    with fetch.locked(cache, log):
        if not convert.is_converted(target):
            gguf = fetch.fetch_gguf(cache, log)
            convert.convert(gguf, target, log)
            gguf.unlink()
    log(f"Target: {target}")
    log(f"Draft:  {embedded_draft()}")
    return ModelPair(
        str(target), str(embedded_draft()), convert.MODEL_NAME, is_embedded=True
    )
