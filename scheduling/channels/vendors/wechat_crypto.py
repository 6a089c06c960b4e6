"""Verify and decrypt callbacks of WeCom and WeChat: SHA-1 over sorted parts, and AES-256-CBC.

Sources: developer.work.weixin.qq.com/document/path/90968 (scheme), 90930 (verification of the address);
developers.weixin.qq.com/doc/offiaccount/Message_Management/Message_encryption_and_decryption_instructions.html.
"""

from __future__ import annotations

import binascii
import hashlib
from base64 import b64decode
from xml.etree.ElementTree import Element, ParseError, fromstring

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CBC
from django.utils.crypto import constant_time_compare

from scheduling.error_text import ErrorText as _

KEY_LENGTH = 43  # characters of the EncodingAESKey
PADDING = 32  # bytes; the scheme pads to this instead of the block size of AES
HEAD = 16  # random bytes before the length


class CallbackRefused(Exception):
    """The request is not from the vendor, or not for this account. The answer gives no reason."""


def read_key(text: str) -> bytes:
    """Return the AES key of an EncodingAESKey.

    Raises:
        ValueError: it is not 43 letters and digits.
    """
    try:
        key = b64decode(text + "=", validate=True) if len(text) == KEY_LENGTH and text.isascii() else b""
    except binascii.Error:
        key = b""
    if len(key) != PADDING:
        raise ValueError(_("must have %(length)s letters and digits", length=KEY_LENGTH))
    return key


def check_signature(given: str, *parts: str) -> None:
    """Raise `CallbackRefused` unless `given` is the signature of the parts."""
    expected = hashlib.sha1("".join(sorted(parts)).encode()).hexdigest()  # noqa: S324  the vendor's scheme
    if not constant_time_compare(given, expected):
        raise CallbackRefused


def decrypt(text: str, key: bytes, receiver: str) -> bytes:
    """Return the content of an encrypted text for this receiver: the id of the corporation or the application.

    Raises:
        CallbackRefused: it is not such a text, or for another receiver.
    """
    try:
        sealed = b64decode(text, validate=True)
        decryptor = Cipher(AES(key), CBC(key[:16])).decryptor()
        plain = decryptor.update(sealed) + decryptor.finalize()
    except ValueError as error:
        raise CallbackRefused from error
    padding = plain[-1] if plain else 0
    if not 1 <= padding <= PADDING or len(plain) < HEAD + 4 + padding:
        raise CallbackRefused
    plain = plain[HEAD:-padding]
    length = int.from_bytes(plain[:4], "big")
    content, found = plain[4 : 4 + length], plain[4 + length :]
    if len(content) < length or found != receiver.encode():
        raise CallbackRefused
    return content


def parse_xml_document(content: bytes) -> Element:
    """Return the root of an XML document without a document type, which could expand without bound.

    Raises:
        ValueError: it is something else.
    """
    text = content.decode()
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise ValueError("a document type is not accepted")
    try:
        return fromstring(text)  # noqa: S314  without a document type nothing expands
    except ParseError as error:
        raise ValueError(str(error)) from None
