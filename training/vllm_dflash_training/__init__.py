# SPDX-License-Identifier: Apache-2.0
"""The recipe for DFlash drafts: data, training, export, acceptance.

Not part of the `vllm_dflash` wheel and never imported by it.
"""
