"""Translate codes, validation errors and permissions into the texts that the back office shows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django.apps import apps
from django.contrib.auth.models import Permission
from django.db.models import ManyToManyField
from django.http import HttpRequest
from django.utils.functional import Promise
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop

#: By code: why a touch waits or ended, and the rule of a verdict.
REASONS: dict[str, str | Promise] = {
    "expired": gettext_lazy("Expired before sending"),
    "node_disabled": gettext_lazy("Node switched off"),
    "paused": gettext_lazy("Paused"),
    "opted_out": gettext_lazy("Customer opted out"),
    "conversation": gettext_lazy("Customer is in a new conversation"),
    "answered": gettext_lazy("Customer has replied"),
    "presence_unknown": gettext_lazy("Chat state temporarily unknown"),
    "holdout": gettext_lazy("Control group"),
    "rollout": gettext_lazy("Community not yet in the rollout"),
    "quiet_hours": gettext_lazy("Quiet hours"),
    "condition": gettext_lazy("The node's condition does not hold"),
    "depth": gettext_lazy("Too many touches of the journey before"),
    "send_window": gettext_lazy("Outside the send windows"),
    "dedupe": gettext_lazy("Same content sent recently"),
    "community_dedupe": gettext_lazy("Same content sent to the community recently"),
    "cap": gettext_lazy("Customer's limit reached"),
    "community_cap": gettext_lazy("Community's limit reached"),
    "slot_hold": gettext_lazy("Cap slot reserved for a higher priority"),
    "template_data_missing": gettext_lazy("Data for the text is missing"),
    "no_target": gettext_lazy("No target to send to"),
    "target_disabled": gettext_lazy("Target is disabled"),
    "target_down": gettext_lazy("Receiver does not answer, waiting"),
    "target_busy": gettext_lazy("Receiver is busy, waiting"),
    "quota": gettext_lazy("Receiver's quota used up, waiting"),
    "channel_retired": gettext_lazy("Channel retired"),
    "channel_misconfigured": gettext_lazy("Channel misconfigured"),
    "bad_target": gettext_lazy("Invalid target"),
    "internal_error": gettext_lazy("Internal error"),
    "secrets_unreadable": gettext_lazy(
        "Secrets cannot be decrypted on this server (encryption key missing). Waiting for another server."
    ),
    "timeout": gettext_lazy("No answer in time"),
    "connect": gettext_lazy("Could not connect"),
    "throttled": gettext_lazy("Receiver asks to slow down"),
    "garbled": gettext_lazy("Answer unreadable"),
    "worker_lost": gettext_lazy("Worker lost while sending"),
    "connect_timeout": gettext_lazy("Could not connect in time"),
    "proxy": gettext_lazy("The proxy does not pass the request on"),
    "disconnected": gettext_lazy("Connection broke off"),
    "redirect": gettext_lazy("Receiver redirects"),
    "gone": gettext_lazy("Receiver is gone"),
    "no_time": gettext_lazy("No time was left for the attempt"),
    "channel_error": gettext_lazy("Error in the channel's code"),
    "mail_backend": gettext_lazy("The mail system failed"),
    "busy": gettext_lazy("Concurrency limit reached, waiting"),
    "dns": gettext_lazy("Host name not found"),
    "tls": gettext_lazy("Certificate not accepted"),
    "bad_url": gettext_lazy("Address cannot be read"),
    "private_address": gettext_lazy("Private network address, not allowed"),
    "scheme": gettext_lazy("Only https is allowed"),
    "http_other": gettext_lazy("Receiver answered something unexpected"),
    "vendor_other": gettext_lazy("Platform refused it for an unlisted reason"),
    "smtp_unsupported": gettext_lazy("Mail relay cannot take this mail"),
    "mark_failed": gettext_lazy("Could not be started, waiting"),
    "bad_content": gettext_lazy("Text does not fit the channel"),
    "token_expired": gettext_lazy("Platform refused the access token"),
    "token_refused": gettext_lazy("Platform gives no access token"),
    "token_failed": gettext_lazy("Access token could not be fetched"),
    "token_unavailable": gettext_lazy("No access token in time"),
}
#: Prefixes of codes that contain a name or a number.
PREFIXES = {
    "by:": gettext_noop("Cancelled by %s"),
    "event:": gettext_noop("Cancelled by event %s"),
    "restarted:": gettext_noop("Replaced by a newer event %s"),
    "http_": gettext_noop("Receiver answered HTTP %s"),
    "smtp_": gettext_noop("Mail relay answered %s"),
    "vendor_": gettext_noop("Platform refused it (code %s)"),
}


#: Codes and errors that other apps register by `register_labels`.
OTHER_REASONS: dict[str, str | Promise] = {}
OTHER_PREFIXES: dict[str, str] = {}
OTHER_ERROR_LABELS: list[tuple[str, str]] = []


def register_labels(
    reasons: Mapping[str, str | Promise], prefixes: Mapping[str, str], complaints: Iterable[tuple[str, str]] = ()
) -> None:
    """Register the labels of another app's codes and errors, for pages that show rows of both apps."""
    OTHER_REASONS.update(reasons)
    OTHER_PREFIXES.update(prefixes)
    OTHER_ERROR_LABELS.extend(complaints)


