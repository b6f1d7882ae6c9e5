"""Launches the JVM of a session, and says what the launcher wrote if it ends before Spark begins.

PySpark's own error has neither its output nor its reason (JAVA_GATEWAY_EXITED). The launcher and the JVM write to the standard
error of this process, as they do without this module: a thread passes on what they write, and keeps its last part until the JVM
has begun. The JVM gets a locale with which it knows every file name. Must not know Dagster.

Java's answers of more than 8 KiB arrive at once, not after 40 ms: py4j's server writes an answer in blocks of 8 KiB, and its
socket keeps a block back, if it is smaller than a segment, until those before it are acknowledged (Nagle's algorithm). On a
connection of questions and answers Linux acknowledges 40 ms later: so each plan, list of files or description of a class took 44
ms where it takes 1. The sockets of this process acknowledge at once.

Source: py4j's `ClientServerConnection` (which has no setting for its sockets), and `TCP_QUICKACK` in tcp(7): "not permanent".
"""

from __future__ import annotations

import locale
import os
import pwd
import re
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dagster_checkpoints.errors import DagsterCheckpointsError

_INSTALLED = "_dagster_checkpoints_prompt"


class PromptSocket(socket.socket):
    """A connected TCP socket that acknowledges at once what it receives."""

    __slots__ = ()

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        super().sendall(data, flags)
        self._acknowledge_at_once()

    def recv_into(self, *args: Any) -> int:
        received = super().recv_into(*args)
        self._acknowledge_at_once()  # an answer can be longer than what Linux acknowledges before it delays again
        return received

    def _acknowledge_at_once(self) -> None:
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def answer_promptly() -> None:
    """Let the connections to Java that are made after this call use such sockets, where the system has the option. Idempotent."""
    from py4j.clientserver import ClientServerConnection

    if not hasattr(socket, "TCP_QUICKACK") or hasattr(ClientServerConnection, _INSTALLED):
        return
    for name in ("_authenticate_connection", "init_socket_from_python_server"):
        setattr(ClientServerConnection, name, _prompt(getattr(ClientServerConnection, name)))
    setattr(ClientServerConnection, _INSTALLED, True)


def _prompt(method: Callable[..., None]) -> Callable[..., None]:
    """A method of a connection, in front of which or behind which the connection has its socket."""

    def with_prompt_socket(connection: Any, *args: Any) -> None:
        for found in (connection.socket, *args[:1]):
            if type(found) is socket.socket:  # not one that encrypts
                found.__class__ = PromptSocket
        method(connection, *args)

    return with_prompt_socket


_KEPT_BYTES = 256 * 1024
_READ_BYTES = 64 * 1024
_END_SECONDS = 5.0
_LINES = 8
_UNRESOLVED = re.compile(r"^\s*:: (?P<module>[^\s#]+)#(?P<name>[^;\s]+);(?P<version>[^:\s]+): (?P<problem>.+?)\s*$", re.MULTILINE)
_NOISE = re.compile(r"^\s*$|^\s+at |^:: |^\s*::+$|WARNING|incubator modules|log4j|^\s+(module|confs)|^\t")


class SparkLaunchError(DagsterCheckpointsError):
    """Spark's JVM has ended before a session began, or would do so: the text says why."""


