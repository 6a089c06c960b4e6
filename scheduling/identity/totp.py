"""Check second factors: codes of an authenticator app (TOTP, RFC 6238) and recovery codes. Each is accepted once."""

from __future__ import annotations

import hashlib
import secrets
import unicodedata
from base64 import b32encode

import pyotp
import segno
import structlog
from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import F, Func, Value
from django.db.models.functions import Now
from django.utils.timezone import now
from django.utils.translation import gettext

from scheduling.audit import record_action
from scheduling.models import TotpDevice
from scheduling.models.encrypted import Sealed

log = structlog.get_logger(__name__)

STEP = 30  #: seconds
DRIFT = 1  #: steps that the clock of a telephone may be early or late
RECOVERY_CODES = 10
RECOVERY_BYTES = 10  #: 80 bits: a copy of the digests allows no guess


def find_device(user: User) -> TotpDevice | None:
    """Return the confirmed authenticator app of a user."""
    return TotpDevice.objects.filter(user=user, confirmed_at__isnull=False).first()


def start_enrolment(user: User) -> None:
    """Store a new secret, unless one is confirmed. It protects nothing before it is confirmed.

    A waiting secret is replaced: a person with the password alone may have read it.
    """
    fresh = {"secret": pyotp.random_base32(), "created_at": now()}
    if not TotpDevice.objects.filter(user=user, confirmed_at=None).update(**fresh):
        TotpDevice.objects.get_or_create(user=user, defaults=fresh)


def find_enrolment(user: User) -> TotpDevice | None:
    """Return the authenticator app that waits for its confirmation. None if its secret is unreadable here."""
    device = TotpDevice.objects.filter(user=user, confirmed_at=None).first()
    return None if device and isinstance(device.secret, Sealed) else device


def describe_enrolment(device: TotpDevice) -> dict[str, str]:
    """Return the secret in groups of four, and the QR code as SVG."""
    secret = device.secret
    issuer = f"Aftertouch {settings.AFTERTOUCH_ENVIRONMENT}".strip()
    uri = pyotp.TOTP(secret).provisioning_uri(name=device.user.get_username(), issuer_name=issuer)
    groups = [secret[at : at + 4] for at in range(0, len(secret), 4)]
    return {"secret": " ".join(groups), "qr": segno.make(uri).svg_inline(dark="#000", light="#fff", omitsize=True)}


@transaction.atomic
def confirm_enrolment(user: User, code: str) -> list[str] | None:
    """Turn the second factor on. Return new recovery codes, or None for a wrong code. Concurrent calls confirm once."""
    device = TotpDevice.objects.select_for_update().filter(user=user, confirmed_at=None).first()
    step = _find_step(device, _read_code(code)) if device else None
    if device is None or step is None:
        return None
    waiting = TotpDevice.objects.filter(pk=device.pk, confirmed_at=None)
    if not waiting.update(confirmed_at=Now(), last_step=step):
        return None
    return replace_recovery_codes(user)


@transaction.atomic
def accept_code(user: User, text: str) -> bool:
    """Accept a code of the app or a recovery code. Of concurrent calls with one code, one returns True.

    The guard is in the UPDATE: the second call waits for the row and then finds the code used.
    """
    code = _read_code(text)
    if code.isdigit():
        device = find_device(user)
        step = _find_step(device, code) if device else None
        if device is None or step is None:
            return False
        return bool(TotpDevice.objects.filter(pk=device.pk, last_step__lt=step).update(last_step=step))
    digest, column = _hash_code(code), TotpDevice._meta.get_field("recovery_digests")
    left = Func(F(column.name), Value(digest), function="array_remove", output_field=column)
    holding = TotpDevice.objects.filter(user=user, confirmed_at__isnull=False, recovery_digests__contains=[digest])
    used = holding.update(recovery_digests=left)
    if used:
        name, words = user.get_username(), gettext("recovery code used")
        record_action("acted", user, label=name, actor=name, reason=words)
        log.warning("recovery_code_used", user=name)
    return bool(used)


def replace_recovery_codes(user: User) -> list[str] | None:
    """Store ten new recovery codes in place of all others. Return them; only their digests are stored.

    Return None without a confirmed app: another request may turn the second factor off, or start a new enrolment.
    """
    codes = [b32encode(secrets.token_bytes(RECOVERY_BYTES)).decode() for _ in range(RECOVERY_CODES)]
    confirmed = TotpDevice.objects.filter(user=user, confirmed_at__isnull=False)
    if not confirmed.update(recovery_digests=[_hash_code(code) for code in codes]):
        return None
    return ["-".join(code[at : at + 4] for at in range(0, len(code), 4)).lower() for code in codes]


def reset_totp(user: User) -> bool:
    """Remove the second factor of a user. Return False if there was none. Idempotent."""
    removed, _ = TotpDevice.objects.filter(user=user).delete()
    return bool(removed)


def _read_code(text: str) -> str:
    """Return a code as it is compared: apps show it in groups, and a Chinese keyboard may type full-width digits."""
    return "".join(unicodedata.normalize("NFKC", text).split()).replace("-", "").upper()


def _find_step(device: TotpDevice, code: str) -> int | None:
    """Return the time step of a code within the drift; None if it belongs to none."""
    if isinstance(device.secret, Sealed):
        log.error("totp_secret_unreadable", user=device.user.get_username())
        return None
    generator = pyotp.TOTP(device.secret)
    at = now().timestamp()
    for drift in range(-DRIFT, DRIFT + 1):
        if secrets.compare_digest(generator.generate_otp(int(at) // STEP + drift).encode(), code.encode()):
            return int(at) // STEP + drift
    return None


def _hash_code(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()
