"""`platforms`, `flows` and `shops` in a file: read, judged, stored, exported."""

from datetime import timedelta

import pytest

from config.environment import ROOT
from rpa_tasks.jobs.publish import PublishRequest, publish_job
from rpa_tasks.models import Breaker, Flow, Job, Lane, Platform, Shop

pytestmark = pytest.mark.django_db

DEMO = ROOT / "examples" / "demo_shop" / "shops.yaml"

MARKET = """
version: 1
platforms: [{key: pdd, name: 拼多多}]
flows:
  - platform: pdd
    task_type: sync_order
    command: ["true", run, --flow, "{flow}", --param, "{param}", --timeout, "{timeout}"]
    idempotent: false
shops: [{platform: pdd, shop_id: s1, name: 旗舰店}]
"""
EVERYTHING = """
version: 1
platforms:
  - key: pdd
    name: 拼多多
    dedicated_queue: true
    paused: true
    backlog_limit: 5
    breaker_threshold: 7
    check: sync_order
flows:
  - platform: pdd
    task_type: sync_order
    command: ["true", "{param}"]
    timeout: 5m
    needs_browser: false
    idempotent: true
    exit_codes: {transient: [70], business: [65, 66], session: [77], platform: [75]}
    payload_schema: {type: object, properties: {since: {type: string}}}
    needs_result: true
    retry_delays: [10s, 1m]
    clear_cookies: true
    environment: [DATABASE_URL, HTTPS_PROXY]
    env: {RPA_MODE: fast, RPA_EMPTY: ""}
    cwd: /opt/rpa
    path: [/opt/rpa/bin]
    param_style: nested
    dedupe: {key: none, window: 1h30m, rerun: after_failure}
shops:
  - {platform: pdd, shop_id: s1, name: 旗舰店, dedicated_queue: true, paused: true, profile_id: old.1, backlog_limit: 9}
"""


def test_apply_market_stores_defaults(apply):
    assert apply(MARKET) == "platforms\n  + pdd\nflows\n  + pdd/sync_order\nshops\n  + pdd/s1\napplied\n"
    flow, shop = Flow.objects.get(), Shop.objects.get()
    assert (flow.name, flow.command[0], flow.timeout) == ("pdd_sync_order", "true", timedelta(minutes=10))
    assert (flow.needs_browser, flow.idempotent, flow.exit_codes, flow.retry_delays) == (True, False, {}, [30, 60, 120])
    assert (shop.platform.name, shop.name, shop.backlog_limit, shop.profile) == ("拼多多", "旗舰店", 100, "pdd-s1")
    assert Breaker.objects.filter(platform=shop.platform).exists()
    assert Lane.objects.filter(shop=shop).exists()


def test_apply_market_stores_all_keys(apply):
    apply(EVERYTHING)
    platform, flow, shop = Platform.objects.get(), Flow.objects.get(), Shop.objects.get()
    assert (platform.dedicated_queue, platform.paused, platform.backlog_limit, platform.breaker_threshold) == (
        True, True, 5, 7,
    )  # fmt: skip
    assert (flow.timeout, flow.needs_browser, flow.idempotent, flow.needs_result, flow.clear_cookies) == (
        timedelta(minutes=5), False, True, True, True,
    )  # fmt: skip
    assert flow.exit_codes == {"transient": [70], "business": [65, 66], "session": [77], "platform": [75]}
    assert flow.payload_schema == {"type": "object", "properties": {"since": {"type": "string"}}}
    assert (flow.retry_delays, flow.environment) == ([10, 60], ["DATABASE_URL", "HTTPS_PROXY"])
    assert (flow.env, flow.cwd) == ({"RPA_MODE": "fast", "RPA_EMPTY": ""}, "/opt/rpa")
    assert (flow.path, flow.param_style, flow.dedupe_by) == (["/opt/rpa/bin"], "nested", "none")
    assert (flow.dedupe_window, flow.dedupe_rerun) == (timedelta(minutes=90), "after_failure")
    assert platform.check_task_type == "sync_order"
    assert (shop.dedicated_queue, shop.paused, shop.profile, shop.backlog_limit) == (True, True, "old.1", 9)


def test_apply_of_export_changes_nothing(apply, export):
    for text in (MARKET, EVERYTHING):
        apply(text)
        before = export()
        assert apply(before) == "no changes\n"
        assert export() == before


def test_apply_section_retires_unlisted_shops(apply):
    apply(MARKET)
    assert apply("shops: [{platform: pdd, shop_id: s2}]") == "shops\n  + pdd/s2\n  - pdd/s1 (retired)\napplied\n"
    assert Shop.objects.get(shop_id="s1").retired_at
    assert apply("shops: [{platform: pdd, shop_id: s1}]").startswith("shops\n  + pdd/s1 (was retired)\n")
    assert Shop.objects.get(shop_id="s1").retired_at is None


def test_apply_keeps_platform_that_is_in_use(apply, refusal_of):
    apply(MARKET)
    assert refusal_of("platforms: []")[:2] == [
        "platforms: platform “pdd” is not listed, but flow “pdd/sync_order” still uses it",
        "platforms: platform “pdd” is not listed, but shop “pdd/s1” still uses it",
    ]
    assert "pdd (retired)" in apply("{platforms: [], flows: [], shops: []}")


