"""The checksums that S3 stores beside an object, if its writer asked for them.

Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any


def sha256_in_answer(answer: Mapping[str, Any]) -> str | None:
    """The sha256 of an object's bytes, hexadecimal, in the answer to a HeadObject with ``ChecksumMode``; None if it has none.

    An object that was written in parts has a checksum of the parts' checksums instead, which ends with their number.
    """
    checksum = str(answer.get("ChecksumSHA256") or "")
    if not checksum or "-" in checksum or answer.get("ChecksumType") == "COMPOSITE":
        return None
    return base64.b64decode(checksum).hex()