def translate_reason(code: str) -> str:
    """Return the label of a code; an unknown code is returned unchanged."""
    words = REASONS.get(code) or OTHER_REASONS.get(code)
    if words:
        return str(words)
    head, plus, tail = code.rpartition("+")
    if plus and tail in OTHER_REASONS:
        second = translate_reason(tail)
        return _("%(first)s; %(second)s") % {"first": translate_reason(head), "second": second} if head else second
    for prefix, words in {**PREFIXES, **OTHER_PREFIXES}.items():
        if code.startswith(prefix):
            return _(words) % code.removeprefix(prefix)
    return code


#: Errors of `scheduling.configuration.validation` and of channel kinds as patterns, so that they can be translated.
ERROR_LABELS = (
    (r"must not be negative", gettext_noop("must not be negative")),
    (r"must be above zero", gettext_noop("must be above zero")),
    (r"must not be longer than a year \(365d\)", gettext_noop("must not be longer than a year (365d)")),
    (r"must not be longer than (?P<most>\S+)", gettext_noop("must not be longer than %(most)s")),
    (r"“(?P<given>.*)” is not a duration; .*",
     gettext_noop("“%(given)s” is not a duration; write it like 15m, 2h, 7d or 1h30m")),
    (r"“(?P<given>.*)” must name each unit once, the largest first",
     gettext_noop("“%(given)s” must name each unit once, the largest first")),
    (r"must be between 0 and a year \(365d\)", gettext_noop("must be between 0 and a year (365d)")),
    (r"must be between (?P<least>\S+) and (?P<most>\S+)", gettext_noop("must be between %(least)s and %(most)s")),
    (r"must be at least the limit of a day, (?P<limit>\d+)",
     gettext_noop("must be at least the limit of a day, %(limit)s")),
    (r"channels of the kind (?P<kind>\S+) call no receiver and take no limit",
     gettext_noop("channels of the kind %(kind)s call no receiver and take no limit")),
    (r"must be lower-case letters, .*",
     gettext_noop("must be lower-case letters, digits, “-”, “_” and “.”, at most 64")),
    (r"must be http://user:password@host:port .*",
     gettext_noop("must be like http://user:password@host:3128, without a path; write @ in a password as %%40")),
    (r"must be “all” or “any” with a list of rows", gettext_noop("needs at least one row")),
    (r"must not have more than (?P<most>\d+) rows", gettext_noop("must not have more than %(most)s rows")),
    (r"must be a list of at most (?P<most>\d+) (variants|windows|days)",
     gettext_noop("must be at most %(most)s entries")),
    (r"must be a whole number from 0 to (?P<most>\d+)", gettext_noop("must be a whole number from 0 to %(most)s")),
    (r"must be a list of 1 to (?P<most>\d+) values", gettext_noop("must be 1 to %(most)s values")),
    (r"must be a number, or a date like .*", gettext_noop("must be a number, or a date like 2026-05-01")),
    (r"must be left out for this operator", gettext_noop("must be empty for this operator")),
    (r"must be text, a number, true or false", gettext_noop("must be text, a number, true or false")),
    (r"must be a path of 1 to .*", gettext_noop("must be names with dots between them, like event.data.items.0.sku")),
    (r"“(?P<name>.*)” is not known: (?P<why>.*); did you mean (?P<known>.*)\?",
     gettext_noop("“%(name)s” is not known; did you mean %(known)s?")),
    (r"“(?P<name>.*)” is not known; known are (?P<known>.*)",
     gettext_noop("“%(name)s” is not known; known are %(known)s")),
    (r"cannot apply together with a fixed time of day", gettext_noop("cannot apply together with a time of day")),
    (r"is missing: the day is chosen for a time", gettext_noop("is missing: the day is chosen for a time")),
    (r"“(?P<given>.*)” must be like “mon-fri.*",
     gettext_noop("“%(given)s” must be like “mon-fri 09:00-18:00” or “working 09:00-18:00”")),
    (r"“(?P<given>.*)” must end later than .*",
     gettext_noop("“%(given)s” must end later than it starts; use two windows over midnight")),
    (r"“(?P<given>.*)” “(?P<part>.*)” is not (a day|customer).*",
     gettext_noop("“%(given)s”: “%(part)s” cannot be read")),
    (r"the holidays of “(?P<name>.*)” are not known; .*",
     gettext_noop("the holidays of “%(name)s” are not known; use a code like CN, or leave it empty")),
    (r"“(?P<day>.*)” is not a day like 2026-10-10", gettext_noop("“%(day)s” is not a day like 2026-10-10")),
    (r"(?P<day>\S+) is also among the closed days", gettext_noop("%(day)s is also among the days off")),
    (r"“(?P<given>.*)” must be a time like .*", gettext_noop("“%(given)s”: a time is like 09:00, at most 24:00")),
    (r"“(?P<name>.*)” is the key of another variant", gettext_noop("“%(name)s” is the key of another variant")),
    (r"at most (?P<most>\d+) touches may come before another one: (?P<chain>.*)",
     gettext_noop("at most %(most)s touches may come before another one: %(chain)s")),
    (r"must differ from the start of quiet hours", gettext_noop("must differ from the start of quiet hours")),
    (r"must be one of (?P<known>.*)", gettext_noop("must be one of %(known)s")),
    (r"must be a list of texts of 1 to (?P<most>\d+) characters",
     gettext_noop("each entry must have 1 to %(most)s characters")),
    (r"must have 1 to (?P<most>\d+) characters.*", gettext_noop("must have 1 to %(most)s characters")),
    (r"names something twice", gettext_noop("names something twice")),
    (r"is missing: a goal is .*", gettext_noop("is missing: a goal is an event and the time within which it counts")),
    (r"is missing: a canary needs .*", gettext_noop("is missing: a canary needs the template it tries")),
    (r"is missing", gettext_noop("is missing")),
    (r"only a cap or a dedupe can be counted for a community",
     gettext_noop("only a cap or the rule for the same content can be counted for a community")),
    (r"only a cap or a dedupe can count a part of the messages",
     gettext_noop("only a cap or the rule for the same content can count a part of the messages")),
    (r"must name a limit for each level; .*", gettext_noop("must name a limit for each level, like vip=5")),
    (r"must be a whole number from 1 to (?P<most>\d+)", gettext_noop("must be a whole number from 1 to %(most)s")),
    (r"a level belongs to a customer: .*",
     gettext_noop("a level belongs to a customer: a cap for a community has one limit")),
    (r"“(?P<given>.*)” is not an IANA time zone.*", gettext_noop("“%(given)s” is not a time zone, like Asia/Shanghai")),
    (r"must be a list of at most (?P<most>\d+) durations", gettext_noop("must be at most %(most)s durations")),
    (r"each must be above zero and at most (?P<most>\S+)",
     gettext_noop("each must be above zero and at most %(most)s")),
    (r"line (?P<line>\d+): (?P<what>.*)", gettext_noop("line %(line)s: %(what)s")),
    (r"unknown variable “(?P<name>[^”]*)”; available: (?P<known>.*)",
     gettext_noop("unknown variable “%(name)s”; available: %(known)s")),
    (r"unknown variable “(?P<name>[^”]*)”; (?P<root>\S+) has (?P<known>.*)",
     gettext_noop("unknown variable “%(name)s”; %(root)s has %(known)s")),
    (r"unknown filter “(?P<name>[^”]*)”; available: (?P<known>.*)",
     gettext_noop("unknown filter “%(name)s”; available: %(known)s")),
    (r"“(?P<name>.*)” cannot be read; write filters .*",
     gettext_noop("“%(name)s” cannot be read; write filters like x|default:\"-\"")),
    (r"“(?P<name>[^”]*)” is not closed on its line", gettext_noop("“%(name)s” is not closed on its line")),
    (r"“(?P<name>[^”]*)” has no end", gettext_noop("“%(name)s” has no end")),
    (r"“(?P<name>[^”]*)” does not take “(?P<given>.*)”", gettext_noop("“%(name)s” does not take “%(given)s”")),
    (r"“(?P<name>[^”]*)” takes a text in quotes or a number",
     gettext_noop("“%(name)s” takes a text in quotes or a number")),
    (r"“(?P<name>[^”]*)” is not part of the template language",
     gettext_noop("“%(name)s” is not part of the template language")),
    (r"it is nested too deeply", gettext_noop("it is nested too deeply")),
    (r"must not be longer than (?P<most>\d+) characters", gettext_noop("must not be longer than %(most)s characters")),
    (r"a text must not have more than (?P<most>\d+) tags",
     gettext_noop("a text must not have more than %(most)s tags")),
    (r"a tag must not be longer than (?P<most>\d+) characters",
     gettext_noop("a tag must not be longer than %(most)s characters")),
    (r"a loop must not contain another loop", gettext_noop("a loop must not contain another loop")),
    (r"a loop is written like .*", gettext_noop("a loop is written like {%% for line in event.data.lines %%}")),
    (r"must be a language of at most .*",
     gettext_noop("must be a language of at most 20 characters, like zh-hans or en")),
    (r"its loops and filters take too much work with this data",
     gettext_noop("its loops and filters take too much work with this data")),
    (r"a text must not come to more than (?P<most>\d+) characters",
     gettext_noop("a text must not come to more than %(most)s characters")),
    (r"“(?P<name>[^”]*)” is missing", gettext_noop("the data has no “%(name)s”")),
    (r"“(?P<name>[^”]*)” is null", gettext_noop("“%(name)s” has no value (null)")),
    (r"“(?P<name>[^”]*)” is a list; .*", gettext_noop("“%(name)s” is a list; name one of its entries, or use join")),
    (r"“(?P<name>[^”]*)” is an object; .*", gettext_noop("“%(name)s” is an object; name one of its fields")),
    (r"“(?P<name>[^”]*)” is not a list", gettext_noop("“%(name)s” is not a list")),
    (r"“(?P<name>[^”]*)” is not an instant", gettext_noop("“%(name)s” is not an instant")),
    (r"“(?P<name>[^”]*)” is not a number", gettext_noop("“%(name)s” is not a number")),
    (r"“(?P<name>[^”]*)” has no length", gettext_noop("“%(name)s” has no length")),
    (r"“(?P<name>[^”]*)” cannot be printed", gettext_noop("“%(name)s” cannot be printed")),
    (r"“(?P<name>[^”]*)” cannot be compared", gettext_noop("“%(name)s” cannot be compared")),
    (r"“(?P<name>[^”]*)” has more than (?P<most>\d+) entries",
     gettext_noop("“%(name)s” has more than %(most)s entries")),
    (r"is not known here; known are (?P<known>.*)", gettext_noop("is not known here; known are %(known)s")),
    (r"must be text", gettext_noop("must be text")),
    (r"the host must be (?P<host>.*)", gettext_noop("the host must be %(host)s")),
    (r"a robot's address must start with (?P<start>.*)", gettext_noop("a robot's address must start with %(start)s")),
    (r"only https is allowed here", gettext_noop("only https is allowed here")),
    (r"(the address|localhost) is not public", gettext_noop("the address is not public")),
    (r"cannot be parsed|the host is neither .*|the port is missing .*|spaces, control characters .*",
     gettext_noop("must be an address like https://example.com/path")),
    (r"must be one mail address", gettext_noop("must be one mail address")),
    (r"a key named “(?P<name>.*)” already exists", gettext_noop("a key named “%(name)s” already exists")),
    (r"must be whsec_.*", gettext_noop("must be whsec_ and 24 to 64 bytes in base64")),
    (r"there is no (template|channel|stage|node|calendar|channel or channel kind) “(?P<name>.*)”",
     gettext_noop("there is no “%(name)s”")),
    (r"“(?P<name>.*)” is listed already, .*", gettext_noop("“%(name)s” is listed twice")),
    (r"a node cannot follow itself: (?P<cycle>.*)", gettext_noop("a node cannot follow itself: %(cycle)s")),
    (r"is missing: “(?P<trigger>.*)” is about touches of other nodes",
     gettext_noop("is missing: “%(trigger)s” is about touches of other nodes")),
    (r"needs one of these triggers: (?P<types>.*)", gettext_noop("needs one of these triggers: %(types)s")),
    (r"must be a whole number", gettext_noop("must be a whole number")),
    (r"must be a number", gettext_noop("must be a number")),
    (r"must be true or false", gettext_noop("must be true or false")),
    (r"must be a duration like .*", gettext_noop("must be a duration like 15m, 2h, 7d or 1h30m")),
    (r"must be a time like .*", gettext_noop("must be a time like 22:00")),
    (r"must not be empty", gettext_noop("must not be empty")),
    (r"must be a list", gettext_noop("must be a list")),
    (r"must be a mapping", gettext_noop("must be a mapping")),
    (r"a draft cannot change this; allowed: (?P<known>.*)",
     gettext_noop("a draft cannot change this; allowed: %(known)s")),
    (r"many cannot be chosen by it", gettext_noop("many cannot be chosen by it")),
    (r"is given twice", gettext_noop("is given twice")),
    (r"“(?P<name>.*)” is given twice", gettext_noop("“%(name)s” is given twice")),
    (r"aliases \(\*name\) are not supported", gettext_noop("aliases (*name) are not supported")),
    (r"merge keys \(<<\) are not supported", gettext_noop("merge keys (<<) are not supported")),
    (r"tags \((?P<tag>.*)\) are not supported", gettext_noop("tags (%(tag)s) are not supported")),
    (r"keys must be text; put it in quotes", gettext_noop("keys must be text; put it in quotes")),
    (r"there must not be more than (?P<most>\d+) keys and values",
     gettext_noop("there must not be more than %(most)s keys and values")),
    (r"must not be larger than (?P<most>\d+) (bytes|characters)",
     gettext_noop("must not be larger than %(most)s bytes")),
    (r"the database cannot hold this character", gettext_noop("the database cannot hold this character")),
    (r"this number is too large", gettext_noop("a number is too large")),
    (r"“(?P<given>.*)” cannot be meant", gettext_noop("“%(given)s” cannot be meant")),
    (r"the same bulk action is already running", gettext_noop("The same bulk action is already running.")),
    (r"too many bulk actions are running; .*",
     gettext_noop("Too many bulk actions are running. Try again when one has finished.")),
    (r"the bulk action has already ended", gettext_noop("The bulk action has already ended.")),
    (r"a batch of this bulk action is running; .*",
     gettext_noop("A batch of this bulk action is running. Try again in a moment.")),
    (r"must start with (?P<start>\S+), or .*",
     gettext_noop("must start with %(start)s, or the host must be allowed as a private host")),
    (r"must be a phone number.*", gettext_noop("must be a phone number: 5 to 20 digits, with or without +")),
    (r"is missing; it leads to .*", gettext_noop("is missing; it leads to the code that “errors” lists")),
    (r"is missing; the request uses .*", gettext_noop("is missing; the request uses {{ channel.token }}")),
    (r"is not a header that can be set", gettext_noop("is not a header that can be set")),
    (r"has more than (?P<levels>\d+) levels or (?P<most>\d+) entries",
     gettext_noop("has more than %(levels)s levels or %(most)s entries")),
    (r"must be text, a number, true, .*",
     gettext_noop("must be text, a number, true, false, null, a list or a mapping")),
    (r"must be text or a number", gettext_noop("must be text or a number")),
    (r"must be text of at most (?P<most>\d+) characters", gettext_noop("must be text of at most %(most)s characters")),
    (r"must be a mapping of (?P<parts>.*)", gettext_noop("must be a mapping of %(parts)s")),
    (r"must be a mapping or a list", gettext_noop("must be a mapping or a list")),
    (r"must be a list of at most (?P<most>\d+) rows", gettext_noop("must be a list of at most %(most)s rows")),
    (r"must be a code or a list of codes", gettext_noop("must be a code or a list of codes")),
    (r"“(?P<name>.*)” is listed twice", gettext_noop("“%(name)s” is listed twice")),
    (r"must be at most (?P<most>\S+)", gettext_noop("must be at most %(most)s")),
    (r"must be a list of at most (?P<most>\d+) texts like 20/1m",
     gettext_noop("must be a list of at most %(most)s texts like 20/1m")),
    (r"“(?P<given>.*)” is not like 20/1m", gettext_noop("“%(given)s” is not like 20/1m")),
    (r"“(?P<given>.*)”: the number is 1 to (?P<most>\d+), .*",
     gettext_noop("“%(given)s”: the number is 1 to %(most)s, the time at most 31d")),
    (r"is an Excel workbook; .*", gettext_noop("is an Excel workbook; save it as “CSV UTF-8”")),
    (r"is UTF-16 text; .*", gettext_noop("is UTF-16 text; save it as “CSV UTF-8”")),
    (r"is no text file", gettext_noop("is no text file")),
    (r"is neither UTF-8 nor GB18030 text", gettext_noop("is neither UTF-8 nor GB18030 text")),
    (r"is empty", gettext_noop("is empty")),
    (r"is no CSV: .*", gettext_noop("a quotation mark is not closed or not doubled")),
    (r"is no (?P<encoding>UTF-8|GB18030) text", gettext_noop("is no %(encoding)s text")),
    (r"is longer than (?P<most>\d+) bytes", gettext_noop("is longer than %(most)s bytes")),
    (r"has (?P<count>\d+) cells; the header has (?P<most>\d+)",
     gettext_noop("has %(count)s cells; the header has %(most)s")),
    (r"must not have more than (?P<most>\d+) columns", gettext_noop("must not have more than %(most)s columns")),
    (r"was shortened by a spreadsheet; .*", gettext_noop("was shortened by a spreadsheet; format the column as text")),
    (r"must be a name of the IANA .*", gettext_noop("must be a time zone, like Asia/Shanghai")),
    (r"must be yes or no", gettext_noop("must be yes or no")),
    (r"is not an e-mail address", gettext_noop("is not an e-mail address")),
    (r"must be a date like .*",
     gettext_noop("must be a date like 2026-03-03 or an instant like 2026-03-03T12:00:00+08:00")),
    (r"must be a number of at most 64 bits", gettext_noop("must be a number of at most 64 bits")),
    (r"contains (?P<character>U\+[0-9A-F]+)", gettext_noop("contains the character %(character)s")),
    (r"has the form of an instant, .*", gettext_noop("looks like an instant, but there is no such date or time")),
    (r"a name is a letter, then .*",
     gettext_noop("the name must be a letter, then letters, digits and “_”, at most 64")),
    (r"a tag has 1 to (?P<most>\d+) characters .*", gettext_noop("a tag must have 1 to %(most)s characters")),
    (r"a customer has at most (?P<most>\d+) attributes", gettext_noop("a customer has at most %(most)s attributes")),
    (r"a customer has at most (?P<most>\d+) addresses", gettext_noop("a customer has at most %(most)s addresses")),
    (r"a customer has at most (?P<most>\d+) tags", gettext_noop("a customer has at most %(most)s tags")),
    (r"the customer was erased", gettext_noop("the customer was erased")),
    (r"an opt-out stays: .*", gettext_noop("an opt-out stays: the customer may have confirmed it since")),
    (r"the customer opted out in person; .*",
     gettext_noop("the customer opted out in person; only a consent by the API or an operator lifts it")),
    (r"was changed later by (?P<name>.*)", gettext_noop("was changed later by %(name)s")),
    (r"was changed later", gettext_noop("was changed later")),
    (r"too many imports wait or run; .*", gettext_noop("Too many imports wait or run. Discard one first.")),
    (r"the state of the import does not allow this", gettext_noop("The state of the import does not allow this.")),
    (r"a batch of this import is running; .*",
     gettext_noop("A batch of this import is running. Try again in a moment.")),
    (r"the import changed no customer", gettext_noop("The import changed no customer.")),
    (r"the next part starts at byte (?P<place>\d+)", gettext_noop("The next part starts at byte %(place)s.")),
    (r"must be from 1 to (?P<most>\d+) bytes", gettext_noop("must be from 1 to %(most)s bytes")),
    (r"the batch at line (?P<place>\d+) could not be finished (?P<count>\d+) times",
     gettext_noop("The batch at line %(place)s could not be finished %(count)s times.")),
)  # fmt: skip


