# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""A judge on loopback with scripted answers, which records what it is asked."""

import json
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TRUE = "It is all there.\n\n**Conclusion: True**"
FALSE = "It is nowhere.\nConclusion: False"


def completion(text):
    message = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"model": "judge-2026-01-01", "choices": [message]}


class JudgeServer(ThreadingHTTPServer):
    """`script(prompt, times)` gives the answer to a prompt that was asked `times` times before: a text, a dict (the
    JSON), or a tuple (status, body)."""

    def __init__(self, script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.lock = script, threading.Lock()
        self.asked = Counter()  # prompt -> times
        self.requests = []  # path, headers and body

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request, client_address):
        """Clients go away after their timeout."""


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["messages"][0]["content"]
        with server.lock:
            times = server.asked[prompt]
            server.asked[prompt] += 1
            server.requests.append((self.path, self.headers, body))
        answer = server.script(prompt, times)
        status, kind = 200, "application/json"
        if isinstance(answer, tuple):
            (status, content), kind = answer, "text/plain"
        else:
            content = json.dumps(answer if isinstance(answer, dict) else completion(answer))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content.encode())))
        self.end_headers()
        self.wfile.write(content.encode())

    def log_message(self, *args):
        pass


@contextmanager
def judge_server(script):
    with JudgeServer(script if callable(script) else lambda prompt, times: script) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            yield server
        finally:
            server.shutdown()
