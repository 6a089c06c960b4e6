from __future__ import annotations

from datetime import UTC, datetime, timedelta

from django.utils.formats import date_format
from django.utils.translation import override

from scheduling.admin.form_fields import DelayRulesField, DurationsField, LevelsField, NamesField
from scheduling.admin.labels import list_reasons, translate_reason
from scheduling.admin.touches.timeline import format_verdict_figure
from scheduling.monitoring.duration_text import describe_duration
from tests.support.tables import each_row


@each_row(
    "span, english, chinese",
    [
        (timedelta(minutes=15), "15 minutes", "15 分钟"),
        (timedelta(hours=2), "2 hours", "2 小时"),
        (timedelta(days=7), "7 days", "7 天"),
        (timedelta(days=1, hours=2, minutes=3), "1 day 2 hours", "1 天 2 小时"),
        (timedelta(0), "at once", "立即"),
    ],
)
def test_duration_is_described_in_both_languages(span: timedelta, english: str, chinese: str) -> None:
    with override("en"):
        assert describe_duration(span) == english
    with override("zh-hans"):
        assert describe_duration(span) == chinese


def test_reason_codes_are_translated_or_kept() -> None:
    with override("zh-hans"):
        assert translate_reason("cap") == "客户频次已达上限"
        assert translate_reason("http_503") == "接收方返回 HTTP 503"
        assert translate_reason("by:ann") == "由 ann 取消"
        assert translate_reason("event:order.paid") == "被事件 order.paid 取消"
        assert translate_reason("brand_new") == "brand_new"


@each_row(
    "field, value",
    [
        (DelayRulesField(), {"by_level": {"vip": 3600}, "default": 86400, "active_within": 90, "active_factor": 0.6}),
        (LevelsField(), {"vip": 3600, "normal": 7200.5}), (DurationsField(), [10, 60, 0.25]),
        (NamesField(), ["a", "b c"]),
    ],
)  # fmt: skip
def test_field_text_round_trips(field: object, value: object) -> None:
    text = field.prepare_value(value)  # type: ignore[attr-defined]
    assert field.clean(text) == value  # type: ignore[attr-defined]
    assert not field.has_changed(value, text)  # type: ignore[attr-defined]


def test_verdict_figures_are_translated() -> None:
    with override("zh-hans"):
        assert format_verdict_figure("3 in 1d") == "1 天内 3 次"
        assert format_verdict_figure("3 (1 unsettled)") == "3 次，其中 1 次正在发送"
        assert ">2026-01-02 11:04:05</time>" in format_verdict_figure("2026-01-02T03:04:05+00:00")
        assert format_verdict_figure("marketing") == "营销（退订后不发）"
        assert format_verdict_figure("c1") == "c1"


@each_row("language", ["en", "zh-hans"])
def test_each_reason_has_its_own_label_and_dates_one_format_in_both_languages(language: str) -> None:
    at = datetime(2026, 11, 6, 8, 5, 9, tzinfo=UTC)
    with override(language):
        labels = [str(label) for label in list_reasons().values()]
        assert (date_format(at), date_format(at, "DATETIME_FORMAT")) == ("2026-11-06", "2026-11-06 08:05:09")
    assert sorted(labels) == sorted(set(labels))
