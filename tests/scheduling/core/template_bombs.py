"""Texts that ask for far too much work or memory. As a program: render each in a process of its own and measure it."""

from __future__ import annotations

import json
import os
import resource
import sys
from datetime import UTC, datetime
from time import process_time
from typing import Any

from scheduling.templating.compiler import InvalidTemplate, compile_text
from scheduling.templating.values import CannotRender

LOOP = "{% for a in event.data.rows %}BODY{% endfor %}"

#: By what they try. The first ones come from a review of the engine before this one.
BOMBS = {
    "list times number": "{{ event.data.list * 10000 }}",
    "number times list": "{{ 10000 * event.data.list }}",
    "text times number": "{{ 'ha' * 1000000000 }}",
    "product of hexadecimals": "{{ " + " * ".join(["0xffffffffffffffff"] * 900) + " }}",
    "long hexadecimal": "{{ 0x" + "f" * 60_000 + " * 0x" + "f" * 100 + " }}",
    "select in": "{{ event.data.list|select('in', event.data.list)|list|length }}",
    "long number": "{{ " + "9" * 5_000 + " }}",
    "number with underscores": "{{ " + "1_" * 30_000 + "1 }}",
    "nested ifs": "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "nested ifs in a loop": LOOP.replace("BODY", "{% if 1 %}" * 200 + "{% endif %}" * 200),
    "power": "{{ 9 ** (9 ** 9) }}",
    "product of data": "{{ " + " * ".join(["event.data.n"] * 30) + " }}",
    "product of huge data": "{{ event.data.huge * event.data.huge }}",
    "huge data": "{{ event.data.huge }}",
    "product of floats": "{{ event.data.float * event.data.float }}",
    "nots": "{{ " + "not " * 1_900 + "1 }}",
    "minuses": "{{ " + "-" * 3_900 + "1 }}",
    "parentheses": "{{ " + "(" * 1_900 + "1" + ")" * 1_900 + " }}",
    "lists in lists": "{{ " + "[" * 1_900 + "1" + "]" * 1_900 + " }}",
    "chain of conditions": "{{ " + "1 if 0 else " * 480 + "1 }}",
    "chain of filters": "{{ user.name" + "|upper" * 1_900 + " }}",
    "chain of sums": "{{ 1" + "+1" * 1_900 + " }}",
    "long path": "{{ event.data" + ".a" * 1_900 + "|upper }}",
    "chain of ors": "{{ 0" + " or 0" * 1_900 + " }}",
    "tokens": "{{ a }}" * 10_000,
    "unclosed blocks": "{{ " * 20_000,
    "unclosed comments": "{#" * 30_000,
    "unclosed raws": "{% raw %}" * 6_000,
    "quotes": "{{ '" + "a'" * 30_000,
    "escapes": "{{ '" + "\\" * 60_001,
    "length of the text": "x" * 1_000_000,
    "loop in loop": LOOP.replace("BODY", LOOP),
    "empty loop": "{% for a in event.data.list %}{% endfor %}",
    "loop that chooses": "{% for a in event.data.rows if a in event.data.list %}{% endfor %}",
    "recursive loop": "{% for a in event.data.rows recursive %}{{ loop(a) }}{% endfor %}",
    "range": "{% for a in range(100000000) %}x{% endfor %}",
    "macro": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "loop of large texts": LOOP.replace("BODY", "{{ event.data.text }}"),
    "loop of upper": LOOP.replace("BODY", "{{ event.data.chinese|upper|length }}"),
    "loop of title": LOOP.replace("BODY", "{{ event.data.words|title|length }}"),
    "loop of urlencode": LOOP.replace("BODY", "{{ event.data.chinese|urlencode|length }}"),
    "loop that tests much": (
        "{% for a in event.data.rows if " + " and ".join(["(1 and 1 and 1 and 1 and 1 and 1 and 1 and 1)"] * 30)
        + " and 0 %}{% endfor %}"
    ),
    "loop of truncate": LOOP.replace("BODY", "{{ event.data.text|truncate(60000)|length }}"),
    "loop of trim": LOOP.replace("BODY", "{{ event.data.words|trim|length }}"),
    "loop of in": LOOP.replace("BODY", "{{ event.data.needle in event.data.text }}"),
    "loop of in a list": LOOP.replace("BODY", "{{ 'a' in event.data.list }}"),
    "loop of equal": LOOP.replace("BODY", "{{ event.data.text == event.data.copy }}"),
    "loop of in a list of texts": LOOP.replace(
        "BODY", "{{ event.data.text in [" + "event.data.copy, " * 100 + "] }}"
    ),
    "loop of dates": LOOP.replace("BODY", "{{ event.time.strftime('" + "%c" * 20_000 + "') }}"),
    "loop of short dates": LOOP.replace("BODY", "{{ event.time.strftime('" + "%c" * 100 + "')|upper|length }}"),
    "loop of numbers": LOOP.replace("BODY", "{{ event.data.digits|int }}"),
    "loop of floats": LOOP.replace("BODY", "{{ event.data.digits|float }}"),
    "loop of join": LOOP.replace("BODY", "{{ event.data.rows|join(',', 'a')|length }}"),
    "loop of join with a long attribute": LOOP.replace(
        "BODY", "{{ event.data.rows|join(',', '" + "a." * 10_000 + "')|length }}"
    ),
    "loop of replace": LOOP.replace("BODY", "{{ event.data.words|replace('a', 'b')|length }}"),
    "loop of wide formats": LOOP.replace("BODY", "{{ '%999d'|format(1) }}"),
    "loop of long formats": LOOP.replace("BODY", "{{ '" + "a" * 60_000 + "%d'|format(a.a) }}"),
    "loop of growing replace": LOOP.replace("BODY", "{{ event.data.short|replace('a', '" + "b" * 60 + "') }}"),
    "deep data": "{{ event.data.deep|join }}",
    "replace": "{{ event.data.words|replace('a', event.data.words) }}",
    "growing replace": "{{ 'aaaaaaaaaa'" + "|replace('a', 'aaaaaaaaaa')" * 11 + " }}",
    "format of texts": "{{ '" + "%s" * 600 + "'|format(" + ",".join(["event.data.text"] * 600) + ") }}",
    "wide format": "{{ '%1000000000d'|format(1) }}",
    "format as wide as the data": "{{ '%*d'|format(event.data.n, 1) }}",
    "format of many": "{{ '" + "%999d" * 300 + "'|format(" + ",".join(["1"] * 300) + ") }}",
    "wide date": "{{ event.time.strftime('%1000000000Y') }}",
    "long date": "{{ event.time.strftime('" + "%c" * 30_000 + "') }}",
    "digits of round": "{{ 5|round(-1000000000) }}",
}  # fmt: skip


