# SPDX-License-Identifier: Apache-2.0
"""Kernels of vllm-dflash: torch and Triton only, no vLLM.

One folder per operation, with the same three files in each:

- ``__init__.py``: the public function and its contract; picks the implementation,
- ``kernel.py``: the Triton kernel and its launcher,
- ``reference.py``: plain torch, the meaning of the operation and the CPU path.

Import an operation from its folder::

    from vllm_dflash_kernels.tree_build import build_tree

Nothing here imports Triton before a Triton implementation is called.
"""
