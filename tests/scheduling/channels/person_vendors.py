"""APIs of vendors that reach one person, as their documentation describes them: HTTP 200, codes, tokens that expire."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

from tests.scheduling.channels.http_receivers import Request, reply

Verdict = Mapping[str, Any]


@dataclass
class TokenVendor:
    """Gives a token, and accepts only the current one."""

    ok: Verdict = field(default_factory=lambda: {"errcode": 0, "errmsg": "ok", "msgid": "m-1"})
    token_paths: tuple[str, ...] = ("/cgi-bin/gettoken", "/cgi-bin/stable_token")
    expired_code: int = 42001
    token: str = ""
    fetches: list[Request] = field(default_factory=list)
    calls: list[Request] = field(default_factory=list)
    posted: list[Any] = field(default_factory=list)
    refuse_token: Verdict | None = None
    fixed_token: str = ""  #: always gives this token, and accepts none

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        path = urlsplit(request.target).path
        verdict = await self.give_token(request) if path in self.token_paths else self.answer(request)
        writer.write(reply(200, json.dumps(verdict).encode(), {"content-type": "application/json"}))

    async def give_token(self, request: Request) -> Verdict:
        self.fetches.append(request)
        if self.refuse_token:
            return self.refuse_token
        self.token = f"token-{len(self.fetches)}-of-the-vendor"
        given = self.fixed_token or self.token
        return {"errcode": 0, "errmsg": "ok", "access_token": given, "expires_in": 7200}

    def answer(self, request: Request) -> Verdict:
        self.calls.append(request)
        if parse_qs(urlsplit(request.target).query).get("access_token") != [self.token] or self.fixed_token:
            return {"errcode": self.expired_code, "errmsg": "access_token expired"}
        self.posted.append(request.json)
        return self.ok

    def expire(self) -> None:
        """End the token early, as vendors may."""
        self.token = "another"


@dataclass
class AliyunServer:
    """Checks the signature of a request by its own reading of the headers that it names."""

    secret: str
    verdict: Verdict = field(default_factory=lambda: {"Code": "OK", "Message": "OK", "BizId": "b", "RequestId": "r"})
    posted: list[dict[str, str]] = field(default_factory=list)

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        given = request.headers["authorization"]
        fields = dict(part.split("=", 1) for part in given.removeprefix("ACS3-HMAC-SHA256 ").split(","))
        names = fields["SignedHeaders"].split(";")
        query = urlsplit(request.target).query
        head = "".join(f"{name}:{request.headers[name]}\n" for name in names)
        canonical = f"POST\n/\n{query}\n{head}\n{';'.join(names)}\n{hashlib.sha256(request.body).hexdigest()}"
        signed = f"ACS3-HMAC-SHA256\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        wanted = hmac.new(self.secret.encode(), signed.encode(), hashlib.sha256).hexdigest()
        sent_at = datetime.strptime(request.headers["x-acs-date"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        if fields["Signature"] != wanted or abs((datetime.now(UTC) - sent_at).total_seconds()) > 900:
            document: Any = {"Code": "SignatureDoesNotMatch", "Message": "Specified signature is not matched"}
            writer.write(reply(400, json.dumps(document).encode()))
            return
        if self.verdict["Code"] == "OK":
            self.posted.append(dict(parse_qsl(query)))
        writer.write(reply(200, json.dumps(self.verdict).encode()))


@dataclass
class TencentServer:
    """Checks the signature of a request by its own reading of the headers that it names."""

    secret: str
    verdict: Verdict = field(
        default_factory=lambda: {"Response": {"SendStatusSet": [{"Code": "Ok", "Message": "send success"}]}}
    )
    posted: list[Any] = field(default_factory=list)

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        given = request.headers["authorization"]
        fields = dict(part.split("=", 1) for part in given.removeprefix("TC3-HMAC-SHA256 ").split(", "))
        _, day, service, end = fields["Credential"].split("/")
        names = fields["SignedHeaders"].split(";")
        head = "".join(f"{name}:{request.headers[name].lower()}\n" for name in names)
        canonical = f"POST\n/\n\n{head}\n{';'.join(names)}\n{hashlib.sha256(request.body).hexdigest()}"
        stamp = request.headers["x-tc-timestamp"]
        signed = f"TC3-HMAC-SHA256\n{stamp}\n{day}/{service}/{end}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        key = f"TC3{self.secret}".encode()
        for part in (day, service, end, signed):
            key = hmac.new(key, part.encode(), hashlib.sha256).digest()
        verdict = self.verdict
        if fields["Signature"] != key.hex():
            verdict = {
                "Response": {"Error": {"Code": "AuthFailure.SignatureFailure", "Message": "check your signature"}}
            }
        elif "Error" not in verdict["Response"] and verdict["Response"]["SendStatusSet"][0]["Code"] == "Ok":
            self.posted.append(request.json)
        writer.write(reply(200, json.dumps(verdict).encode()))
