"""Hide secrets and personal data in what the back office shows.

Stored rows and API responses stay unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any
from uuid import UUID

HIDDEN = "****"
#: Words in the names of secret values. A name is split at underscores, dashes and capitals.
SECRETS = frozenset(
    ("password", "passwd", "pwd", "passcode", "secret", "token", "key", "apikey", "authorization", "cookie",
     "credential", "signature", "pin")
)  # fmt: skip
PERSONAL = frozenset(("phone", "mobile", "cellphone", "telephone", "tel", "msisdn", "idcard", "idno"))
#: Keys that give no access; operators search by them.
PLAIN_KEYS = frozenset(("dedupe", "delivery", "business", "idempotency"))
SECRETS_IN_CHINESE, PERSONAL_IN_CHINESE = ("密码", "口令", "令牌", "密钥"), ("手机", "电话", "身份证")

WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
MOBILE = re.compile(r"(?<![0-9A-Za-z])((?:\+?86[- ]?)?1[3-9]\d)[- ]?\d{4}[- ]?(\d{4})(?![0-9A-Za-z])")
DAY = r"(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])"
ID_CARD = re.compile(rf"(?<![0-9A-Za-z])([1-9]\d\d)\d{{3}}{DAY}(\d{{3}}[0-9Xx])(?![0-9A-Za-z])")
BEARER = re.compile(r"\b(Bearer|Basic) +[\w.~+/=-]{8,}", re.IGNORECASE)
#: A name, a separator and a value in a query string, in JSON or in a log line. Words after a colon stay visible.
NAMED = re.compile(
    r"""(?<![\w-])([\w-]{1,64})([ ]?=[ ]?"?|\\?["'][ ]?:[ ]?\\?["']?|:[ ]?(?=[^\s\d]{0,64}\d)|"""
    r"""：[ ]?(?=[!-~])|(?<=[码令牌钥机话证]):[ ]?(?=[!-~]))([^\s"'\\&,;，。；（）(){}\[\]]+)"""
)
#: `scheme://user:password@host`.
IN_ADDRESS = re.compile(r"(?<![A-Za-z0-9])([A-Za-z][A-Za-z0-9+.-]{1,20}://[^\s/:@]{0,100}):[^\s/]{1,200}@")
JWT = re.compile(r"(?<![\w-])eyJ[\w-]{5,}\.[\w-]{2,}\.[\w-]*")
#: Starts with the digits of a card issuer; the check digit decides.
CARD = re.compile(r"(?<![0-9A-Za-z])(?:4|5[1-5]|2[2-7]|3[457]|6[025])(?:[ -]?[0-9]){11,17}(?![0-9A-Za-z])")
FULL_WIDTH = {0xFF10 + digit: str(digit) for digit in range(10)}
MOST_SEARCHED = 500_000  #: characters of different texts; to redact them takes about a second


def redact(value: Any) -> Any:
    """Return the same JSON with personal and secret values hidden."""
    if isinstance(value, dict):
        return {redact_text(str(name)): _redact_by_name(str(name), each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [redact(each) for each in value]
    if isinstance(value, str):
        return redact_text(value)
    if isinstance(value, int) and not isinstance(value, bool):
        text = str(value)
        shown = redact_text(text)
        return value if shown == text else shown
    return value


def redact_text(text: str) -> str:
    """Return the text with personal numbers and secrets hidden. Full-width digits become ASCII."""
    text = IN_ADDRESS.sub(rf"\1:{HIDDEN}@", text.translate(FULL_WIDTH))
    text = NAMED.sub(_redact_named, BEARER.sub(rf"\1 {HIDDEN}", JWT.sub(HIDDEN, text)))
    return CARD.sub(_redact_card, ID_CARD.sub(rf"\1{HIDDEN}\2", MOBILE.sub(rf"\1{HIDDEN}\2", text)))


def split_by_shown_term(term: str, texts: Iterable[tuple[UUID, str]]) -> tuple[list[UUID], list[UUID]]:
    """Return the keys of the texts that show a term in any case, and of those that hide it.

    With a search of hidden characters a user could find them one by one. After `MOST_SEARCHED` characters the keys of
    further texts are in neither list.
    """
    term = term.translate(FULL_WIDTH).lower()
    known: dict[str, bool] = {}
    found: tuple[list[UUID], list[UUID]] = ([], [])
    left = MOST_SEARCHED
    for key, text in texts:
        if text not in known:
            # No pattern goes beyond a line.
            lines = [line for line in text.split("\n") if term in line.translate(FULL_WIDTH).lower()]
            left -= sum(map(len, lines))
            if left < 0:
                break
            known[text] = any(term in redact_text(line).lower() for line in lines)
        found[0 if known[text] else 1].append(key)
    return found


def _redact_card(found: re.Match[str]) -> str:
    """Hide the middle of a card number; leave other numbers of that length."""
    digits = [int(each) for each in found[0] if each.isdigit()]
    doubled = [sum(divmod(2 * each, 10)) for each in digits[-2::-2]]
    if (sum(digits[-1::-2]) + sum(doubled)) % 10:
        return found[0]
    shown = "".join(map(str, digits))
    return f"{shown[:4]}{HIDDEN}{shown[-4:]}"


def redact_json(value: Any) -> str:
    """Return the redacted value as indented JSON."""
    return json.dumps(redact(value), ensure_ascii=False, indent=2)


def _redact_by_name(name: str, value: Any) -> Any:
    if not _is_secret(name) and not _is_personal(name):
        return redact(value)
    if isinstance(value, dict):
        return {redact_text(str(each)): _redact_by_name(name, below) for each, below in value.items()}
    if isinstance(value, list | tuple):
        return [_redact_by_name(name, each) for each in value]
    return value if value is None or isinstance(value, bool) or value == "" else _hide_value(name, str(value))


def _hide_value(name: str, text: str) -> str:
    """Hide a secret whole and a number except its ends, so that two numbers remain distinct."""
    if _is_secret(name) or len(text) < 9:
        return HIDDEN
    return f"{text[:3]}{HIDDEN}{text[-4:]}"


def _redact_named(found: re.Match[str]) -> str:
    name, between, value = found.groups()
    return f"{name}{between}{_hide_value(name, value)}" if _is_secret(name) or _is_personal(name) else found[0]


def _is_secret(name: str) -> bool:
    words = _name_words(name)
    opens = not ("key" in words and words & PLAIN_KEYS)
    return (opens and bool(words & SECRETS)) or any(each in name for each in SECRETS_IN_CHINESE)


def _is_personal(name: str) -> bool:
    return bool(_name_words(name) & PERSONAL) or any(each in name for each in PERSONAL_IN_CHINESE)


def _name_words(name: str) -> frozenset[str]:
    """Return the words of a name and each pair of neighbours: `id_card` gives `idcard` too. Plurals become singular."""
    words = [word.lower().removesuffix("s") if len(word) > 3 else word.lower() for word in WORDS.findall(name)]
    return frozenset([*words, *(first + second for first, second in pairwise(words))])
