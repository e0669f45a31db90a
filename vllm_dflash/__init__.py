# SPDX-License-Identifier: Apache-2.0
"""DFlash drafts verified as trees (DDTree) on vLLM."""

__version__ = "0.1.0"