def translate_error(message: str) -> str:
    """Translate a validation error; an unknown one is returned unchanged."""
    for pattern, words in (*ERROR_LABELS, *OTHER_ERROR_LABELS):
        if found := re.fullmatch(pattern, message, re.DOTALL):
            groups = found.groupdict()
            if "line" in groups:
                groups["what"] = translate_error(groups["what"])
            return _(words) % groups
    return message


#: Permissions that a model names in English.
CUSTOM_PERMISSIONS = (gettext_noop("Can publish a draft that was replayed"),)
VERBS = {
    "add": gettext_lazy("may be added"), "change": gettext_lazy("may be changed"),
    "delete": gettext_lazy("may be deleted"), "view": gettext_lazy("may be looked at"),
}  # fmt: skip


def describe_permission(permission: Permission) -> str:
    """Format a permission: `Outreach · channel · may be changed`."""
    kind = permission.content_type
    model = kind.model_class()
    if model is None:
        return str(permission)
    name = _(str(model._meta.verbose_name))
    if what := getattr(model, "instance_type", None):
        name = _("history of: %(what)s") % {"what": what._meta.verbose_name}
    verb, _under, rest = permission.codename.partition("_")
    own = dict(model._meta.permissions).get(permission.codename)
    label = own or (VERBS.get(verb) if rest == kind.model else None) or permission.name
    return f"{apps.get_app_config(kind.app_label).verbose_name} · {name} · {_(str(label))}"


