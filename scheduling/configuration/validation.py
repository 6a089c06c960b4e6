"""Validate configuration: the rules of models, which `full_clean` applies for admin forms and configuration files.

Each function takes values by the names of the model's fields and skips absent ones. Rules of a model add all errors,
and `rules_of` raises them. A dot leads inside a JSON field: `config.url`, `targets.wecom.secret`.

Length and choices of a column are not among the rules: forms, files and `full_clean` take them from the column.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from datetime import date, timedelta
from typing import Any

from scheduling.channels.base import Channel, channel_kinds
from scheduling.channels.options import check_known_keys, read_url
from scheduling.channels.webhook import read_secrets
from scheduling.error_text import ErrorText as _
from scheduling.errors import (
    ErrorCollector,
    InvalidInput,
    check_key,
    check_number,
    check_seconds,
    check_texts,
)
from scheduling.models import (
    Calendar,
    ChannelConfig,
    DelayRule,
    HarassmentRule,
    Node,
    Template,
    TemplateText,
    WebhookEvent,
    WebhookSubscription,
)
from scheduling.models.node import MAX_LIMIT
from scheduling.models.versioned import rules_of
from scheduling.policy.matrix import TOUCH_TYPES
from scheduling.policy.node_conditions import MOST_VARIANTS, check_condition
from scheduling.policy.rollout import read_plan
from scheduling.policy.send_times import check_windows, is_country, is_time_zone
from scheduling.templating import LOCALE, InvalidTemplate, Text

MAX_OWN_DAYS = 1_000
COUNTING_KINDS = ("cap", "dedupe")
WEBHOOK_FILTERS = {"node", "platform", "shop"}


@rules_of(Node)
def check_node(values: Mapping[str, Any], found: ErrorCollector) -> None:
    """Check a node except its references, which the caller resolves."""
    if "trigger" in values and not values["trigger"].strip():
        found.add("trigger", _("is missing"))
    _check_followed(values, found)
    canary = values.get("canary_percent") or values.get("canary_communities")
    if canary and "canary_template" in values and not values["canary_template"]:
        found.add("canary_template", _("is missing: a canary needs the template it tries"))
    goal_event = (values.get("goal_event") or "").strip()
    if bool(goal_event) != (values.get("goal_within") is not None):
        missing = "goal_within" if goal_event else "goal_event"
        if missing in values:
            found.add(missing, _("is missing: a goal is an event and the time within which it counts"))
    if values.get("delay_rules") is not None:
        _check_own_delay_rules(values["delay_rules"], found)
    if values.get("at") is not None and values.get("not_before") is not None:
        found.add("not_before", _("cannot apply together with a fixed time of day"))
    if values.get("at_day", "any") != "any" and "at" in values and values["at"] is None:
        found.add("at", _("is missing: the day is chosen for a time"))
    check_windows(values.get("send_window") or [], found, "send_window")
    if values.get("when") is not None:
        check_condition(values["when"], found, "when")
    _check_variants(values.get("variants", []), found)
    if values.get("canary_guard") is not None:
        with found.within("canary_guard"):
            read_plan(values["canary_guard"])


def _check_followed(values: Mapping[str, Any], found: ErrorCollector) -> None:
    if not {"trigger", "from_nodes"} <= values.keys():
        return
    follows, followed = values["trigger"].strip() in TOUCH_TYPES, values["from_nodes"]
    if follows and not followed:
        found.add(
            "from_nodes", _("is missing: “%(trigger)s” is about touches of other nodes", trigger=values["trigger"])
        )
    elif followed and not follows:
        found.add("from_nodes", _("needs one of these triggers: %(types)s", types=", ".join(sorted(TOUCH_TYPES))))


def _check_variants(given: Any, found: ErrorCollector) -> None:
    if not isinstance(given, list) or len(given) > MOST_VARIANTS:
        found.add("variants", _("must be a list of at most %(most)s variants", most=MOST_VARIANTS))
        return
    seen: set[str] = set()
    for place, variant in enumerate(given):
        path = f"variants[{place}]"
        if not isinstance(variant, dict) or not variant.keys() <= {"key", "when", "template"}:
            found.add(path, _("must have key, when and template"))
            continue
        for name in ("key", "template"):
            if not isinstance(variant.get(name), str) or not variant[name]:
                found.add(f"{path}.{name}", _("is missing"))
        if isinstance(key := variant.get("key"), str) and key:
            with found.within(f"{path}.key"):
                check_key(key)
            if key in seen:
                found.add(f"{path}.key", _("“%(name)s” is the key of another variant", name=key))
            seen.add(key)
        check_condition(variant.get("when"), found, f"{path}.when")


@rules_of(Calendar)
def check_calendar(values: Mapping[str, Any], found: ErrorCollector) -> None:
    if "timezone" in values and not is_time_zone(values["timezone"]):
        found.add("timezone", _("“%(given)s” is not an IANA time zone, like Asia/Shanghai", given=values["timezone"]))
    if values.get("country") and not is_country(values["country"]):
        found.add(
            "country",
            _(
                "the holidays of “%(name)s” are not known; use a code like CN, or leave it empty",
                name=values["country"],
            ),
        )
    check_windows(values.get("send_window") or [], found, "send_window")
    closed, opened = (_check_days(values.get(field, []), field, found) for field in ("closed", "open"))
    if both := sorted(closed & opened):
        found.add("open", _("%(day)s is also among the closed days", day=both[0]))


def _check_days(given: Any, field: str, found: ErrorCollector) -> set[str]:
    """Add an error for each wrong day. Return the valid ones."""
    if not isinstance(given, list) or len(given) > MAX_OWN_DAYS:
        found.add(field, _("must be a list of at most %(most)s days", most=MAX_OWN_DAYS))
        return set()
    for place, day in enumerate(given):
        if not _is_day(day):
            found.add(f"{field}[{place}]", _("“%(day)s” is not a day like 2026-10-10", day=day))
    valid = set(filter(_is_day, given))
    if len(valid) < sum(map(_is_day, given)):
        found.add(field, _("names something twice"))
    return valid


def _is_day(text: Any) -> bool:
    try:
        return isinstance(text, str) and date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _check_own_delay_rules(stored: Any, found: ErrorCollector) -> None:
    known = {"by_level", "default", "active_within", "active_factor"}
    if not isinstance(stored, dict) or not stored.keys() <= known:
        found.add("delay_rules", _("must have %(known)s and nothing else", known=", ".join(sorted(known))))
        return
    with found.within("delay_rules"):
        own = ErrorCollector()
        for field in ("default", "active_within"):
            if field in stored or field == "default":
                with own.within(field):
                    check_seconds(stored.get(field))
        _check_levels(stored, own)
        with own.within("active_factor"):
            check_number(stored.get("active_factor", 1.0), 0.01, 10)
        own.raise_if_any()


@rules_of(DelayRule)
def check_delay_rule(values: Mapping[str, Any], found: ErrorCollector) -> None:
    _check_levels(values, found)


def _check_levels(values: Mapping[str, Any], found: ErrorCollector) -> None:
    levels = values.get("by_level", {})
    if not isinstance(levels, dict) or not all(isinstance(level, str) and len(level) <= 40 for level in levels):
        found.add("by_level", _("must name a duration for each level; levels have at most 40 characters"))
    else:
        for level, seconds in levels.items():
            with found.within(f"by_level.{level}"):
                check_seconds(seconds)


@rules_of(HarassmentRule)
def check_rule(values: Mapping[str, Any], found: ErrorCollector) -> None:
    kind, scope = values.get("kind"), values.get("scope")
    if scope == HarassmentRule.Subject.COMMUNITY and kind not in COUNTING_KINDS:
        found.add("scope", _("only a cap or a dedupe can be counted for a community"))
    for field in ("channel", "category", "tag"):
        if values.get(field) and kind not in COUNTING_KINDS:
            found.add(field, _("only a cap or a dedupe can count a part of the messages"))
    for field in {"cap": ("window", "limit"), "dedupe": ("window",)}.get(str(kind), ()):
        if field in values and values[field] is None:
            found.add(field, _("is missing"))
    if kind == "cap":
        _check_level_limits(values.get("limits", {}), scope, found)
    if kind == "quiet_hours":
        _check_quiet_hours(values, found)


def check_rule_channel(channel: str, channels: Container[str]) -> None:
    """Check what a rule counts. `channels` are the keys of channels; a rule may also name a kind."""
    if channel and channel not in channels and channel not in channel_kinds():
        raise InvalidInput.of("channel", _("there is no channel or channel kind “%(name)s”", name=channel))


def _check_level_limits(limits: Any, scope: Any, found: ErrorCollector) -> None:
    if not isinstance(limits, dict) or not all(isinstance(level, str) and 0 < len(level) <= 40 for level in limits):
        found.add("limits", _("must name a limit for each level; levels have 1 to 40 characters"))
        return
    for level, limit in limits.items():
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT:
            found.add(f"limits.{level}", _("must be a whole number from 1 to %(most)s", most=MAX_LIMIT))
    if limits and scope == HarassmentRule.Subject.COMMUNITY:
        found.add("limits", _("a level belongs to a customer: a cap for a community has one limit"))


def _check_quiet_hours(values: Mapping[str, Any], found: ErrorCollector) -> None:
    for field in ("quiet_from", "quiet_to"):
        if field in values and values[field] is None:
            found.add(field, _("is missing"))
    begin, end = values.get("quiet_from"), values.get("quiet_to")
    if begin is not None and begin == end:
        found.add("quiet_to", _("must differ from the start of quiet hours"))
    if "timezone" in values and not is_time_zone(values["timezone"]):
        found.add("timezone", _("“%(given)s” is not an IANA time zone, like Asia/Shanghai", given=values["timezone"]))


@rules_of(Template)
def check_template(values: Mapping[str, Any], found: ErrorCollector) -> None:
    if "content_type" in values and not values["content_type"].strip():  # the column accepts spaces
        found.add("content_type", _("is missing"))


@rules_of(TemplateText)
def check_template_text(values: Mapping[str, Any], found: ErrorCollector) -> None:
    if "locale" in values and not LOCALE.fullmatch(values["locale"]):
        found.add("locale", _("must be a language of at most 20 characters, like zh-hans or en"))
    if "body" in values and not values["body"].strip():
        found.add("body", _("is missing"))
    for field in ("subject", "body"):
        try:
            Text(values.get(field, ""))
        except InvalidTemplate as error:
            found.add(field, str(error))


@rules_of(ChannelConfig)
def check_channel(values: Mapping[str, Any], found: ErrorCollector) -> None:
    daily, monthly = values.get("daily_limit"), values.get("monthly_limit")
    if daily and monthly and monthly < daily:
        found.add("monthly_limit", _("must be at least the limit of a day, %(limit)s", limit=daily))
    _check_config(values, found)


def _check_config(values: Mapping[str, Any], found: ErrorCollector) -> None:
    if "kind" not in values or "config" not in values:
        return
    kind = channel_kinds().get(values["kind"])
    if kind is None:
        known = ", ".join(sorted(channel_kinds()))
        found.add(
            "kind", _("there is no channel kind “%(kind)s”; available: %(known)s", kind=values["kind"], known=known)
        )
        return
    with found.within("config"):
        kind(values["config"], timedelta(seconds=10))


def check_community(values: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    """Check a community. `kinds` maps channel keys to kinds: targets are named by channel key or by kind."""
    found = ErrorCollector()
    targets = values.get("targets", {})
    if not isinstance(targets, dict):
        found.add("targets", _("must be a mapping of channels to targets"))
        targets = {}
    for name, target in targets.items():
        kind = channel_kind_for_target(name, kinds)
        if kind is None:
            found.add(f"targets.{name}", _("there is no channel or channel kind “%(name)s”", name=name))
        elif not isinstance(target, dict):
            found.add(f"targets.{name}", _("must be a mapping"))
        else:
            with found.within(f"targets.{name}"):
                kind.validate_target(target)
    found.raise_if_any()


def channel_kind_for_target(name: str, kinds: Mapping[str, str]) -> type[Channel] | None:
    """Return the channel kind for the name of a target."""
    return channel_kinds().get(kinds.get(name, name))


@rules_of(WebhookSubscription)
def check_webhook(values: Mapping[str, Any], found: ErrorCollector) -> None:
    """Check a subscription of outgoing webhooks."""
    events = values.get("events", [])
    if "events" in values and not events:
        found.add("events", _("is missing"))
    elif not isinstance(events, list) or not all(each in WebhookEvent.values for each in events):
        found.add("events", _("must be one of %(known)s", known=", ".join(WebhookEvent.values)))
    else:
        with found.within("events"):
            check_texts(events, 64)
    filters = values.get("filter", {})
    if not isinstance(filters, dict) or not filters.keys() <= WEBHOOK_FILTERS:
        found.add("filter", _("must be a mapping of %(parts)s", parts=", ".join(sorted(WEBHOOK_FILTERS))))
        filters = {}
    for name, wanted in filters.items():
        with found.within(f"filter.{name}"):
            check_texts(wanted, 140)
            if name == "shop" and (wrong := [each for each in wanted if not all(each.partition("/"))]):
                raise ValueError(_("“%(given)s” is not like pdd/s1", given=wrong[0]))
    if "config" in values:
        config = values["config"]
        with found.within("config"):
            check_known_keys(config, {"url", "secret"})
        with found.within("config"):
            read_url(config)
        with found.within("config"):
            read_secrets(config)
        if not config.get("secret"):
            found.add("config.secret", _("is missing"))