def launch(settings: Mapping[str, str]) -> None:
    """Launch the JVM that the session of this process will use, unless there is one.

    Args:
        settings: Spark's settings.

    Raises:
        SparkLaunchError: The JVM has ended before Spark began, or would do so.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.errors import PySparkRuntimeError
    from pyspark.java_gateway import launch_gateway

    answer_promptly()
    with SparkContext._lock:
        if SparkContext._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ:
            return
        check_user()
        conf = SparkConf().setAll(list(settings.items()))
        output = _Output()
        try:
            with _utf8_locale():
                gateway = launch_gateway(conf, popen_kwargs={"stderr": output.writer})
        except PySparkRuntimeError as error:
            if error.getCondition() != "JAVA_GATEWAY_EXITED":
                raise
            raise SparkLaunchError(launch_problem(output.ended(), settings)) from error
        finally:
            output.forget()
    SparkContext._ensure_initialized(gateway=gateway)


def check_user() -> None:
    """Check that this process's user has a name, without which Spark does not begin.

    Raises:
        SparkLaunchError: It has none.

    Source: the Unix login of Hadoop's `UserGroupInformation`, of which HADOOP_USER_NAME changes only the result.
    """
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        raise SparkLaunchError(
            f"expected that the user of this process, {os.getuid()}, has a name, found no entry for it in /etc/passwd: Spark "
            "does not begin without one. Run as a user that has an entry (in Kubernetes runAsUser), or add one in the "
            "container's image or at its start"
        ) from None


@contextmanager
def _utf8_locale() -> Iterator[None]:
    """Let a process that is started within this block have a UTF-8 locale, from which Java takes the encoding of file names.

    With another one, such as LC_ALL=C, Spark leaves out a file whose name has other characters, without an error.
    """
    before = os.environ.get("LC_ALL")
    if locale.getencoding().upper() in ("UTF-8", "UTF8"):
        yield
        return
    os.environ["LC_ALL"] = "C.UTF-8"
    try:
        yield
    finally:
        if before is None:
            del os.environ["LC_ALL"]
        else:
            os.environ["LC_ALL"] = before


def launch_problem(output: str, settings: Mapping[str, str]) -> str:
    """What the launcher's output says about its end.

    Args:
        output: What it wrote.
        settings: Spark's settings.
    """
    unresolved = {f"{m['module']}:{m['name']}:{m['version']}": m["problem"] for m in _UNRESOLVED.finditer(output)}
    if unresolved:
        named = ", ".join(f"{name} ({problem})" for name, problem in unresolved.items())
        given = settings.get("spark.jars.packages")
        where = f"spark.jars.packages={given!r} in the resource's spark_config" if given else "spark.jars.packages"
        return (
            f"expected that Spark finds the packages of {where}, found no {named}. The launcher's output, above, lists where it "
            "has looked. Correct the name, the Scala version (_2.13) or the version; or give the machine access to the "
            "repository (spark.jars.repositories, spark.jars.ivySettings, a proxy); or put the jar on this machine and name it "
            "in spark.jars"
        )
    said = [line.strip() for line in output.splitlines() if not _NOISE.search(line)][-_LINES:]
    wrote = "it has written nothing" if not said else "the end of its output: " + " | ".join(said)
    return (
        f"expected that Java begins Spark, found that it has ended before; {wrote}. Correct what it names: a setting in "
        "the resource's spark_config (spark.driver.memory, spark.driver.extraJavaOptions, spark.jars), or JAVA_HOME"
    )


class _Output:
    """The standard error of a process: passed on to that of this process; the last part is kept until it is forgotten."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        try:
            self._target = os.dup(2)  # the place of now: others may exchange the standard error later
        except OSError:  # this process has none
            self._target = os.open(os.devnull, os.O_WRONLY)
        self._kept: deque[bytes] | None = deque(maxlen=_KEPT_BYTES // 512)
        self._thread = threading.Thread(target=self._pass_on, name="spark-output", daemon=True)
        self._thread.start()

    def ended(self) -> str:
        """Everything that was kept, once the process has ended."""
        self._close_writer()
        self._thread.join(_END_SECONDS)
        return b"".join(self._kept or ()).decode(errors="replace")

    def forget(self) -> None:
        """The process goes on: pass on what it writes, and keep nothing more."""
        self._close_writer()
        self._kept = None

    def _close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def _pass_on(self) -> None:
        while data := os.read(self._reader, _READ_BYTES):
            kept = self._kept
            if kept is not None:
                kept.extend(data[start : start + 512] for start in range(0, len(data), 512))
            try:
                os.write(self._target, data)
            except OSError:  # the standard error of this process is closed
                continue
        os.close(self._reader)
        os.close(self._target)
