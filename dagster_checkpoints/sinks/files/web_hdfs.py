"""HDFS through its HTTP interface, WebHDFS: the few operations that a sink needs, and their errors as errors of storage.

Must not know what the files are.

Source: Hadoop's "WebHDFS REST API".
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any
from urllib.parse import quote, unquote, urlsplit

import requests
from requests.adapters import HTTPAdapter

from dagster_checkpoints.errors import AlreadyExists, NotFound, StorageAccessDenied, StorageUnavailable

_SECONDS = 5.0, 60.0  # to connect, and between two pieces of an answer
_CONNECTIONS = 8
_CHUNK = 1024 * 1024
_ACCESS = frozenset({"AccessControlException", "SecurityException", "InvalidToken"})
_NOT_EMPTY = frozenset({"PathIsNotEmptyDirectoryException"})


@dataclass(frozen=True, slots=True)
class HdfsEntry:
    """A file or a directory.

    Attributes:
        name: its name in its directory.
        size: its size in bytes.
        is_folder: whether it is a directory.
    """

    name: str
    size: int
    is_folder: bool


class WebHdfs:
    """A directory in HDFS. Safe to use from several threads at once.

    Paths are relative to the directory.

    Args:
        url: ``webhdfs://namenode:9870/path``.
        user: the user whose files they are; by default, as in Hadoop, HADOOP_USER_NAME or the process's user. A cluster with
            Kerberos refuses it.
    """

    def __init__(self, url: str, user: str | None = None) -> None:
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self._server = parts.netloc
        self._root = unquote(parts.path).rstrip("/")
        self._user = user or os.environ.get("HADOOP_USER_NAME") or getpass.getuser()
        self._session = requests.Session()
        self._session.trust_env = False  # neither proxies nor a password file of the user's home
        self._session.mount("http://", HTTPAdapter(pool_maxsize=_CONNECTIONS))

    def stream(self, path: str) -> Iterator[bytes]:
        """A file's bytes, in pieces. Raises NotFound."""
        with self._errors("read", path), self._asked("GET", path, "OPEN", stream=True) as answer:
            yield from answer.iter_content(_CHUNK)

    def write(self, path: str, data: bytes | IO[bytes]) -> None:
        """Create or replace a file, with the directories above it. Not in one step: readers see a part of it meanwhile."""
        with self._errors("write", path):
            with self._asked("PUT", path, "CREATE", overwrite="true", allow_redirects=False) as named:
                datanode = named.headers["Location"]
            with self._session.put(datanode, data=data, timeout=_SECONDS) as answer:
                self._check(answer, path)

    def rename(self, path: str, new: str, *, overwrite: bool) -> None:
        """Give a file another path, in one step.

        Args:
            path: its present path.
            new: its new path, in a directory that exists.
            overwrite: whether a file of that path is replaced.

        Raises:
            AlreadyExists: there is a file of the new path; not with `overwrite`.
            NotFound: there is no file of the present path, or no directory of the new one.
        """
        options = "OVERWRITE" if overwrite else "NONE"
        with self._errors("move", path):
            self._asked("PUT", path, "RENAME", destination=self._path(new), renameoptions=options).close()

    def make_folder(self, path: str) -> None:
        """Create a directory, with those above it, if it does not exist."""
        with self._errors("create", path):
            self._asked("PUT", path, "MKDIRS").close()

    def delete(self, path: str) -> bool:
        """Delete a file or an empty directory; False if it does not exist, or is a directory that is not empty."""
        with self._errors("delete", path):
            try:
                with self._asked("DELETE", path, "DELETE", recursive="false") as answer:
                    return bool(answer.json()["boolean"])
            except _NotEmpty:
                return False

    def status(self, path: str) -> HdfsEntry | None:
        """A file or a directory; None if there is none."""
        with self._errors("inspect", path):
            try:
                with self._asked("GET", path, "GETFILESTATUS") as answer:
                    return _entry(answer.json()["FileStatus"])
            except NotFound:
                return None

    def entries(self, path: str) -> list[HdfsEntry]:
        """What is in a directory, ordered by name; nothing if there is no such directory."""
        with self._errors("list", path):
            try:
                with self._asked("GET", path, "LISTSTATUS") as answer:
                    return sorted((_entry(each) for each in answer.json()["FileStatuses"]["FileStatus"]), key=lambda e: e.name)
            except NotFound:
                return []

    def _asked(
        self, method: str, path: str, operation: str, *, stream: bool = False, allow_redirects: bool = True, **settings: str
    ) -> requests.Response:
        answer = self._session.request(
            method,
            f"http://{self._server}/webhdfs/v1{quote(self._path(path))}",
            params={"op": operation, "user.name": self._user, **settings},
            timeout=_SECONDS,
            stream=stream,
            allow_redirects=allow_redirects,
        )
        self._check(answer, path)
        return answer

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}".rstrip("/") or "/"

    def _check(self, answer: requests.Response, path: str) -> None:
        """Raise the error that the server has answered."""
        if answer.status_code < 400:
            return
        try:
            found: dict[str, Any] = answer.json()["RemoteException"]
        except (ValueError, KeyError, TypeError):
            found = {"exception": f"HTTP {answer.status_code}", "message": answer.reason}
        answer.close()
        name, text = str(found["exception"]), str(found["message"]).partition("\n")[0]
        where = f"{self.url}/{path}".rstrip("/")
        if name == "FileNotFoundException":
            raise NotFound(f"expected a file at {where}, found none")
        if name == "FileAlreadyExistsException":
            raise AlreadyExists(f"expected no file at {where}, found one")
        if name in _NOT_EMPTY or (answer.status_code == 403 and "is non empty" in text):
            raise _NotEmpty(text)
        if name in _ACCESS or answer.status_code == 401:
            raise StorageAccessDenied(
                f"expected that the user {self._user!r} may use {where}, found {name}: {text}. Give the user the rights, or name "
                "another one; a cluster that demands Kerberos cannot be used"
            )
        raise StorageUnavailable(f"cannot use {where}: {name}: {text}")

    @contextmanager
    def _errors(self, verb: str, path: str) -> Iterator[None]:
        try:
            yield
        except requests.RequestException as error:
            raise StorageUnavailable(
                f"cannot {verb} {self.url}/{path}: {error}. Expected HDFS's HTTP interface at http://{self._server} "
                "(dfs.namenode.http-address), whose DataNodes this machine reaches"
            ) from error


class _NotEmpty(Exception):
    pass


def _entry(status: dict[str, Any]) -> HdfsEntry:
    return HdfsEntry(status["pathSuffix"], int(status["length"]), status["type"] == "DIRECTORY")
