"""A REST catalog of Iceberg tables on this machine: the protocol over HTTP, the tables in a SQL catalog of the library."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pyiceberg.catalog import load_catalog
from pyiceberg.catalog.rest import CreateTableRequest
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, TableAlreadyExistsError
from pyiceberg.table import CommitTableRequest, Table

_OPTIONAL = {"location": None, "partition-spec": None, "write-order": None}
Answer = tuple[int, dict[str, Any]]


class RestCatalogServer:
    """The server.

    Args:
        folder: where the catalog and its tables are.
        token: the token that every request must carry.

    Attributes:
        commits: the bodies of all requests to change a table.
        fault: answers the next request to change a table instead; its argument does what was asked.
    """

    def __init__(self, folder: Path, token: str) -> None:
        self.folder = folder
        self.token = token
        self.commits: list[dict[str, Any]] = []
        self.fault: Callable[[Callable[[], Answer]], Answer] | None = None
        self._lock = threading.Lock()
        self._catalog = load_catalog("rest", type="sql", uri=f"sqlite:///{folder}/rest.db", warehouse=f"file://{folder}/tables")

    def answer(self, method: str, url: str, body: bytes) -> Answer:
        parts = [unquote(part) for part in urlsplit(url).path.strip("/").split("/")][1:]
        with self._lock:
            try:
                return self._answer(method, parts, body)
            except NoSuchTableError:
                return _error(404, "NoSuchTableException")
            except (CommitFailedException, TableAlreadyExistsError) as error:
                return _error(409, type(error).__name__)

    def _answer(self, method: str, parts: list[str], body: bytes) -> Answer:
        match method, parts:
            case "GET", ["config"]:
                return 200, {"defaults": {}, "overrides": {}}
            case _, ["namespaces", name] if method in ("GET", "HEAD"):
                return (
                    (200, {"namespace": [name]})
                    if self._catalog.namespace_exists(name)
                    else _error(404, "NoSuchNamespaceException")
                )
            case "POST", ["namespaces"]:
                self._catalog.create_namespace(tuple(json.loads(body)["namespace"]))
                return 200, {"namespace": json.loads(body)["namespace"]}
            case "POST", ["namespaces", name, "tables"]:
                asked = CreateTableRequest.model_validate({**_OPTIONAL, **json.loads(body)})
                spec = {} if asked.partition_spec is None else {"partition_spec": asked.partition_spec}
                return _table(
                    self._catalog.create_table((name, asked.name), asked.table_schema, properties=asked.properties, **spec)
                )
            case "GET", ["namespaces", name, "tables", table]:
                return _table(self._catalog.load_table((name, table)))
            case "POST", ["namespaces", name, "tables", table]:
                self.commits.append(json.loads(body))
                fault, self.fault = self.fault, None
                return self._commit((name, table), body) if fault is None else fault(lambda: self._commit((name, table), body))
            case _:
                return _error(404, "NoSuchEndpoint")

    def _commit(self, name: tuple[str, str], body: bytes) -> Answer:
        asked = CommitTableRequest.model_validate_json(body)
        done = self._catalog.commit_table(self._catalog.load_table(name), asked.requirements, asked.updates)
        return 200, json.loads(done.model_dump_json())


@contextmanager
def running_rest_catalog(folder: Path, token: str) -> Iterator[tuple[RestCatalogServer, str]]:
    """The server, and its URL."""
    catalog = RestCatalogServer(folder, token)

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            allowed = self.headers.get("Authorization") == f"Bearer {token}"
            status, content = catalog.answer(self.command, self.path, body) if allowed else _error(403, "Forbidden")
            data = b"" if self.command == "HEAD" else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_HEAD = do_POST = _serve

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield catalog, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def _table(table: Table) -> Answer:
    metadata = json.loads(table.metadata.model_dump_json())
    return 200, {"metadata-location": table.metadata_location, "metadata": metadata, "config": {}}


def _error(status: int, kind: str) -> Answer:
    return status, {"error": {"message": kind, "type": kind, "code": status}}
