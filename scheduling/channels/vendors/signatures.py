"""Sign requests to cloud APIs: ACS3-HMAC-SHA256 of Alibaba Cloud and TC3-HMAC-SHA256 of Tencent Cloud.

Sources: help.aliyun.com/zh/sdk/product-overview/v3-request-structure-and-signature and
cloud.tencent.com/document/api/382/52072.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from urllib.parse import quote

ALIYUN, TENCENT = "ACS3-HMAC-SHA256", "TC3-HMAC-SHA256"


def canonical_query(parameters: Mapping[str, str]) -> str:
    """Return the sorted query in RFC 3986 encoding."""
    return "&".join(f"{quote(name, safe='~')}={quote(value, safe='~')}" for name, value in sorted(parameters.items()))


def sign_for_aliyun(query: str, headers: Mapping[str, str], key_id: str, secret: str) -> str:
    """Return the `Authorization` header of a POST request to `/` without a body.

    `headers` have lower-case names; they are host, content-type and x-acs-*.
    """
    canonical, names = _canonical_request(query, headers, b"")
    signature = hmac.digest(secret.encode(), f"{ALIYUN}\n{_digest(canonical)}".encode(), "sha256").hex()
    return f"{ALIYUN} Credential={key_id},SignedHeaders={names},Signature={signature}"


def sign_for_tencent(
    service: str, headers: Mapping[str, str], body: bytes, now: datetime, key_id: str, secret: str
) -> str:
    """Return the `Authorization` header of a POST request to `/`, signed for the UTC day of `now`."""
    canonical, names = _canonical_request("", headers, body)
    day = now.astimezone(UTC).strftime("%Y-%m-%d")
    scope = f"{day}/{service}/tc3_request"
    signed = f"{TENCENT}\n{int(now.timestamp())}\n{scope}\n{_digest(canonical)}"
    key = f"TC3{secret}".encode()
    for part in (day, service, "tc3_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, signed.encode(), "sha256").hex()
    return f"{TENCENT} Credential={key_id}/{scope}, SignedHeaders={names}, Signature={signature}"


def _canonical_request(query: str, headers: Mapping[str, str], body: bytes) -> tuple[str, str]:
    lines = "".join(f"{name}:{headers[name].strip()}\n" for name in sorted(headers))
    names = ";".join(sorted(headers))
    return f"POST\n/\n{query}\n{lines}\n{names}\n{sha256(body).hexdigest()}", names


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()
