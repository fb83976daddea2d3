"""A stand-in for wandb's server: answers what its client asks, and remembers what it was sent."""

import contextlib
import gzip
import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

ANSWERS: dict[str, dict[str, Any]] = {  # by the name of what is asked
    "Viewer": {"viewer": {"id": "1", "entity": "us", "username": "us", "flags": "{}", "teams": {"edges": []}}},
    "ServerFeaturesQuery": {"serverInfo": {"features": []}},
    "RunResumeStatus": {"model": None},
    "ArtifactType": {"project": {"artifact": None}},
    "CreateArtifact": {  # of a table: it has it already
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

    def answer(self, asked: str, given: dict[str, Any]) -> dict[str, Any]:
        if asked == "UpsertBucket":
            self.runs.add(given["name"])
            self.configs.append(json.loads(given["config"] or "{}"))
            project = {"id": "2", "name": given["project"], "entity": {"id": "1", "name": "us"}}
            run = {
                "id": "3",
                "name": given["name"],
                "displayName": "",
                "config": "{}",
                "historyLineCount": 0,
                "project": project,
            }
            return {"upsertBucket": {"bucket": run, "inserted": True}}
        if asked == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/put/{name}"} for name in given["files"]]
            return {"createRunFiles": {"runID": "3", "uploadHeaders": [], "files": files}}
        return ANSWERS.get(asked, {})


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        text = self._read()
        if self.path == "/graphql":
            question = json.loads(text)
            (asked,) = re.findall(r"^\s*(?:query|mutation)\s+(\w+)", question["query"])
            return self._say({"data": self.server.answer(asked, question.get("variables") or {})})
        if self.path.endswith("/file_stream"):
            sent = json.loads(text).get("files", {}).get("wandb-history.jsonl", {"content": []})
            for line in map(json.loads, sent["content"]):
                self.server.history.setdefault(line["_step"], {}).update(line)
        self._say({})

    def do_PUT(self) -> None:
        self._read()
        self.server.files.add(self.path.removeprefix("/put/"))
        self._say({})

    def _read(self) -> bytes:
        text = self.rfile.read(int(self.headers.get("content-length") or 0))
        return gzip.decompress(text) if self.headers.get("content-encoding") == "gzip" else text

    def _say(self, answer: dict[str, Any]) -> None:
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """To nobody."""


@contextlib.contextmanager
def listening() -> Iterator[Server]:
    with Server() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