def test_apply_notes_jobs_that_retirement_cancels(apply, sent_wakeups):
    apply(MARKET)
    publish_job(PublishRequest(platform="pdd", shop_id="s1", task_type="sync_order", delay=timedelta(hours=1)))
    said = apply("{shops: [], flows: []}", "--dry-run")
    assert "note: shop “pdd/s1” is retired: its waiting jobs (1) are cancelled\n" in said
    assert "note: flow “pdd/sync_order” is retired: its waiting jobs (1) are cancelled\n" in said
    Job.objects.update(state="succeeded", lease_until=None)
    assert "note" not in apply("{shops: [], flows: []}", "--dry-run")


# --- paused shops ---------------------------------------------------------------------------------------------------


def test_apply_without_pause_key_keeps_pause(apply):
    apply(MARKET)
    Shop.objects.update(paused=True)
    Platform.objects.update(paused=True)
    said = apply(MARKET.replace("旗舰店", "一店"))
    assert "note: shops[0]: is paused and stays so; “paused: false” would end it\n" in said
    assert Shop.objects.filter(paused=True, name="一店").exists()
    assert Platform.objects.filter(paused=True).exists()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("where", ["name: 拼多多", "name: 旗舰店"])
def test_apply_that_ends_pause_wakes_shop(apply, sent_wakeups, where):
    apply(MARKET.replace(where, f"{where}, paused: true"))
    publish_job(PublishRequest(platform="pdd", shop_id="s1", task_type="sync_order"))
    sent_wakeups.clear()
    apply(MARKET.replace(where, f"{where}, paused: false"))
    assert [wakeup.owner for wakeup in sent_wakeups] == [Shop.objects.get().pk]


# --- what is wrong ----------------------------------------------------------------------------------------------------


BAD_SHOPS = [
    ("{platform: temu, shop_id: s1}", "shops[0].platform: there is no platform “temu”"),
    ("{platform: pdd}", "shops[0].shop_id: is missing"),
    ("{platform: pdd, shop_id: 12345}", "shops[0].shop_id: must be text; put it in quotes"),
    ("{platform: pdd, shop_id: a/b}", "shops[0].shop_id: must start with a letter or digit"),
    ("{platform: pdd, shop_id: s1, profile_id: ../x}", "shops[0].profile_id: names a directory"),
    ("{platform: pdd, shop_id: s1, backlog_limit: 0}", "shops[0].backlog_limit: must be between 1 and 1000000"),
    ("{platform: pdd, shop_id: s1, login_state: ok}", "shops[0].login_state: is not known here"),
    (
        "{platform: pdd, shop_id: s1}, {platform: pdd, shop_id: s1}",
        "shops[1]: “pdd/s1” is listed already, at shops[0]",
    ),
]
BAD_FLOWS = [
    ('command: [bash, -c, "run {param}"]', "flows[0].command: "),
    ('command: ["true", "{param}"], dedupe: {key: shop}', "flows[0].dedupe.key: must be one of"),
    ('command: ["true", "{param}"], dedupe: {window: 32d}', "flows[0].dedupe.window: must be between 1s and 31d"),
    ('command: ["true", "{param}"], dedupe: {rerun: twice}', "flows[0].dedupe.rerun: must be one of"),
    ("command: rpa-cli run", "flows[0].command: must be a list"),
    ('command: ["true", "{param}"], timeout: 900ms', "flows[0].timeout: must be between 1s and 1d"),
    ('command: ["true", "{param}"], exit_codes: {fatal: [1]}', "flows[0].exit_codes.fatal: is not known here"),
    ('command: ["true", "{param}"], exit_codes: {business: [0]}', "flows[0].exit_codes.business: must be a list"),
    (
        'command: ["true", "{param}"], exit_codes: {business: [65], session: [77, 65]}',
        "flows[0].exit_codes.session: 65 is listed already, as business",
    ),
    ('command: ["true", "{param}"], payload_schema: {type: nope}', "flows[0].payload_schema.type: "),
    ('command: ["true", "{param}"], payload_schema: [1]', "flows[0].payload_schema: must be a mapping"),
    ('command: ["true", "{param}"], environment: [A, A]', "flows[0].environment: names something twice"),
    ('command: ["true", "{param}"], env: [A]', "flows[0].env: must be a mapping"),
    ('command: ["true", "{param}"], env: {A: 1}', "flows[0].env.A: must be text"),
    ('command: ["true", "{param}"], env: {A-B: x}', "flows[0].env: “A-B” is not the name"),
    ('command: ["true", "{param}"], env: {PATH: /opt}', "flows[0].env: PATH is set"),
    ('command: ["true", "{param}"], env: {LD_PRELOAD: /x.so}', "flows[0].env: LD_PRELOAD is never given"),
    (
        'command: ["true", "{param}"], env: {AFTERTOUCH_RPA_FLOWS: /run}',
        "flows[0].env: AFTERTOUCH_RPA_FLOWS is never",
    ),
    ('command: ["true", "{param}"], env: {A: x}, environment: [A]', "flows[0].env: A is named in environment"),
    ('command: ["true", "{param}"], cwd: opt/rpa', "flows[0].cwd: must be an absolute folder"),
]
BAD_PLATFORMS = [
    ("{key: PDD}", "platforms[0].key: must be lower-case letters"),
    ("{key: pdd, breaker_threshold: 0}", "platforms[0].breaker_threshold: must be between 1 and 100"),
    ("{key: pdd, paused: maybe}", "platforms[0].paused: must be true or false"),
]


