"""Sign-in at a provider: a real one from a package, and tokens that must be refused."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.parse import parse_qs, quote, urlencode, urlsplit
from urllib.request import HTTPRedirectHandler, build_opener

import pytest
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse
from joserfc import jwt
from joserfc.jwk import KeySet, OctKey, RSAKey
from pytest_django import Settings

from scheduling.identity import openid
from scheduling.identity.invitations import find_role
from scheduling.identity.openid import find_or_create_user
from scheduling.models import IdentityLink
from tests.rpa_tasks.browsers.proxies import PASSWORD, USER, ProxyProcess
from tests.scheduling.identity.conftest import MockProvider
from tests.support.second_connection import Race
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db

CHECKED = {"email": "bob@example.com", "email_verified": True, "groups": ["ops", "others"]}


class KeepRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def start(client: Client, **query: str) -> str:
    client.cookies["django_language"] = "en"
    return str(client.get(reverse("admin:login_provider"), query).url)


def consent(url: str, subject: str) -> str:
    """What the browser is led to after the user's consent at the provider."""
    try:
        build_opener(KeepRedirect).open(url, urlencode({"sub": subject}).encode(), timeout=60)
    except HTTPError as answer:
        return str(answer.headers["Location"])
    raise AssertionError("the provider did not lead back")


def come_back(client: Client, location: str) -> Any:
    parts = urlsplit(location)
    return client.get(f"{parts.path}?{parts.query}", follow=True)


def sign_in(subject: str, client: Client | None = None) -> Any:
    client = client or Client()
    return come_back(client, consent(start(client), subject))


def user_of(answer: Any) -> str:
    return str(answer.context["request"].user.get_username())


def test_provider_sign_in_creates_a_user_with_the_role(provider: MockProvider) -> None:
    provider.store_user("bob-1", **CHECKED)
    client = Client()
    url = start(client, next="/admin/account/")
    sent, flow = parse_qs(urlsplit(url).query), client.session["provider_flow"]
    assert sent["code_challenge"] == [create_s256_code_challenge(flow["verifier"])]
    assert sent["code_challenge_method"] == ["S256"]
    assert sent["state"] == [flow["state"]]
    answer = come_back(client, consent(url, "bob-1"))
    assert answer.redirect_chain[-1][0] == "/admin/account/"
    bob = User.objects.get(username="bob@example.com")
    assert (find_role(bob), bob.has_usable_password()) == ("operator", False)
    provider.store_user("bob-1", **{**CHECKED, "groups": ["chiefs"], "email": "other@example.com"})
    assert user_of(sign_in("bob-1")) == "bob@example.com", "the subject names the user, not the address"
    assert User.objects.get(pk=bob.pk).is_superuser


def test_provider_group_lost_ends_access(provider: MockProvider) -> None:
    provider.store_user("bob-1", **CHECKED)
    sign_in("bob-1")
    provider.store_user("bob-1", **{**CHECKED, "groups": []})
    assert "no group" in sign_in("bob-1").content.decode()


def test_provider_user_does_not_take_over_a_local_one(provider: MockProvider, settings: Settings) -> None:
    bob = User.objects.create_user("bob", "bob@example.com", "right", is_staff=True)
    provider.store_user("bob-1", **CHECKED)
    page = sign_in("bob-1")
    assert user_of(page) == ""
    assert "bob-1" in page.content.decode()
    provider.store_user("bob-2", **{**CHECKED, "email_verified": False})
    settings.AFTERTOUCH_OIDC_LINK_BY_EMAIL = True
    assert user_of(sign_in("bob-2")) == "oidc-bob-2", "an address that is not verified names no user"
    assert user_of(sign_in("bob-1")) == "bob"
    assert IdentityLink.objects.get(subject="bob-1").user == bob
    provider.store_user("eve-1", **CHECKED)  # the address was given to another person
    assert user_of(sign_in("eve-1")) == ""
    assert IdentityLink.objects.filter(user=bob).count() == 1


def test_provider_user_linked_by_an_administrator_signs_in(provider: MockProvider, settings: Settings) -> None:
    settings.AFTERTOUCH_OIDC_GROUP_MAP = {}
    bob = User.objects.create_user("bob", "bob@example.com", "right", is_staff=True)
    provider.store_user("bob-1", **CHECKED)
    assert user_of(sign_in("bob-1")) == ""
    IdentityLink.objects.create(user=bob, issuer=provider.url, subject="bob-1")
    assert user_of(sign_in("bob-1")) == "bob"
    User.objects.update(is_active=False)
    assert user_of(sign_in("bob-1")) == ""


def test_provider_answer_is_bound_to_the_browser_and_used_once(provider: MockProvider) -> None:
    provider.store_user("bob-1", **CHECKED)
    client, stranger = Client(), Client()
    location = consent(start(client), "bob-1")
    assert user_of(come_back(stranger, location)) == "", "no flow"
    start(stranger)
    assert user_of(come_back(stranger, location)) == "", "another state"
    assert user_of(come_back(client, location)) == "bob@example.com"
    client.logout()
    assert user_of(come_back(client, location)) == ""


def test_provider_answer_of_an_older_tab_leaves_the_newer_sign_in(provider: MockProvider) -> None:
    provider.store_user("bob-1", **CHECKED)
    client = Client()
    older, newer = (consent(start(client), "bob-1") for _ in range(2))
    assert user_of(come_back(client, older)) == ""
    assert user_of(come_back(client, newer)) == "bob@example.com"


