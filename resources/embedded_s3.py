"""An S3 server on loopback, in this process: moto, for tests and for `make run`, without installation or
account.

moto's conditional writes are correct but not atomic, so a lock admits one request at a time. Other
processes reach the server by its endpoint URL. For tests it can refuse, drop and delay requests, answer them with a conflict,
and lose their answers.

    with EmbeddedS3() as s3:
        subprocess.run(command, env={**os.environ, **s3.environment})

As a program: `python -m resources.embedded_s3 --port 9000` serves until it is interrupted.
"""

from __future__ import annotations

import argparse
import io
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal
from urllib.parse import unquote
from uuid import uuid4

import boto3
from botocore.config import Config
from moto.core.model_instances import model_data
from moto.moto_server.werkzeug_app import (
    MotoRequestHandler,
    create_backend_app,
)
from moto.s3.models import s3_backends
from werkzeug.serving import BaseWSGIServer, make_server

_REGION = "us-east-1"
_ACCOUNT = "123456789012"
_ACCESS_KEY = "embedded"
_SECRET_KEY = "embedded-secret"

Environ = dict[str, Any]
Action = Literal["answer", "drop", "lose_answer", "wait"]
StartResponse = Callable[..., Any]

# moto keeps its buckets in module variables: one lock for every server of this process.
_one_at_a_time = threading.Lock()


@dataclass
class Fault:
    """A fault of the server in requests that match.

    Args:
        action: ``answer``: answer with an error, without carrying the request out; ``drop``: drop the connection without
            carrying the request out; ``lose_answer``: carry the request out, then drop the connection; ``wait``: wait for
            ``until``, then carry the request out.
        method: HTTP method of the matching requests; None for any method.
        key: text that the path of a matching request contains; "" for any path.
        times: number of requests that fail; None for all of them until the fault is removed.
        status: HTTP status of ``answer``.
        code: S3 error code of ``answer``.
        until: event that ends ``wait``.
        hits: number of requests that have failed so far.
    """

    action: Action
    method: str | None = None
    key: str = ""
    times: int | None = 1
    status: int = 503
    code: str = "SlowDown"
    until: threading.Event = field(default_factory=threading.Event)
    hits: int = 0

    def matches(self, environ: Environ) -> bool:
        return (
            (self.times is None or self.hits < self.times)
            and (self.method is None or self.method == environ["REQUEST_METHOD"])
            and self.key in unquote(environ.get("PATH_INFO", ""))
        )


