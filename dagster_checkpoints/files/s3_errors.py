"""The translation of boto3's exceptions into the errors of storage.

Must not call S3. For each failure the module answers two questions: which storage error is it, and, for a write, may
it have landed nevertheless? After a closed connection or a 500 that is unknown; after a refused connection or a 403 the
answer is "no".
"""

from __future__ import annotations

import threading
from typing import Any

import botocore.exceptions as aws
from boto3.exceptions import Boto3Error

from dagster_checkpoints.errors import (
    BucketMissing,
    ConditionalWritesUnsupported,
    NotFound,
    OutcomeUnknown,
    StorageAccessDenied,
    StorageError,
    StorageUnavailable,
)

NEVER_SENT = (
    aws.EndpointConnectionError,
    aws.ConnectTimeoutError,
    aws.ProxyConnectionError,
    aws.SSLError,
    aws.NoCredentialsError,
    aws.PartialCredentialsError,
    aws.CredentialRetrievalError,
    aws.TokenRetrievalError,
    aws.ParamValidationError,
)
_NO_CREDENTIALS = (
    aws.NoCredentialsError,
    aws.PartialCredentialsError,
    aws.CredentialRetrievalError,
    aws.TokenRetrievalError,
    aws.ProfileNotFound,
)
DENIED = frozenset({"AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"})
_ADVICE = {
    "RequestTimeTooSkewed": "The clock of this machine is wrong: set it (chrony, systemd-timesyncd)",
    "InvalidObjectState": (
        "The object is archived (Glacier, Deep Archive): restore it (`aws s3api restore-object`), and exclude the files from the "
        "lifecycle rule that archives them"
    ),
}
"""Errors with status 403 of which credentials are not the cause."""
_AMBIGUOUS_STATUS = frozenset({500, 502, 504})


class AttemptWatch:
    """Records, per thread, whether any attempt of the current request may have been carried out.

    boto3 retries by itself and reports only the last attempt's failure. Without this record, a write that landed in an
    attempt whose answer was lost, followed by a refused connection, would look as if it had never been sent.
    """

    def __init__(self, client: Any, operation: str) -> None:
        self._local = threading.local()
        client.meta.events.register(f"response-received.s3.{operation}", self._record_attempt)

    def start(self) -> None:
        """Delete the record; call before each request."""
        self._local.ambiguous = False

    @property
    def ambiguous(self) -> bool:
        """True if an attempt since :meth:`start` may have been carried out although no success was reported."""
        return bool(getattr(self._local, "ambiguous", False))

    def _record_attempt(self, exception: Exception | None = None, response_dict: Any = None, **_: Any) -> None:
        if exception is not None:
            self._local.ambiguous = self.ambiguous or not isinstance(exception, NEVER_SENT)
        elif response_dict is not None and response_dict.get("status_code") in _AMBIGUOUS_STATUS:
            self._local.ambiguous = True


def error_code(error: BaseException) -> tuple[int, str]:
    """HTTP status and S3 error code of a ``ClientError``; (0, "") of any other exception."""
    if not isinstance(error, aws.ClientError):
        return 0, ""
    response: Any = error.response
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)), str(response.get("Error", {}).get("Code", ""))


def may_have_landed(error: BaseException) -> bool:
    """Whether a write may have been carried out although it failed with this error."""
    if isinstance(error, aws.ClientError):
        return error_code(error)[0] in _AMBIGUOUS_STATUS
    return not isinstance(error, NEVER_SENT)


def may_not_copy(error: Exception) -> bool:
    """Whether the server refuses to copy between the two stores, so that the bytes have to be sent instead."""
    status, code = error_code(error)
    return code in DENIED or code == "NotImplemented" or status in (401, 403, 405, 501)


def translate(error: Exception, *, verb: str, where: str, bucket: str, endpoint: str, unknown: bool) -> StorageError:
    """The storage error for an exception of boto3.

    Args:
        error: the exception that boto3 raised.
        verb: the operation, for the text, for example "write".
        where: URL of the object.
        bucket: the bucket's name, for the text of a missing bucket.
        endpoint: the server's address, for the text.
        unknown: whether the operation was a write that may have landed.
    """
    if isinstance(error, Boto3Error) and isinstance(error.__context__, Exception):
        error = error.__context__
    status, code = error_code(error)
    at = f"{where} (endpoint {endpoint})"
    if unknown:
        return OutcomeUnknown(
            f"sent a request to {verb} {at}, but received no usable answer: {error}. It is unknown whether the request was "
            "carried out, so no file is deleted"
        )
    if isinstance(error, _NO_CREDENTIALS):
        return StorageAccessDenied(
            f"cannot {verb} {at}: {error}. Expected credentials that boto3 finds: AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, a profile (AWS_PROFILE), or a role of the machine"
        )
    if code == "NoSuchBucket":
        return BucketMissing(
            f"cannot {verb} {at}: there is no bucket {bucket!r}. Create it (`aws s3 mb s3://{bucket}`, with "
            "--endpoint-url for a server other than AWS) or correct the URL"
        )
    if code in _ADVICE:
        return StorageUnavailable(f"cannot {verb} {at}: {error}. {_ADVICE[code]}")
    if code in DENIED or status in (401, 403):
        return StorageAccessDenied(
            f"cannot {verb} {at}: {error}. Expected credentials that allow s3:GetObject, s3:PutObject, "
            f"s3:DeleteObject and s3:ListBucket on bucket {bucket!r}"
        )
    if status == 404:
        return NotFound(f"expected an object at {at}, found none")
    if status == 501 or code == "NotImplemented":
        return ConditionalWritesUnsupported(f"cannot {verb} {at}: the server does not implement this operation: {error}")
    if status in (301, 307, 400) and code in ("PermanentRedirect", "AuthorizationHeaderMalformed", "301"):
        return StorageUnavailable(f"cannot {verb} {at}: {error}. The bucket is in another region: set the region")
    return StorageUnavailable(
        f"cannot {verb} {at}: {type(error).__name__}: {error}. Check that the endpoint is right and reachable"
    )