def names() -> dict[str, Any]:
    """What a text may name, with event data beyond any that is accepted."""
    deep: list[Any] = []
    for _ in range(50_000):
        deep = [deep]
    data = {
        "list": list(range(60_000)), "rows": [{"a": each, "t": "y" * 50} for each in range(3_000)],
        "text": "a" * 244_000, "chinese": "字" * 60_000, "words": "a " * 32_000, "n": 10**17, "huge": 10**4_000,
        "float": 1e308, "deep": deep, "copy": "a" * 243_999 + "b", "needle": "a" * 1_000 + "b", "digits": "9" * 4_000,
        "short": "a" * 1_000,
    }  # fmt: skip
    return {
        "user": {"id": "u1", "name": "Ann", "level": "vip", "locale": "en", "timezone": ""},
        "event": {"id": "1", "source": "shop", "type": "order.paid", "time": datetime.now(UTC), "data": data},
        "chat": {"id": "c1"},
    }


def measure(source: str, known: dict[str, Any]) -> dict[str, Any]:
    """In a fork: the error, seconds of processor time and bytes of resident memory above those before."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, process_time()
        try:
            compile_text(source).render(known)
            ended = ""
        except (CannotRender, InvalidTemplate) as error:
            ended = f"{type(error).__name__}: {error}"
        except BaseException as error:
            ended = f"unexpected {type(error).__name__}: {error}"
        seconds, after = process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        os.write(
            writer, json.dumps({"ended": ended[:200], "seconds": seconds, "bytes": (after - before) * 1024}).encode()
        )
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        answer = answers.read()
    os.waitpid(pid, 0)
    return json.loads(answer)  # type: ignore[no-any-return]


if __name__ == "__main__":
    given = names()
    compile_text("{{ user.id|upper }}").render(names())  # what is imported and allocated once is not counted
    json.dump({name: measure(source, given) for name, source in BOMBS.items()}, sys.stdout)
