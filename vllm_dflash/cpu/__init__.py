# SPDX-License-Identifier: Apache-2.0
"""vLLM's Model Runner V2 on the CPU: interpreter set-up and torch replacements."""
