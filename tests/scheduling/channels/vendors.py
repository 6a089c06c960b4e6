"""Robots of WeCom, DingTalk and Feishu as they behave: HTTP 200 to everything, the verdict in the body."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.scheduling.channels.http_receivers import Request, reply

Verdict = Mapping[str, Any]


@dataclass
class Vendor:
    """Checks size, signature and quota in this order, as far as the vendor does."""

    secret: str = ""
    quota: int = 20
    posted: list[Any] = field(default_factory=list)

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        verdict = self.refuse(request, request.json) or self.accept(request.json)
        writer.write(reply(200, json.dumps(verdict).encode(), {"content-type": "application/json"}))

    def accept(self, document: Any) -> Verdict:
        self.posted.append(document)
        return self.ok

    def refuse(self, request: Request, document: Any) -> Verdict | None:
        raise NotImplementedError

    ok: Verdict = field(default_factory=dict)


@dataclass
class WeComServer(Vendor):
    ok: Verdict = field(default_factory=lambda: {"errcode": 0, "errmsg": "ok"})

    def refuse(self, request: Request, document: Any) -> Verdict | None:
        kind = document["msgtype"]
        content = document[kind]["content"]
        if parse_qs(urlsplit(request.target).query).get("key") != ["k"]:
            return {"errcode": 93000, "errmsg": "invalid webhook url, hint: [1], from ip: 1.2.3.4"}
        if not content:
            return {"errcode": 44004, "errmsg": "empty content"}
        if len(content.encode()) > {"text": 2048, "markdown": 4096}[kind]:
            return {"errcode": 40058, "errmsg": f"{kind}.content exceed max length"}
        if len(self.posted) >= self.quota:
            return {"errcode": 45009, "errmsg": "api freq out of limit"}
        return None


@dataclass
class DingTalkServer(Vendor):
    ok: Verdict = field(default_factory=lambda: {"errcode": 0, "errmsg": "ok"})

    def refuse(self, request: Request, document: Any) -> Verdict | None:
        query = parse_qs(urlsplit(request.target).query)
        if query.get("access_token") != ["t"]:
            return {"errcode": 300005, "errmsg": "token is not exist"}
        if self.secret and not self._is_signed(query):
            return {"errcode": 310000, "errmsg": "sign not match, more: [https://ding-doc.dingtalk.com]"}
        if len(request.body) > 20_000:
            return {"errcode": 460101, "errmsg": "message too long, exceed 20000 bytes"}
        if len(self.posted) >= self.quota:
            return {"errcode": 130101, "errmsg": "send too fast, exceed 20 times per minute"}
        return None

    def _is_signed(self, query: dict[str, list[str]]) -> bool:
        timestamp = query.get("timestamp", ["0"])[0]
        digest = hmac.new(self.secret.encode(), f"{timestamp}\n{self.secret}".encode(), hashlib.sha256).digest()
        fresh = abs(time() * 1000 - int(timestamp)) < 3_600_000
        return fresh and query.get("sign") == [base64.b64encode(digest).decode()]


@dataclass
class FeishuServer(Vendor):
    quota: int = 100
    ok: Verdict = field(
        default_factory=lambda: {"StatusCode": 0, "StatusMessage": "success", "code": 0, "msg": "success"}
    )

    def refuse(self, request: Request, document: Any) -> Verdict | None:
        if not urlsplit(request.target).path.endswith("/hook/h"):
            return {"code": 19001, "msg": "param invalid: incoming webhook access token invalid", "data": {}}
        if len(request.body) > 20 * 1024:
            return {"code": 9499, "msg": "Bad Request", "data": {}}
        if self.secret and not self._is_signed(document):
            return {"code": 19021, "msg": "sign match fail or timestamp is not within one hour from current time"}
        if len(self.posted) >= self.quota:
            return {"StatusCode": 0, "code": 11232, "msg": "frequency limited psm[lark.oapi.app_platform_runtime]"}
        return None

    def _is_signed(self, document: Any) -> bool:
        timestamp = document.get("timestamp", "0")
        key = f"{timestamp}\n{self.secret}".encode()
        sign = base64.b64encode(hmac.new(key, digestmod=hashlib.sha256).digest()).decode()
        return abs(time() - int(timestamp)) < 3600 and document.get("sign") == sign
