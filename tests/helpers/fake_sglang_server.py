# SPDX-License-Identifier: Apache-2.0
"""A stand-in for `sglang.launch_server` 0.5.23, and for `vllm serve`: canned answers.

Usage, as the Python of an environment: fake_sglang_server.py -m sglang.launch_server
FLAGS. Flags, routes, fields and counters are those that the comparison uses, named as
in SGLang's source (arg_groups/fields, entrypoints/http_server.py,
entrypoints/openai/protocol.py, observability/metrics_collector.py); an unknown flag
ends it, as there. Anything else than `-m sglang.launch_server` answers as vLLM does.

It answers with NUM_TOKENS tokens, of which the first comes from the prompt and
ACCEPTED + 1 from every verification. SGLang's answer to every fifth prompt parts from
vLLM's at position 4.
"""

import argparse
import itertools
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NUM_TOKENS = 9
ACCEPTED = 3
NUM_VERIFIES = (NUM_TOKENS - 1) // (ACCEPTED + 1)
EOS = 2


def sglang_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("model-path", "served-model-name", "host", "dtype"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "context-length", "max-running-requests", "random-seed"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--cuda-graph-max-bs-decode", type=int)
    parser.add_argument("--disable-radix-cache", action="store_true")
    parser.add_argument("--enable-metrics", action="store_true")
    parser.add_argument("--mem-fraction-static", type=float)
    parser.add_argument("--speculative-algorithm", choices=["DFLASH", "EAGLE3"])
    parser.add_argument("--speculative-draft-model-path")
    parser.add_argument("--speculative-num-draft-tokens", type=int)
    return parser


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Server"

    def do_GET(self) -> None:
        if self.path == "/server_info" and self.server.is_sglang:
            self._answer(json.dumps(self.server.info()))
        elif self.path == "/metrics" and self.server.has_metrics:
            self._answer(self.server.metrics())
        elif self.path in ("/health", "/v1/models"):
            self._answer("{}")
        else:
            self._answer("", 404)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            self._answer("", 404)
        elif request.get("stream"):
            self._stream(request)
        else:
            self._answer(json.dumps(self.server.complete(request)))
        self.server.count()

    def _stream(self, request: dict[str, Any]) -> None:
        reply = self.server.complete(request)
        base = {"id": "cmpl", "object": "text_completion", "model": request["model"]}
        chunks = [
            {**base, "choices": [{"index": 0, "text": "a b c", "finish_reason": None}]},
            {
                **base,
                "choices": [{"index": 0, "text": " d e", "finish_reason": "stop"}],
            },
        ]
        if request.get("stream_options", {}).get("include_usage"):
            chunks.append({**base, "choices": [], "usage": reply["usage"]})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        self._answer("".join([*lines, "data: [DONE]\n\n"]), kind="text/event-stream")

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, text: str, code: int = 200, kind: str = "text/plain") -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, is_sglang: bool, drafts: bool, has_metrics: bool):
        super().__init__(("127.0.0.1", port), Handler)
        self.is_sglang, self.drafts, self.has_metrics = is_sglang, drafts, has_metrics
        self.args: dict[str, Any] = {}
        self._requests = itertools.count(1)
        self.num_requests = 0

    def count(self) -> None:
        self.num_requests = next(self._requests)

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        prompt = request["prompt"].encode()
        token_ids = [10 + (len(prompt) + i) % 50 for i in range(NUM_TOKENS - 1)]
        if self.is_sglang and len(prompt) % 5 == 0:
            token_ids[4:] = [token + 60 for token in token_ids[4:]]
        choice: dict[str, Any] = {
            "index": 0,
            "text": "a b c d e",
            "finish_reason": "stop",
            "logprobs": None,
        }
        if request.get("return_token_ids"):
            choice |= {"token_ids": [*token_ids, EOS], "prompt_token_ids": list(prompt)}
        reply = {
            "id": "cmpl",
            "object": "text_completion",
            "created": 0,
            "model": request["model"],
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": NUM_TOKENS,
                "total_tokens": len(prompt) + NUM_TOKENS,
            },
        }
        if self.is_sglang and self.drafts and request.get("return_spec_tokens_details"):
            details = {
                "spec_accept_length": NUM_TOKENS / NUM_VERIFIES,
                "spec_num_correct_drafts": NUM_VERIFIES * ACCEPTED,
                "spec_verify_ct": NUM_VERIFIES,
            }
            reply["sglext"] = {"spec_tokens_details": details}
        return reply

    def info(self) -> dict[str, Any]:
        states: dict[str, Any] = {"last_gen_throughput": 1.0}
        if self.drafts and self.num_requests:
            states["avg_spec_accept_length"] = ACCEPTED + 1.0
        return {**self.args, "internal_states": [states], "version": "0.5.23"}

    def metrics(self) -> str:
        if not self.num_requests:
            return ""
        verifies = self.num_requests * NUM_VERIFIES if self.drafts else 0
        if self.is_sglang:
            labels = 'engine_type="unified",model_name="m"'
            stream = f'{labels},is_streaming="true"'
            counters = {
                f"sglang:num_requests_total{{{stream}}}": self.num_requests,
                f"sglang:generation_tokens_total{{{stream}}}": self.num_requests
                * NUM_TOKENS,
            }
            if verifies:
                counters[f"sglang:spec_verify_calls_total{{{labels}}}"] = verifies
        else:
            accepted = "vllm:spec_decode_num_accepted_tokens_total"
            counters = {'vllm:num_requests_running{engine="0"}': 0}
            if verifies:
                counters |= {
                    'vllm:spec_decode_num_drafts_total{engine="0"}': verifies,
                    'vllm:spec_decode_num_draft_tokens_total{engine="0"}': 15
                    * verifies,
                    f'{accepted}{{engine="0"}}': ACCEPTED * verifies,
                }
        return "".join(f"{name} {float(value)}\n" for name, value in counters.items())


def main() -> None:
    if sys.argv[1:3] == ["-m", "sglang.launch_server"]:
        args = sglang_parser().parse_args(sys.argv[3:])
        drafts = args.speculative_algorithm is not None
        if drafts and args.speculative_draft_model_path is None:
            raise ValueError(
                "DFLASH speculative decoding requires setting "
                "--speculative-draft-model-path."
            )
        server = Server(args.port, True, drafts, args.enable_metrics)
        server.args = vars(args)
    else:
        port = int(sys.argv[sys.argv.index("--port") + 1])
        server = Server(port, False, "--speculative-config" in sys.argv, True)
    server.serve_forever()


if __name__ == "__main__":
    main()
