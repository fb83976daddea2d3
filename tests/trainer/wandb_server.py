"""A fake wandb server: answers the client's requests and records the data that it receives."""

import contextlib
import gzip
import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

ANSWERS: dict[str, dict[str, Any]] = {  # by the name of the query
    "Viewer": {"viewer": {"id": "1", "entity": "us", "username": "us", "flags": "{}", "teams": {"edges": []}}},
    "ServerFeaturesQuery": {"serverInfo": {"features": []}},
    "RunResumeStatus": {"model": None},
    "ArtifactType": {"project": {"artifact": None}},
    "CreateArtifact": {  # answers that the artifact of a table exists
        "createArtifact": {
            "artifact": {"id": "4", "state": "COMMITTED", "artifactSequence": {"id": "5", "latestArtifact": None}}
        }
    },
}


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.runs: set[str] = set()
        self.configs: list[dict[str, Any]] = []
        self.history: dict[int, dict[str, Any]] = {}  # by step
        self.files: set[str] = set()

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if query == "UpsertBucket":
            self.runs.add(variables["name"])
            self.configs.append(json.loads(variables["config"] or "{}"))
            project = {"id": "2", "name": variables["project"], "entity": {"id": "1", "name": "us"}}
            run = {
                "id": "3",
                "name": variables["name"],
                "displayName": "",
                "config": "{}",
                "historyLineCount": 0,
                "project": project,
            }
            return {"upsertBucket": {"bucket": run, "inserted": True}}
        if query == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/put/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "3", "uploadHeaders": [], "files": files}}
        return ANSWERS.get(query, {})


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        text = self._read()
        if self.path == "/graphql":
            request = json.loads(text)
            (name,) = re.findall(r"^\s*(?:query|mutation)\s+(\w+)", request["query"])
            return self._send({"data": self.server.answer(name, request.get("variables") or {})})
        if self.path.endswith("/file_stream"):
            history = json.loads(text).get("files", {}).get("wandb-history.jsonl", {"content": []})
            for line in map(json.loads, history["content"]):
                self.server.history.setdefault(line["_step"], {}).update(line)
        self._send({})

    def do_PUT(self) -> None:
        self._read()
        self.server.files.add(self.path.removeprefix("/put/"))
        self._send({})

    def _read(self) -> bytes:
        text = self.rfile.read(int(self.headers.get("content-length") or 0))
        return gzip.decompress(text) if self.headers.get("content-encoding") == "gzip" else text

    def _send(self, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextlib.contextmanager
def listening() -> Iterator[Server]:
    """Serve in a thread."""
    with Server() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
