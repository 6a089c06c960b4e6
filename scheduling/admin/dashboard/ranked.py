"""Charts of what is commonest: a few by name, and the others together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scheduling.admin.dashboard.charts import Bucket, Chart, Series, stacked
from scheduling.admin.dashboard.columns import Span

SHOWN = 5


@dataclass(frozen=True, slots=True)
class Names:
    """How codes are called, and where they lead: `link(code, span)`, "" for all codes, None for the whole time."""

    words: Callable[[str], str]
    others: str
    link: Callable[[str, Span | None], str]


def ranked(
    key: str, title: str, spans: Sequence[Span], counts: Sequence[Counter[str] | None], names: Names
) -> Chart:  # fmt: skip
    total: Counter[str] = sum((each for each in counts if each), Counter())
    common = [code for code, _count in total.most_common(SHOWN)]
    series = [Series(code, names.words(code), f"hue{number}") for number, code in enumerate(common)]
    if len(total) > len(common):
        series.append(Series("", names.others, "quiet"))

    def bucket(span: Span, found: Counter[str] | None) -> Bucket:
        shown: Counter[str] = Counter()
        for code, count in (found or {}).items():
            shown[code if code in common else ""] += count
        links = {each.key: names.link(each.key, span) for each in series}
        return Bucket(span.label, None if found is None else shown, links)

    buckets = [bucket(*each) for each in zip(spans, counts, strict=True)]
    return stacked(key, title, series, buckets, lambda code: names.link(code, None))
