"""Run the sign-in at an OpenID provider: authorization code flow with PKCE, state and nonce.

The provider's document and keys are read at each sign-in, so that keys rotate without a restart. All requests use the
guarded transport of the channels: https, public addresses or `AFTERTOUCH_ALLOWED_PRIVATE_HOSTS`, no redirects,
`AFTERTOUCH_HTTP_PROXY`.

A subject belongs to one user, who gets the roles of its groups. A local user is linked by an administrator, or by a
verified e-mail address where `AFTERTOUCH_OIDC_LINK_BY_EMAIL` allows it; in no other way does a sign-in reach an
existing user.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from base64 import b64encode
from collections.abc import Awaitable, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import quote, urlencode

import structlog
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from authlib.oidc.core import CodeIDToken
from django.conf import settings
from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.db.models import Q
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from scheduling.channels.base import DestinationRefused, NoAnswer, NotSent
from scheduling.channels.http_client import close_shared_transport, shared_transport
from scheduling.channels.ssrf import PrivateHosts, check_url
from scheduling.identity.invitations import assign_roles
from scheduling.models import IdentityLink

log = structlog.get_logger(__name__)

USERNAME_LENGTH = 150


class SubjectRefused(Exception):
    """The provider's user may not sign in. The first argument is the reason: `no_role`, `taken`, `disabled`."""


def find_or_create_user(claims: Mapping[str, Any]) -> User:
    """Return the user of checked claims. Concurrent sign-ins of a new subject create one user.

    Raises:
        SubjectRefused: no role, a local user has the name, or the user is disabled.
    """
    try:
        return _find_user(claims)
    except (IntegrityError, SubjectRefused):  # another request may have linked the subject since its link was read
        return _find_user(claims)


@transaction.atomic
def _find_user(claims: Mapping[str, Any]) -> User:
    given = claims.get(settings.AFTERTOUCH_OIDC_GROUP_CLAIM) or []
    # A single group may be a text.
    groups = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    wanted = settings.AFTERTOUCH_OIDC_GROUP_MAP
    roles = [wanted[group] for group in groups if isinstance(group, str) and group in wanted]
    issuer, subject = settings.AFTERTOUCH_OIDC_ISSUER, str(claims["sub"])
    link = IdentityLink.objects.select_related("user").filter(issuer=issuer, subject=subject).first()
    user = link.user if link else _link_local_user(claims) or _create_user(claims, roles)
    if not user.is_active:
        raise SubjectRefused("disabled")
    if settings.AFTERTOUCH_OIDC_GROUP_MAP:
        if not roles:
            raise SubjectRefused("no_role")
        assign_roles(user, roles)
    if not link:
        IdentityLink.objects.create(user=user, issuer=issuer, subject=subject)
        log.info("identity_linked", user=user.get_username())
    return user


def _read_verified_email(claims: Mapping[str, Any]) -> str:
    email = claims.get("email")
    return email if isinstance(email, str) and claims.get("email_verified") is True else ""


def _link_local_user(claims: Mapping[str, Any]) -> User | None:
    """Return the only local user with the verified e-mail address and without a link, if the setting allows it."""
    email = _read_verified_email(claims)
    if not (email and settings.AFTERTOUCH_OIDC_LINK_BY_EMAIL):
        return None
    found = list(User.objects.select_for_update().filter(email__iexact=email)[:2])
    if len(found) != 1 or found[0].identity_links.filter(issuer=settings.AFTERTOUCH_OIDC_ISSUER).exists():
        return None  # another subject is this user: the address was given to another person
    return found[0]


def _create_user(claims: Mapping[str, Any], roles: list[str]) -> User:
    if not roles:
        raise SubjectRefused("no_role")
    email = _read_verified_email(claims)
    username = (email or f"oidc-{claims['sub']}")[:USERNAME_LENGTH]
    taken = Q(username__iexact=username) | (Q(email__iexact=email) if email else Q())
    if User.objects.filter(taken).exists():
        raise SubjectRefused("taken")
    names = {"first_name": claims.get("given_name"), "last_name": claims.get("family_name")}
    texts = {name: value[:150] for name, value in names.items() if isinstance(value, str)}
    return User.objects.create_user(username, email, password=None, is_staff=True, **texts)


TIMEOUT = timedelta(seconds=10)  #: of each request to the provider
FLOW_AGE = 600  #: seconds that a user may stay at the provider
LEEWAY = 60  #: seconds between the clocks of the provider and this machine
SCOPE = "openid email profile"
#: Signatures by a key that only the provider has. `none` and keyed hashes are refused.
ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri")


class ProviderFailed(Exception):
    """The provider did not answer, answered with an error, or sent a token that is not valid."""


def begin_flow(redirect_uri: str, at: float) -> tuple[str, dict[str, Any]]:
    """Return the address at the provider, and the flow that the browser's session keeps.

    Raises:
        ProviderFailed: the provider's document cannot be read.
    """
    provider = asyncio.run(_ask_provider(_read_provider()))
    flow = {
        "state": secrets.token_urlsafe(32), "nonce": secrets.token_urlsafe(32),
        "verifier": secrets.token_urlsafe(48), "redirect_uri": redirect_uri, "at": at,
    }  # fmt: skip
    url = prepare_grant_uri(
        provider["authorization_endpoint"], settings.AFTERTOUCH_OIDC_CLIENT_ID, "code",
        redirect_uri=redirect_uri, scope=SCOPE, state=flow["state"], nonce=flow["nonce"],
        code_challenge=create_s256_code_challenge(flow["verifier"]), code_challenge_method="S256",
    )  # fmt: skip
    return str(url), flow


