# SPDX-License-Identifier: Apache-2.0
"""The embedded default pair: fetch and convert the target, serve it, compare."""