@each_row("name, value", [("nonce", "other"), ("at", 1_700_000_000.0), ("state", "other")])
def test_provider_answer_of_another_flow_is_refused(provider: MockProvider, name: str, value: Any) -> None:
    provider.store_user("bob-1", **CHECKED)
    client = Client()
    location = consent(start(client), "bob-1")
    session = client.session
    session["provider_flow"] = {**session["provider_flow"], name: value}
    session.save()
    assert user_of(come_back(client, location)) == ""
    assert not User.objects.exists()


def test_provider_on_a_private_address_is_refused(provider: MockProvider, settings: Settings) -> None:
    settings.AFTERTOUCH_ALLOWED_PRIVATE_HOSTS = []
    assert start(Client()) == reverse("admin:login")
    settings.AFTERTOUCH_ALLOWED_PRIVATE_HOSTS = ["127.0.0.1"]
    settings.AFTERTOUCH_OIDC_ISSUER = f"{provider.url}/"  # its document names another issuer
    assert start(Client()) == reverse("admin:login")


def test_provider_is_reached_through_the_proxy(provider: MockProvider, settings: Settings) -> None:
    provider.store_user("bob-1", **CHECKED)
    proxy = ProxyProcess("http")
    try:
        settings.AFTERTOUCH_HTTP_PROXY = proxy.url.replace("://", f"://{USER}:{quote(PASSWORD)}@")
        assert user_of(sign_in("bob-1")) == "bob@example.com"
    finally:
        targets = proxy.read_targets()
    # The document twice, the token, the keys and the user information.
    assert targets == [urlsplit(provider.url).netloc] * 5


@pytest.mark.django_db(transaction=True)
def test_provider_first_sign_in_twice_at_once_creates_one_user(race: Race, provider: MockProvider) -> None:
    found = race(4, lambda _at: find_or_create_user({"sub": "bob-1", **CHECKED}).pk)
    assert len(set(found)) == 1
    assert IdentityLink.objects.count() == 1


KEY, OTHER = RSAKey.generate_key(2048, {"kid": "a"}), RSAKey.generate_key(2048, {"kid": "a"})


def make_token(key: Any = KEY, alg: str = "RS256", **claims: Any) -> dict[str, str]:
    at = int(time.time())
    whole = {"iss": "https://id.example.com", "aud": "aftertouch", "sub": "s", "nonce": "n", "iat": at}
    whole["exp"] = at + 86_400  # those of the parameters are made when the tests are collected
    payload = {name: value for name, value in {**whole, **claims}.items() if value is not None}
    return {"id_token": jwt.encode({"alg": alg, "kid": "a"}, payload, key, algorithms=[alg])}


@each_row(
    "token",
    [
        make_token(OTHER),
        make_token(OctKey.generate_key(256, {"kid": "a"}), "HS256"),
        make_token(iss="https://evil.example.com"),
        make_token(aud="another"),
        make_token(aud=["aftertouch", "another"], azp="another"),
        make_token(nonce="other"),
        make_token(nonce=None),
        make_token(exp=int(time.time()) - 600),
        make_token(exp=None),
        make_token(sub=None),
        {},
        {"id_token": "eyJhbGciOiJub25lIn0.e30."},
    ],
)
def test_check_token_wrong_token_is_refused(token: dict[str, str], settings: Settings) -> None:
    settings.AFTERTOUCH_OIDC_ISSUER, settings.AFTERTOUCH_OIDC_CLIENT_ID = "https://id.example.com", "aftertouch"
    keys = KeySet([KEY]).as_dict(private=False)
    assert openid._check_token(make_token(), keys, "n")["sub"] == "s"
    with pytest.raises(openid.ProviderFailed):
        openid._check_token(token, keys, "n")


@each_row("keys", [{}, {"keys": None}, {"keys": ["x"]}, {"keys": [None]}, {"keys": [{"kty": "RSA"}]}])
def test_keys_that_are_none_are_the_fault_of_the_provider(keys: dict[str, Any], settings: Settings) -> None:
    settings.AFTERTOUCH_OIDC_ISSUER, settings.AFTERTOUCH_OIDC_CLIENT_ID = "https://id.example.com", "aftertouch"
    with pytest.raises(openid.ProviderFailed):
        openid._check_token(make_token(), keys, "n")


@each_row("name", [*openid.ENDPOINTS, "userinfo_endpoint"])
@each_row("address", [7, ["https://id.example.com"], {"url": "x"}])
def test_address_that_is_no_text_is_the_fault_of_the_provider(
    name: str, address: Any, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.AFTERTOUCH_OIDC_ISSUER = issuer = "https://id.example.com"
    document = {"issuer": issuer, **dict.fromkeys(openid.ENDPOINTS, f"{issuer}/x"), name: address}

    class Transport:
        async def request(self, *_: Any, **__: Any) -> Any:
            return SimpleNamespace(status=200, complete=True, body=json.dumps(document).encode())

    monkeypatch.setattr(openid, "shared_transport", Transport)
    with pytest.raises(openid.ProviderFailed):
        openid.begin_flow("https://shop.example.com/back", 0.0)


def test_only_provider_refuses_passwords(provider: MockProvider, settings: Settings) -> None:
    User.objects.create_superuser("ann", password="right")
    client = Client()
    page = client.get(reverse("admin:login")).content.decode()
    assert "login-form" in page
    assert "provider-sign-in" in page
    settings.AFTERTOUCH_OIDC_ONLY = True
    assert "login-form" not in client.get(reverse("admin:login")).content.decode()
    assert client.post(reverse("admin:login"), {"username": "ann", "password": "right"}).status_code == 403