def finish_flow(flow: Mapping[str, Any], answer: Mapping[str, str], at: float) -> dict[str, Any]:
    """Exchange the code of the provider's answer. Return the claims about the user.

    Raises:
        ProviderFailed: the answer belongs to another flow, or a check of the token fails.
    """
    if at - flow["at"] > FLOW_AGE:
        raise ProviderFailed("the sign-in took longer than 10 minutes")
    if not is_flow_answer(flow, answer):
        raise ProviderFailed("state: belongs to another sign-in")
    if "error" in answer or not answer.get("code"):
        raise ProviderFailed(f"the provider answered {answer.get('error', 'without a code')[:100]}")
    if answer.get("iss", settings.AFTERTOUCH_OIDC_ISSUER) != settings.AFTERTOUCH_OIDC_ISSUER:  # RFC 9207
        raise ProviderFailed("iss: the answer comes from another provider")
    return asyncio.run(_ask_provider(_exchange_code(flow, answer["code"])))


def is_flow_answer(flow: Mapping[str, Any], answer: Mapping[str, str]) -> bool:
    """Return whether an answer of the provider has the state of the flow."""
    return secrets.compare_digest(answer.get("state", "").encode(), str(flow["state"]).encode())


async def _ask_provider(answer: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    try:
        return await answer
    except (DestinationRefused, NotSent, NoAnswer) as error:
        raise ProviderFailed(f"no answer: {error}") from error
    finally:
        await close_shared_transport()


async def _read_provider() -> dict[str, Any]:
    """Read the provider's document (OpenID Connect Discovery 1.0) and check its addresses."""
    issuer = settings.AFTERTOUCH_OIDC_ISSUER
    found = await _fetch_json("GET", issuer.rstrip("/") + "/.well-known/openid-configuration")
    if found.get("issuer") != issuer:
        raise ProviderFailed("issuer: the document names another one than AFTERTOUCH_OIDC_ISSUER")
    if not all(isinstance(found.get(name) or "", str) for name in (*ENDPOINTS, "userinfo_endpoint")):
        raise ProviderFailed("the document holds an address that is no text")
    for name in ENDPOINTS:
        check_url(found.get(name) or "", PrivateHosts.from_settings())
    return found


async def _exchange_code(flow: Mapping[str, Any], code: str) -> dict[str, Any]:
    provider = await _read_provider()
    fields = {
        "grant_type": "authorization_code", "code": code, "redirect_uri": flow["redirect_uri"],
        "code_verifier": flow["verifier"],
    }  # fmt: skip
    headers = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
    client, secret = settings.AFTERTOUCH_OIDC_CLIENT_ID, settings.AFTERTOUCH_OIDC_CLIENT_SECRET
    methods = provider.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
    if "client_secret_basic" in methods:
        pair = f"{quote(client, safe='')}:{quote(secret, safe='')}"
        headers["Authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
    else:
        fields |= {"client_id": client, "client_secret": secret}
    tokens = await _fetch_json("POST", provider["token_endpoint"], urlencode(fields).encode(), headers)
    keys = await _fetch_json("GET", provider["jwks_uri"])
    claims = _check_token(tokens, keys, flow["nonce"])
    if userinfo := provider.get("userinfo_endpoint"):
        bearer = {"Authorization": f"Bearer {tokens.get('access_token', '')}", "Accept": "application/json"}
        more = await _fetch_json("GET", userinfo, headers=bearer)
        if more.get("sub") != claims["sub"]:
            raise ProviderFailed("sub: the user information is about another user")
        if "email" in claims or "email_verified" in claims:  # address and flag come from one document
            more = {name: value for name, value in more.items() if name not in ("email", "email_verified")}
        claims = {**more, **claims}
    return claims


def _check_token(tokens: Mapping[str, Any], keys: Mapping[str, Any], nonce: str) -> dict[str, Any]:
    """Check signature, issuer, audience, times and nonce of the ID token. Return its claims."""
    options = {
        "iss": {"essential": True, "value": settings.AFTERTOUCH_OIDC_ISSUER},
        "aud": {"essential": True, "value": settings.AFTERTOUCH_OIDC_CLIENT_ID},
    }
    params = {
        "nonce": nonce, "client_id": settings.AFTERTOUCH_OIDC_CLIENT_ID, "access_token": tokens.get("access_token"),
    }  # fmt: skip
    try:
        usable = [key for key in keys["keys"] if key.get("kty") in ("RSA", "EC", "OKP") and key.get("use") != "enc"]
        token = jwt.decode(str(tokens["id_token"]), KeySet.import_key_set({"keys": usable}), algorithms=ALGORITHMS)
        claims = CodeIDToken(token.claims, token.header, options, params)
        claims.validate(leeway=LEEWAY)
    except (JoseError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProviderFailed(f"id_token: {type(error).__name__} {error}"[:200]) from error
    return dict(claims)


async def _fetch_json(
    method: str, url: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> dict[str, Any]:
    answer = await shared_transport().request(
        method, url, body, headers or {}, timeout=TIMEOUT, repeatable=method == "GET"
    )
    place = url.partition("?")[0]
    if answer.status != 200 or not answer.complete:
        raise ProviderFailed(f"{place} answered {answer.status}")
    try:
        found = json.loads(answer.body)
    except ValueError:
        raise ProviderFailed(f"{place} answered no JSON") from None
    if not isinstance(found, dict):
        raise ProviderFailed(f"{place} answered no JSON object")
    return found