def test_apply_with_invalid_rows_names_problem(refusal_of):
    flow = "{platforms: [{key: pdd}], flows: [{platform: pdd, task_type: sync, idempotent: true, {}}]}"
    texts = [(f"{{platforms: [{{key: pdd}}], shops: [{row}]}}", problem) for row, problem in BAD_SHOPS]
    texts += [(flow.replace("{}", row), problem) for row, problem in BAD_FLOWS]
    texts += [(f"platforms: [{row}]", problem) for row, problem in BAD_PLATFORMS]
    wrong = {}
    for text, problem in texts:
        line = refusal_of(text)[0]
        if not line.startswith(problem) or (problem.endswith(" ") and line == problem):
            wrong[text] = line
    assert wrong == {}
    assert not Flow.objects.exists()


def test_apply_refuses_equal_default_profiles(refusal_of):
    said = refusal_of(
        """
        platforms: [{key: a}, {key: a-b}]
        shops: [{platform: a, shop_id: b-c}, {platform: a-b, shop_id: c}]
        """
    )
    assert said[0] == "shops[1].profile_id: browser profile “a-b-c” is used at shops[0] too"


def test_apply_names_the_collisions_of_a_shop(refusal_of):
    browser = 'browser: {provider: {cdp_url: "http://x:1"}}'
    first = f"{{platform: pdd, shop_id: s0, profile_id: one, {browser}}}"
    profile = "shops[1].profile_id: browser profile “one” is used at shops[0] too"
    shared = "shops[1].browser.provider.cdp_url: this browser is used at shops[0] too"
    for second, problems in [
        ("profile_id: one", [profile]),
        (browser, [shared]),
        (f"profile_id: one, {browser}", [profile, shared]),
    ]:
        text = f"platforms: [{{key: pdd}}]\nshops: [{first}, {{platform: pdd, shop_id: s1, {second}}}]"
        assert refusal_of(text)[:-1] == problems


def test_apply_refuses_profile_of_retired_shop(apply, refusal_of):
    apply(EVERYTHING)
    said = refusal_of("shops: [{platform: pdd, shop_id: s2, profile_id: old.1}]")
    assert said[0] == "shops[0].profile_id: browser profile “old.1” belongs to pdd/s1; set another one"
    apply("shops: []")
    assert refusal_of("shops: [{platform: pdd, shop_id: s2, profile_id: old.1}]")[0] == said[0]


def test_apply_requires_whether_a_flow_is_idempotent(refusal_of):
    """The form asks for it, too: a wrong guess repeats an effect, or leaves work to a person."""
    flow = '{platform: pdd, task_type: sync, command: ["true", "{param}"]}'
    assert refusal_of(f"{{platforms: [{{key: pdd}}], flows: [{flow}]}}")[0] == "flows[0].idempotent: is missing"


def test_apply_notes_program_missing_on_this_machine(apply):
    flow = '{platform: pdd, task_type: sync, idempotent: true, command: [no-such-program, "{param}"]}'
    said = apply(f"{{platforms: [{{key: pdd}}], flows: [{flow}]}}")
    assert "flow pdd/sync: no-such-program was not found on this machine" in said
    assert said.endswith("applied\n")
    assert Flow.objects.get().command[0] == "no-such-program"


def test_check_names_a_flow_of_its_own_platform_that_stays(apply, refusal_of):
    flow = '{platform: %s, task_type: login, idempotent: true, command: ["true", "{param}"]}'
    platforms = "platforms: [{key: pdd, check: login}, {key: temu}]"
    assert refusal_of(f"{{{platforms}, flows: [{flow % 'temu'}]}}")[0].startswith("platforms[0].check: pdd has no")
    apply(f"{{{platforms}, flows: [{flow % 'pdd'}]}}")
    assert apply(f"{{{platforms}}}") == "no changes\n"
    assert "it no longer checks logins of its platform" in apply("flows: []")
    assert refusal_of(f"{{{platforms}}}")[0].startswith("platforms[0].check: pdd has no")


# --- the demo's file --------------------------------------------------------------------------------------------------


def test_apply_of_demo_file_works(apply, export):
    apply(DEMO.read_text(encoding="utf-8"))
    assert [str(shop.shop_id) for shop in Shop.objects.all()] == ["s1", "s2", "s3"]
    for flow in Flow.objects.all():
        assert (flow.idempotent, flow.exit_codes, flow.environment) == (True, {}, ["DATABASE_URL"])
    assert apply(export()) == "no changes\n"
