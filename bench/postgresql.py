"""A real PostgreSQL server for tests and measurements: in a directory of its own, on a Unix socket."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path

import psycopg
import psycopg.sql
from sqlalchemy import URL

PASSWORD = "s3cret/§ word"


def binaries() -> Path | None:
    """The directory of the newest server's programs, where Debian's package puts them; None if there is none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))
    if found:
        return found[-1].parent
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


class PostgresqlServer:
    """A server with one database, whose only user logs in with a password."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # a socket's path must be short
        self._user = pwd.getpwnam("nobody").pw_name if os.getuid() == 0 else None  # initdb refuses to run as root
        if self._user:
            os.chown(self._folder, pwd.getpwnam(self._user).pw_uid, -1)
        password = self._folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        options = ["--auth=scram-sha-256", f"--pwfile={password}", "--username=tester", "--encoding=UTF8", "--no-sync"]
        self._run("initdb", "--pgdata", str(self.data), *options)
        self.start()

    @property
    def data(self) -> Path:
        return self._folder / "data"

    def url(self, *, password: str = PASSWORD, database: str = "postgres", schema: str | None = None) -> str:
        """The URL as SQLAlchemy writes it; with a schema it is the default one, and it is created."""
        query = {"host": str(self._folder)}
        if schema is not None:
            with self.connect() as connection:
                connection.execute(psycopg.sql.SQL("CREATE SCHEMA {}").format(psycopg.sql.Identifier(schema)))
            query["options"] = f"-c search_path={schema}"
        url = URL.create("postgresql", "tester", password, database=database, query=query)
        return url.render_as_string(hide_password=False)

    def connect(self) -> psycopg.Connection:
        return psycopg.connect(host=str(self._folder), user="tester", password=PASSWORD, dbname="postgres", autocommit=True)

    def start(self) -> None:
        settings = f"-k {self._folder} -c listen_addresses= -c fsync=off -c max_connections=200 -c timezone=America/New_York"
        self._run("pg_ctl", "--pgdata", str(self.data), "--log", str(self._folder / "log"), "-w", "-o", settings, "start")

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "--pgdata", str(self.data), "-m", mode, "-w", "stop")

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder)

    def _run(self, program: str, *arguments: str) -> None:
        ended = subprocess.run(
            [str(self._programs / program), *arguments],
            user=self._user,
            cwd=self._folder,
            stdout=subprocess.DEVNULL,  # the server inherits pipes, and they would never end
            stderr=subprocess.DEVNULL,
            timeout=120,
        )
        assert ended.returncode == 0, f"{program} failed: {self._log()}"

    def _log(self) -> str:
        log = self._folder / "log"
        return log.read_text()[-2000:] if log.exists() else ""
