"""Conditions of nodes: rows, groups, kinds of values, and what is refused."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduling.error_text import ErrorText
from scheduling.errors import ErrorCollector
from scheduling.policy.node_conditions import (
    COMPARING,
    MOST_ROWS,
    OPERATORS,
    WITH_LIST,
    WITHOUT_VALUE,
    ConditionRow,
    Facts,
    check_condition,
    compile_condition,
    compile_reader,
)
from tests.support.tables import each_row

FACTS = Facts(
    data={"total": 520, "paid": "49.90", "vip": True, "items": [{"sku": "A1"}, {"sku": "B2"}], "day": "2026-05-01"},
    chat_id="c1",
    level="vip",
    tags=("new", "tea"),
    attributes={"city": "杭州", "age": 31},
    earlier={"order.paid": 2},
    locale="en",
    event_type="order.paid",
    source="shop",
)


def compile_row(field, op, value=None):
    return ConditionRow(field, op, value, compile_reader(field))


def holds(field, op, value=None, facts=FACTS):
    return compile_row(field, op, value).holds(facts)


@each_row(
    "field, op, value, expected",
    [
        ("event.data.total", "gte", 520, True),
        ("event.data.total", "gt", 520, False),
        ("event.data.total", "eq", "520", True),
        ("event.data.paid", "lt", 50, True),
        ("event.data.vip", "eq", True, True),
        ("event.data.vip", "eq", 1, False),
        ("event.data.items.1.sku", "eq", "B2", True),
        ("event.data.items.7.sku", "exists", None, False),
        ("event.data.day", "lte", "2026-05-01T00:00:00+00:00", True),
        ("event.data.none", "ne", "x", True),
        ("event.data.none", "gte", 0, False),
        ("event.data.total.deeper", "absent", None, True),
        ("customer.level", "in", ("vip", "gold"), True),
        ("customer.tags", "contains", "tea", True),
        ("customer.attributes.city", "contains", "杭", True),
        ("customer.attributes.age", "gt", 30, True),
        ("chat_id", "eq", "c1", True),
        ("event.type", "starts_with", "order.", True),
        ("event.source", "eq", "shop", True),
        ("customer.locale", "in", ("en", "de"), True),
        ("event.data.total", "starts_with", "5", False),
        ("customer.events.order.paid.count", "eq", 2, True),
        ("customer.events.refund.paid.count", "eq", 0, True),
    ],
)
def test_row_of_each_kind_compares_by_value(field, op, value, expected):
    assert holds(field, op, value) is expected


def test_group_any_inside_all_holds_with_one_of_its_rows():
    condition = compile_condition({
        "all": [
            {"field": "event.data.total", "op": "gte", "value": 500},
            {"any": [
                {"field": "customer.level", "op": "eq", "value": "gold"},
                {"field": "customer.events.order.paid.count", "op": "eq", "value": 0},
            ]},
        ]
    })  # fmt: skip
    assert condition is not None
    assert condition.counted == {"order.paid"}
    assert not condition.holds(FACTS)
    assert str(condition.failing(FACTS)) == "any(customer.level eq gold; customer.events.order.paid.count eq 0)"
    assert condition.holds(FACTS._replace(earlier={}))
    assert condition.holds(FACTS._replace(level="gold"))
    assert str(condition.failing(FACTS._replace(data={}))) == "event.data.total gte 500"


def test_observed_value_of_a_personal_text_is_not_shown():
    assert compile_row("event.data.day", "eq", "x").show_observed(FACTS) == "other"
    assert compile_row("customer.attributes.city", "eq", "x").show_observed(FACTS) == "other"
    assert compile_row("event.data.total", "eq", "x").show_observed(FACTS) == "520"
    assert compile_row("customer.tags", "exists", None).show_observed(FACTS) == "new, tea"


@each_row(
    "given, path",
    [
        ([], "when"),
        ({"none": [{}]}, "when"),
        ({"all": [5]}, "when.all[0]"),
        ({"all": [{"field": "total", "op": "eq", "value": 1}]}, "when.all[0].field"),
        ({"all": [{"field": "event.data..x", "op": "eq", "value": 1}]}, "when.all[0].field"),
        ({"all": [{"field": "event.data.x", "op": "like", "value": 1}]}, "when.all[0].op"),
        ({"all": [{"field": "event.data.x", "op": "eq", "value": {}}]}, "when.all[0].value"),
        ({"all": [{"field": "event.data.x", "op": "gte", "value": "much"}]}, "when.all[0].value"),
        ({"all": [{"field": "event.data.x", "op": "exists", "value": 1}]}, "when.all[0].value"),
        ({"all": [{"field": "customer.tags", "op": "eq", "value": "a"}]}, "when.all[0].op"),
        ({"all": [{"field": "customer.events.order.paid.count", "op": "eq", "value": -1}]}, "when.all[0].value"),
        ({"all": [{"any": [{"all": []}]}]}, "when.all[0].any[0]"),
        ({"any": [{"field": "event.data.x", "op": "exists"}] * (MOST_ROWS + 1)}, "when"),
    ],
)
def test_wrong_condition_names_each_wrong_place(given, path):
    found = ErrorCollector()
    check_condition(given, found, "when")
    assert [each.field for each in found.errors] == [path]
    assert all(isinstance(each.message, ErrorText) for each in found.errors), "a page translates it"


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["1", "1.5"])
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner)
)
fields = st.sampled_from(
    ["event.data.a", "event.data.a.0", "customer.level", "customer.attributes.a", "chat_id", "event.type"]
)
values = st.booleans() | st.integers() | st.text(min_size=1, max_size=8)


@st.composite
def rows(draw):
    op = draw(st.sampled_from(OPERATORS))
    row = {"field": draw(fields), "op": op}
    if op in WITH_LIST:
        row["value"] = draw(st.lists(values, min_size=1, max_size=4))
    elif op in COMPARING:
        row["value"] = draw(st.integers() | st.just("2026-05-01"))
    elif op not in WITHOUT_VALUE:
        row["value"] = draw(values)
    return row


groups = st.builds(lambda join, parts: {join: parts}, st.sampled_from(["all", "any"]), st.lists(rows(), min_size=1))
conditions = st.builds(
    lambda join, parts: {join: parts},
    st.sampled_from(["all", "any"]),
    st.lists(rows() | groups.filter(lambda group: sum(map(len, group.values())) < 4), min_size=1, max_size=4),
)
any_facts = st.builds(
    lambda a, level, chat: Facts({"a": a}, chat, level, attributes={"a": a}), anything, st.text(max_size=4), st.text()
)


@settings(max_examples=50)
@given(conditions, any_facts)
def test_accepted_condition_judges_any_event_by_its_rows(given_one, facts):
    found = ErrorCollector()
    check_condition(given_one, found, "when")
    assert found.errors == []
    condition = compile_condition(given_one)
    assert condition is not None

    def expected(parts):
        ((join, listed),) = parts.items()
        held = [
            compile_condition({"all": [each]}).holds(facts) if "field" in each else expected(each) for each in listed
        ]
        return all(held) if join == "all" else any(held)

    assert condition.holds(facts) is expected(given_one)
    assert (condition.failing(facts) is None) is condition.holds(facts)
    if part := condition.failing(facts):
        assert not part.holds(facts)
        assert str(part)
        assert isinstance(part.show_observed(facts), str)


@given(anything)
def test_any_input_is_accepted_or_refused_with_a_place(given_one):
    found = ErrorCollector()
    check_condition(given_one, found, "when")
    assert found.errors or compile_condition(given_one)
    assert all(each.field.startswith("when") and each.message for each in found.errors)


@settings(max_examples=50)
@given(st.sampled_from(["eq", "in", "contains", "gte", "gt"]), any_facts)
def test_negative_operator_is_the_opposite_of_the_positive_one(op, facts):
    opposite = {
        "eq": "ne", "in": "not_in", "contains": "not_contains", "gte": "lt", "gt": "lte",
    }[op]  # fmt: skip
    value = ("1", 2) if op == "in" else 1
    pair = holds("event.data.a", op, value, facts), holds("event.data.a", opposite, value, facts)
    assert pair[0] is not pair[1] or (op in ("gte", "gt") and pair == (False, False))
