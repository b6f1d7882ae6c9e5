"""Properties that only the S3 store has: the meaning of failures of the network and of the service."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from dagster_checkpoints.errors import (
    AlreadyExists,
    BucketMissing,
    ConditionalWritesUnsupported,
    OutcomeUnknown,
    Precondition,
    StorageAccessDenied,
    StorageUnavailable,
    WriteConflict,
)
from dagster_checkpoints.files.s3 import S3Store
from dagster_checkpoints.files.store import PutMode, UpdateVersion
from resources.embedded_s3 import EmbeddedS3, Fault


def test_a_conflict_is_tried_again(s3: EmbeddedS3, s3_store: S3Store) -> None:
    fault = s3.conflict(times=3)
    etag = s3_store.put("key", b"1", "create")
    assert fault.hits == 3
    s3.conflict(times=2)
    s3_store.put("key", b"2", UpdateVersion(etag))
    assert s3_store.get("key") == b"2"


@pytest.mark.parametrize(
    ("key", "kind"),
    [("report.html", "text/html; charset=utf-8"), ("status.json", "application/json"), ("state/a1", "binary/octet-stream")],
)
def test_a_browser_shows_a_page_and_does_not_save_it(s3: EmbeddedS3, s3_store: S3Store, key: str, kind: str) -> None:
    s3_store.put(key, b"1")
    found = s3.client().head_object(Bucket=s3.bucket, Key=s3_store._key(key))
    assert found["ContentType"] == kind


def test_a_conflict_without_end_is_an_error_of_its_own(s3: EmbeddedS3, s3_store: S3Store) -> None:
    s3.conflict(times=1000)
    with pytest.raises(WriteConflict, match=r"409.*key"):
        s3_store.put("key", b"1", "create")
    s3.heal()
    assert s3_store.head("key") is None


@pytest.mark.parametrize("lands", [True, False])
@pytest.mark.parametrize("update", [True, False])
def test_a_conflict_without_end_after_a_lost_answer_is_not_taken_for_a_refusal(
    s3: EmbeddedS3, s3_store: S3Store, lands: bool, update: bool
) -> None:
    """The write whose answer was lost may be the one that the others conflict with."""
    twice = S3Store(s3.bucket, s3_store.prefix, client=s3.client(), sleep=lambda seconds: None)
    mode: PutMode = UpdateVersion(twice.put("key", b"0")) if update else "create"
    s3.inject(Fault("lose_answer" if lands else "drop", "PUT", "key"))
    s3.conflict(times=1000)
    if lands:
        etag = twice.put("key", b"1", mode)
        assert twice.get_with_etag("key") == (b"1", etag)
        return
    with pytest.raises(OutcomeUnknown, match="ConditionalRequestConflict"):
        twice.put("key", b"1", mode)


def test_an_own_create_is_recognised_after_the_client_tried_again(s3: EmbeddedS3, s3_store: S3Store) -> None:
    twice = S3Store(s3.bucket, s3_store.prefix, client=s3.client())
    lost = s3.lose_answer(key="key")
    etag = twice.put("key", b"mine", "create")
    assert lost.hits == 1
    assert twice.get_with_etag("key") == (b"mine", etag)


def test_an_own_write_is_recognised_without_another_attempt(s3: EmbeddedS3, s3_store: S3Store) -> None:
    s3.lose_answer()
    etag = s3_store.put("key", b"1", "create")
    s3.lose_answer()
    etag = s3_store.put("key", b"2", UpdateVersion(etag))
    assert s3_store.get_with_etag("key") == (b"2", etag)


def test_equal_bytes_of_another_writer_are_not_an_own_write(s3: EmbeddedS3, s3_store: S3Store) -> None:
    s3_store.put("key", b"same", "create")
    with pytest.raises(AlreadyExists):
        s3_store.put("key", b"same", "create")
    other = s3_store.put("key", b"other")
    s3_store.put("key", b"same")
    with pytest.raises(Precondition):
        s3_store.put("key", b"same", UpdateVersion(other))


@pytest.mark.parametrize("action", ["lose_answer", "drop"])
def test_the_outcome_is_unknown_when_the_object_cannot_be_read_back(s3: EmbeddedS3, s3_store: S3Store, action: Any) -> None:
    landed = action == "lose_answer"
    with (
        s3.fault(action, method="PUT"),
        s3.fault("drop", method="HEAD"),
        pytest.raises(OutcomeUnknown, match=f"{s3.url}.*key.*{s3.endpoint_url}"),
    ):
        s3_store.put("key", b"1", "create")
    assert (s3_store.head("key") is not None) == landed


def test_a_lost_answer_is_not_forgotten_when_the_last_attempt_is_refused(s3: EmbeddedS3, s3_store: S3Store) -> None:
    twice = S3Store(s3.bucket, s3_store.prefix, client=s3.client())
    s3.inject(Fault("lose_answer", "PUT"))
    s3.inject(Fault("answer", "PUT", times=None))  # 503 alone means that nothing was written
    s3.inject(Fault("drop", "HEAD", times=None))
    with pytest.raises(OutcomeUnknown):
        twice.put("key", b"1", "create")
    s3.heal()
    assert s3_store.get("key") == b"1"


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (503, "SlowDown", StorageUnavailable),
        (500, "InternalError", OutcomeUnknown),
        (403, "AccessDenied", StorageAccessDenied),
        (403, "RequestTimeTooSkewed", StorageUnavailable),
        (501, "NotImplemented", ConditionalWritesUnsupported),
        (400, "RequestTimeout", StorageUnavailable),
    ],
)
def test_the_meaning_of_an_answer_to_a_write(
    s3: EmbeddedS3, s3_store: S3Store, status: int, code: str, error: type[Exception]
) -> None:
    s3.inject(Fault("answer", "PUT", times=None, status=status, code=code))
    with pytest.raises(error) as caught:
        s3_store.put("key", b"1")
    assert type(caught.value) is error
    assert f"{s3_store.url}/key" in str(caught.value)


@pytest.mark.parametrize(
    ("code", "advice"),
    [("RequestTimeTooSkewed", "clock of this machine is wrong"), ("InvalidObjectState", "archived .*restore-object")],
)
def test_a_refusal_that_is_not_about_rights_says_what_it_is_about(
    s3: EmbeddedS3, s3_store: S3Store, code: str, advice: str
) -> None:
    s3_store.put("key", b"1")
    with s3.fault("answer", method="GET", status=403, code=code), pytest.raises(StorageUnavailable, match=advice) as caught:
        s3_store.get("key")
    assert type(caught.value) is StorageUnavailable and "credentials" not in str(caught.value)


def test_an_unreachable_server_is_named(s3: EmbeddedS3) -> None:
    with EmbeddedS3() as gone:
        store = S3Store("bucket", "root", client=gone.client(retries={"total_max_attempts": 1}))
        endpoint = gone.endpoint_url
    for action in (store.check, lambda: store.get("key"), lambda: store.put("key", b"", "create")):
        with pytest.raises(StorageUnavailable, match=f"s3://bucket/root.*{endpoint}.*Could not connect"):
            action()


def test_storage_that_comes_back_works_again(s3: EmbeddedS3, s3_store: S3Store) -> None:
    with s3.outage(), pytest.raises(StorageUnavailable):
        s3_store.get("key")
    s3_store.put("key", b"1")
    assert s3_store.get("key") == b"1"


def test_a_silent_server_ends_in_an_unknown_outcome(s3: EmbeddedS3, s3_store: S3Store) -> None:
    impatient = s3.client(read_timeout=0.2, retries={"mode": "standard", "total_max_attempts": 1})
    store = S3Store(s3.bucket, s3_store.prefix, client=impatient)
    with s3.fault("wait"), pytest.raises(OutcomeUnknown, match="timeout"):
        store.put("key", b"1", "create")


def test_the_error_for_a_missing_bucket_says_how_to_create_it(s3: EmbeddedS3) -> None:
    with pytest.raises(BucketMissing, match=r"aws s3 mb s3://absent"):
        S3Store("absent", client=s3.client()).check()


def test_missing_credentials_are_explained(s3: EmbeddedS3) -> None:
    # In a separate process, so that no credentials of the machine are found.
    code = (
        "import sys; from dagster_checkpoints.errors import StorageAccessDenied\n"
        "from dagster_checkpoints.storage import open_store\n"
        "try: open_store(sys.argv[1], endpoint_url=sys.argv[2]).check()\n"
        "except StorageAccessDenied as error: print(error)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"AWS_EC2_METADATA_DISABLED": "true", "HOME": "/nonexistent"}
    result = subprocess.run(
        [sys.executable, "-c", code, s3.url, s3.endpoint_url],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "AWS_ACCESS_KEY_ID" in result.stdout, result.stderr
    assert s3.url in result.stdout


def test_the_server_is_reached_from_another_process(s3: EmbeddedS3) -> None:
    code = "import sys; from dagster_checkpoints.storage import open_store\nopen_store(sys.argv[1]).put('from/afar', b'x')"
    subprocess.run([sys.executable, "-c", code, s3.url], env={**os.environ, **s3.environment}, check=True, timeout=60)
    assert S3Store(s3.bucket, client=s3.client()).get("from/afar") == b"x"


class _Forgetful:
    """A client of a server that ignores conditions."""

    def __init__(self, client: Any, ignored: str) -> None:
        self._client, self._ignored = client, ignored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def put_object(self, **arguments: Any) -> Any:
        arguments.pop(self._ignored, None)
        return self._client.put_object(**arguments)


@pytest.mark.parametrize("ignored", ["IfNoneMatch", "IfMatch"])
def test_a_server_that_ignores_conditions_is_found_out_at_start(s3: EmbeddedS3, ignored: str) -> None:
    store = S3Store(s3.bucket, "forgetful", client=_Forgetful(s3.client(), ignored))
    with pytest.raises(ConditionalWritesUnsupported, match=f"{store.url}.*{ignored[:2]}-{ignored[2:6]}"):
        store.check()
    assert list(store.list()) == []


def test_credentials_that_may_not_delete_are_found_out_at_start(s3: EmbeddedS3, s3_store: S3Store) -> None:
    with s3.fault("answer", method="POST", status=403, code="AccessDenied"):
        with pytest.raises(StorageAccessDenied, match=r"cannot delete .*s3:DeleteObject"):
            s3_store.check()
        with s3.fault("answer", method="PUT", status=403, code="AccessDenied"), pytest.raises(StorageAccessDenied, match="write"):
            s3_store.check()


class _Refusing(_Forgetful):
    """A client of a server that answers for each object of a deletion, as AWS does."""

    def delete_objects(self, Delete: Any, **_: Any) -> Any:
        return {"Errors": [{**each, "Code": self._ignored, "Message": "No"} for each in Delete["Objects"]]}


@pytest.mark.parametrize(("code", "error"), [("AccessDenied", StorageAccessDenied), ("InternalError", StorageUnavailable)])
def test_what_could_not_be_deleted_is_named(s3: EmbeddedS3, code: str, error: type[Exception]) -> None:
    store = S3Store(s3.bucket, "kept", client=_Refusing(s3.client(), code))
    with pytest.raises(StorageUnavailable, match=f"cannot delete 1 of 1 objects below {store.url}.*{code}: No") as raised:
        store.check()
    assert type(raised.value) is error and ("s3:DeleteObject" in str(raised.value)) == (code == "AccessDenied")


def test_the_server_forgets_what_is_deleted(s3: EmbeddedS3, s3_store: S3Store) -> None:
    from moto.s3.models import FakeKey

    for number in range(20):
        s3_store.put("key", b"%d" % number)
    s3_store.delete(["key"])
    tracked: Any = FakeKey
    assert tracked.instances_tracked == []