class EmbeddedS3:
    """A server with one bucket, from ``start()`` to ``stop()`` or as a context manager.

    Args:
        bucket: name of the bucket, which is created at the start; by default a random name.
        port: TCP port; 0 for a free port.
    """

    def __init__(self, bucket: str | None = None, port: int = 0) -> None:
        self.bucket = bucket or f"checkpoints-{uuid4().hex[:8]}"
        self._port = port
        self._faults: list[Fault] = []
        self._faults_lock = threading.Lock()
        self._server: BaseWSGIServer | None = None
        self._thread: threading.Thread | None = None
        self._moto = create_backend_app("s3")

    @property
    def endpoint_url(self) -> str:
        """The server's URL, boto3's ``endpoint_url``."""
        assert self._server is not None, "start() first"
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def url(self) -> str:
        """The bucket as a storage URL."""
        return f"s3://{self.bucket}"

    @property
    def credentials(self) -> dict[str, Any]:
        """Keyword arguments for a boto3 session or client."""
        return {
            "aws_access_key_id": _ACCESS_KEY,
            "aws_secret_access_key": _SECRET_KEY,
            "region_name": _REGION,
        }

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables by which boto3 in another process reaches this server."""
        return {
            "AWS_ACCESS_KEY_ID": _ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": _SECRET_KEY,
            "AWS_DEFAULT_REGION": _REGION,
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
        }

    def client(self, **config: Any) -> Any:
        """A boto3 client of this server.

        Args:
            config: arguments of ``botocore.config.Config``; by default short time-outs and few retries.
        """
        defaults: dict[str, Any] = {
            "connect_timeout": 2,
            "read_timeout": 5,
            "retries": {"mode": "standard", "total_max_attempts": 2},
        }
        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint_url,
            config=Config(**{**defaults, **config}),
            **self.credentials,
        )

    def start(self) -> EmbeddedS3:
        self._server = make_server("127.0.0.1", self._port, self._serve, threaded=True, request_handler=_QuietHandler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="embedded-s3", daemon=True
        )
        self._thread.start()
        self.client().create_bucket(Bucket=self.bucket)
        return self

    def stop(self) -> None:
        """Stop the server and delete the bucket. Idempotent."""
        server, self._server = self._server, None
        if server is None or self._thread is None:
            return
        self.heal()
        server.shutdown()
        server.server_close()
        self._thread.join()
        with _one_at_a_time:
            bucket = s3_backends[_ACCOUNT]["aws"].buckets.pop(self.bucket, None)
            s3_backends.bucket_accounts.pop(self.bucket, None)
            for key in list(bucket.keys.values()) if bucket is not None else ():
                key.dispose()

    def __enter__(self) -> EmbeddedS3:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def inject(self, fault: Fault) -> Fault:
        """Add a fault for the next matching requests; of several matching faults the earliest applies."""
        with self._faults_lock:
            self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """Remove every fault; waiting requests continue."""
        with self._faults_lock:
            faults, self._faults = self._faults, []
        for fault in faults:
            fault.until.set()

    @contextmanager
    def fault(self, action: Action, **options: Any) -> Iterator[Fault]:
        """A fault while the block runs; arguments as :class:`Fault`'s, ``times`` unlimited by default."""
        fault = self.inject(Fault(action, **{"times": None, **options}))
        try:
            yield fault
        finally:
            with self._faults_lock:
                if fault in self._faults:
                    self._faults.remove(fault)
            fault.until.set()

    def conflict(self, times: int = 1, key: str = "") -> Fault:
        """Answer the next writes with 409, as AWS may at concurrent conditional writes; moto does not."""
        return self.inject(Fault("answer", "PUT", key, times, 409, "ConditionalRequestConflict"))

    def lose_answer(self, method: str = "PUT", key: str = "", times: int = 1) -> Fault:
        """Carry the next requests out, but drop their answers."""
        return self.inject(Fault("lose_answer", method, key, times))

    def outage(self, key: str = "") -> Any:
        """Drop every connection while the block runs, as a network failure does."""
        return self.fault("drop", key=key)

    def _serve(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        # Read before the lock: a slow client must not hold up the others.
        environ["wsgi.input"] = io.BytesIO(_body(environ))
        fault = self._next_fault(environ)
        if fault is not None:
            if fault.action == "drop":
                raise _dropped(environ)
            if fault.action == "answer":
                return _error(fault, start_response)
            if fault.action == "wait":
                fault.until.wait(60)
        with _one_at_a_time:
            answer: Any = self._moto(environ, start_response)
            try:
                body = b"".join(answer)
            finally:
                if hasattr(answer, "close"):
                    answer.close()
            # moto keeps every object in a list, also deleted and replaced ones.
            for model in model_data["s3"].values():
                model.instances_tracked.clear()  # type: ignore[attr-defined]
        if fault is not None and fault.action == "lose_answer":
            raise _dropped(environ)
        return [body]

    def _next_fault(self, environ: Environ) -> Fault | None:
        with self._faults_lock:
            for fault in self._faults:
                if fault.matches(environ):
                    fault.hits += 1
                    return fault
        return None


class _QuietHandler(MotoRequestHandler):  # type: ignore[misc,unused-ignore]
    """A request handler without a log line on stderr for each request."""

    def log(self, type: str, message: str, *args: Any) -> None:
        """Log nothing."""


def _body(environ: Environ) -> bytes:
    length = environ.get("CONTENT_LENGTH")
    if length:
        return bytes(environ["wsgi.input"].read(int(length)))
    return bytes(environ["wsgi.input"].read()) if environ.get("wsgi.input_terminated") else b""


def _dropped(environ: Environ) -> ConnectionAbortedError:
    connection: socket.socket = environ["werkzeug.socket"]
    connection.shutdown(socket.SHUT_RDWR)
    return ConnectionAbortedError("dropped on purpose")


def _error(fault: Fault, start_response: StartResponse) -> Iterable[bytes]:
    text = f"<Error><Code>{fault.code}</Code><Message>injected</Message></Error>"
    start_response(f"{fault.status} {fault.code}", [("Content-Type", "application/xml")])
    return [f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()]


def main() -> None:
    """Serve until the process is interrupted."""
    parser = argparse.ArgumentParser(description="An S3 on loopback that keeps its objects in memory.")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--bucket", default="checkpoints")
    options = parser.parse_args()
    with EmbeddedS3(options.bucket, options.port) as s3:
        print("\n".join(f"export {name}={value}" for name, value in s3.environment.items()), flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            return


if __name__ == "__main__":
    main()
