# SPDX-License-Identifier: Apache-2.0
"""A stand-in for `vllm serve`: same routes, canned answers, a child process.

Usage: fake_vllm_server.py PORT MODE CHILD_PID_FILE, where MODE is `ok`, `crash` (before
it is ready) or `stubborn` (ignores SIGTERM).
"""

import json
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

PIECES = ["Throw", " and", " catch.\n"]
TOKEN_IDS = [11, 12, 13]
num_answers = 0


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        text = ""
        if self.path == "/metrics":
            text = (
                "# HELP vllm:spec_decode_num_drafts_total Number of drafts.\n"
                f'vllm:spec_decode_num_drafts_total{{engine="0"}} {2.0 * num_answers}\n'
                'vllm:spec_decode_num_accepted_tokens_total{engine="0"} '
                f"{5.0 * num_answers}\n"
            )
        self._answer(text)

    def do_POST(self) -> None:
        global num_answers
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if request["temperature"] != 0:
            self._answer('{"error": "not greedy"}', 400)
            return
        num_answers += 1
        if request.get("stream"):
            events = [{"choices": [{"delta": {"content": piece}}]} for piece in PIECES]
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            self._answer("".join([*lines, "data: [DONE]\n\n"]))
            return
        message = {"content": "".join(PIECES)}
        choice = {"message": message, "token_ids": TOKEN_IDS}
        self._answer(json.dumps({"choices": [choice]}))

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, text: str, code: int = 200) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    port, mode, child_pid_file = sys.argv[1:]
    if mode == "crash":
        print("(Worker pid=1) ERROR [executor.py:1] ValueError: no such budget")
        print("RuntimeError: Engine core initialization failed.")
        sys.exit(3)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    Path(child_pid_file).write_text(str(child.pid))
    HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
