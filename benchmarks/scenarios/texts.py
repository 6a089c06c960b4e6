"""Measure what the rendering of a message costs, with the values that a text may name."""

from __future__ import annotations

import time

from benchmarks.environment import Bench
from benchmarks.workload import BODY

GOAL = 10.0
TEXTS = {
    "no variable": "您好，您的使用指南已经准备好了。",
    "one variable": "您好 {{ user.name }}，您的使用指南已经准备好了。",
    "two variables": BODY,
    "a condition and a default": '{% if user.level == "vip" %}贵宾{% endif %}{{ event.data.note|default:"-" }}',
    "a date": '{{ event.time|date:"Y-m-d H:i" }}',
    "a loop of 20": "{% for line in event.data.lines %}{{ forloop.counter }} {{ line.sku }}\n{% endfor %}",
}


def texts(bench: Bench) -> None:
    from django.utils.timezone import now

    from scheduling.ids import new_id
    from scheduling.policy.specs import CustomerSpec, EventSpec, TemplateSpec, TextSpec
    from scheduling.templating import render_message

    data = {"item": "茶具", "lines": [{"sku": f"tea-{number}"} for number in range(20)]}
    event = EventSpec(new_id(), "shop", "1", "order.paid", now(), "u-1", "c-1", data)
    customer = CustomerSpec(1, "u-1", "王小明", "vip", "zh-hans", "Asia/Shanghai")
    count = bench.size(20_000, 2_000)
    for _ in range(bench.repeat):
        for name, body in TEXTS.items():
            template = TemplateSpec(1, name, 1, "guide", "service", (TextSpec("zh-hans", "", body),))
            render_message(template, customer, event)
            begun = time.process_time()
            for _ in range(count):
                render_message(template, customer, event)
            cost = (time.process_time() - begun) / count * 1e6
            goal = GOAL if name == "one variable" else None
            bench.figures.add("texts", f"{name}: processor time", cost, "µs", goal=goal)
