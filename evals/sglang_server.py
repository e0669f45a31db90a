# SPDX-License-Identifier: Apache-2.0
"""SGLang's server for the comparison: flags, start, and what its metrics say.

Flags, routes and names of metrics are those of ``SGLANG_VERSION``; docs/evaluation.md
lists them.
"""

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dflash.demo.serve import HOST, ServerError, ServerSpec, VLLMServer
from vllm_dflash.errors import option_error

# The version whose source was read; evals/sglang_envs.sh installs it.
SGLANG_VERSION = "0.5.23"
SERVERS = ("none", "dflash")
_VERIFY_CALLS = "sglang:spec_verify_calls_total"
_TOKENS = "sglang:generation_tokens_total"
_REQUESTS = "sglang:num_requests_total"
_COUNTERS = (_VERIFY_CALLS, _TOKENS, _REQUESTS)
# A request is counted after its last chunk has been sent.
_SETTLE_S = 0.2
_MAX_SETTLE_S = 5.0
# What of /server_info belongs to a result: options after SGLang has resolved them.
_INFO_KEYS = (
    "version",
    "launch_command",
    "attention_backend",
    "sampling_backend",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_draft_attention_backend",
    "max_running_requests",
    "max_total_num_tokens",
    "chunked_prefill_size",
    "mem_fraction_static",
    "page_size",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "cuda_graph_config",
)


@dataclass(frozen=True, kw_only=True)
class SGLangSpec(ServerSpec):
    """One run of ``sglang.launch_server`` by the Python of its own environment.

    Attributes:
        python: That Python.
        depth: Drafted tokens a step; None is no speculation.
        max_num_seqs: Requests at once; also the largest batch that gets a CUDA graph.
    """

    python: str
    depth: int | None
    max_num_seqs: int

    def command(self) -> list[str]:
        """Return the command line."""
        return [self.python, "-m", "sglang.launch_server", *self.serve_args()]

    def serve_args(self) -> list[str]:
        """Return the flags of ``sglang.launch_server``."""
        args = ["--model-path", self.pair.target]
        args += ["--served-model-name", self.pair.served_name]
        args += ["--host", HOST, "--port", str(self.port)]
        args += ["--dtype", "bfloat16", "--context-length", str(self.max_model_len)]
        # With DFLASH the number of requests would be 48 otherwise.
        args += ["--max-running-requests", str(self.max_num_seqs)]
        args += ["--cuda-graph-max-bs-decode", str(self.max_num_seqs)]
        # As with vLLM: repeats ask the same prompts, /metrics is on.
        args += ["--disable-radix-cache", "--enable-metrics", "--random-seed", "0"]
        if self.depth is not None:
            args += ["--speculative-algorithm", "DFLASH"]
            args += ["--speculative-draft-model-path", self.pair.draft]
            # Its block counts the last accepted token, vLLM's depth does not.
            args += ["--speculative-num-draft-tokens", str(self.depth + 1)]
        return args + self.extra_args

    def environment(self) -> dict[str, str]:
        """Return the environment of the server, without that of our Python."""
        env = dict(os.environ)
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            env.pop(name, None)
        # Kernels that are compiled at the first use look for ninja there.
        env["PATH"] = f"{Path(self.python).parent}{os.pathsep}{env.get('PATH', '')}"
        if self.pair.is_embedded:
            env["HF_HUB_OFFLINE"] = "1"
        return env | self.variables


class SGLangServer(VLLMServer):
    """A running SGLang server."""

    program = "sglang.launch_server"

    def info(self) -> dict[str, Any]:
        """Return what the server says of itself, and its mean acceptance length.

        ``avg_spec_accept_length`` is since the start, and grows only once in
        ``--decode-log-interval`` steps.
        """
        import httpx

        # Never through a proxy: the server is on this machine.
        response = httpx.get(f"{self.client.base_url}/server_info", trust_env=False)
        info = response.raise_for_status().json()
        found = {key: info[key] for key in _INFO_KEYS if key in info}
        states = info.get("internal_states") or [{}]
        found["avg_spec_accept_length"] = states[0].get("avg_spec_accept_length")
        return found

    def counters(self) -> dict[str, float]:
        """Return the counters of ``/metrics`` once they no longer change.

        Raises:
            ServerError: ``/metrics`` does not have them.
        """
        deadline = time.monotonic() + _MAX_SETTLE_S
        seen = self._counters()
        while time.monotonic() < deadline:
            time.sleep(_SETTLE_S)
            latest = self._counters()
            if latest == seen:
                break
            seen = latest
        return seen

    def _counters(self) -> dict[str, float]:
        found = self.client.counters()
        # A counter with labels appears with its first request.
        if found and not any(name.startswith("sglang:") for name in found):
            raise ServerError(
                f"/metrics of {self.spec.label} has no counter of SGLang. Allowed is "
                f"SGLang {SGLANG_VERSION} with --enable-metrics. Type "
                "bash evals/sglang_envs.sh"
            )
        return {name: found.get(name, 0.0) for name in _COUNTERS}


def acceptance_length(
    before: dict[str, float], after: dict[str, float]
) -> float | None:
    """Return tokens per verification step between two readings of the counters.

    The first token of a request comes from its prompt, not from a verification.
    """
    delta = {name: after[name] - before[name] for name in _COUNTERS}
    if not delta[_VERIFY_CALLS]:
        return None
    return (delta[_TOKENS] - delta[_REQUESTS]) / delta[_VERIFY_CALLS]


def environment_versions(python: str) -> dict[str, str | None]:
    """Return the versions of SGLang and its kernels in the environment of ``python``.

    Raises:
        ValueError: there is no SGLang, or another version than the one that was read.
    """
    names = ("sglang", "sglang-kernel", "flashinfer-python", "torch", "transformers")
    code = (
        "import json, sys\nfrom importlib import metadata\nfound = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n        found[name] = metadata.version(name)\n"
        "    except metadata.PackageNotFoundError:\n        found[name] = None\n"
        "print(json.dumps(found))"
    )
    found: dict[str, str | None] = {}
    try:
        result = subprocess.run(
            [python, "-c", code, *names], capture_output=True, text=True, check=True
        )
        found = json.loads(result.stdout)
    except (OSError, subprocess.CalledProcessError, json.JSONDecodeError) as error:
        problem = f"{python} does not run ({error})"
    else:
        problem = f"{python} has sglang {found['sglang']}"
    if found.get("sglang") != SGLANG_VERSION:
        raise option_error(
            problem,
            f"Allowed is a Python with sglang {SGLANG_VERSION}, whose flags and "
            "metrics are used here",
            "bash evals/sglang_envs.sh, or --sglang-python PATH",
        )
    return found