class TranslatedPermissions:
    """Show permissions with translated names in the admins of users and groups."""

    def formfield_for_manytomany(self, db_field: ManyToManyField[Any, Any], request: HttpRequest, **named: Any) -> Any:
        field: Any = super().formfield_for_manytomany(db_field, request, **named)  # type: ignore[misc]
        if db_field.related_model is Permission:
            field.label_from_instance = describe_permission
        return field

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> tuple[list[Any], dict[str, int], set[Any], Any]:
        """Omit the rows that link a group to its permissions: there may be a hundred, without names."""
        deleted, counts, needed, protected = super().get_deleted_objects(objs, request)  # type: ignore[misc]
        links = [field.remote_field.through._meta for field in self.model._meta.many_to_many]  # type: ignore[attr-defined]
        beginnings = tuple(f"{capfirst(link.verbose_name)}: " for link in links)
        for link in links:
            counts.pop(link.verbose_name_plural, None)
        return _drop_prefixed(beginnings, deleted), counts, needed, protected


def _drop_prefixed(beginnings: tuple[str, ...], nested: Sequence[Any]) -> list[Any]:
    kept = [_drop_prefixed(beginnings, each) if isinstance(each, list) else each for each in nested]
    return [each for each in kept if each != [] and not (isinstance(each, str) and each.startswith(beginnings))]
