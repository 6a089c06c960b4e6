"""The flow's tab in a real browser that is not its own."""

import signal
import socket
import sys

from rpa_tasks.flow_sdk.flow import open_browser
from rpa_tasks.outcomes import CommandResult, ExitCause
from rpa_tasks.supervisor.client import Progress, RunSpec, SupervisedCommand
from tests.support.waiting import eventually

OPEN = 'flow.page.goto(flow.text("site"))\n'
LOG_IN = OPEN + (
    "page = flow.page\npage.get_by_label('Shop').fill(flow.shop_id)\n"
    "page.get_by_role('button', name='Log in').click()\npage.wait_for_selector('[data-shop]')"
)
#: Seconds of a flow and of its supervisor, tried in turn: a slow machine ends the flow before it has its page.
TIMEOUTS = ((4, 6), (10, 20), (40, 80))


def test_flow_opens_own_tab_and_closes_it(flows, site, port, tabs):
    before = tabs()
    flows.write(
        "open",
        OPEN + "title = flow.page.title()\n"
        "with flow.page.context.expect_page():\n    flow.page.evaluate('() => { open(location.href) }')\n"
        "return {'title': title, 'tabs': len(flow.browser.contexts[0].pages)}",
    )
    run = flows.run("open", {"site": site.url}, debug_port=port)
    assert run.result == {"title": "Log in · Demo market", "tabs": len(before) + 2}
    eventually(lambda: tabs() == before)


def test_failed_flow_leaves_page_open(flows, site, port, tabs):
    flows.write("fail", OPEN + "raise BusinessError('look at this')")
    assert flows.run("fail", {"site": f"{site.url}/login?fail"}, debug_port=port).process.returncode == 65
    assert f"{site.url}/login?fail" in tabs()


def test_step_timeout_exits_as_transient(flows, site, port):
    flows.write("wait", OPEN + "flow.page.set_default_timeout(300)\nflow.page.click('#nothing')")
    run = flows.run("wait", {"site": site.url}, debug_port=port)
    assert run.process.returncode == 70
    assert "TimeoutError" in run.errors


def test_terminated_flow_closes_its_tab(flows, site, port, tabs):
    flows.write("long", OPEN + "flow.progress(0.1)\nflow.page.wait_for_selector('#nothing', timeout=600_000)")
    run = flows.begin("long", {"site": f"{site.url}/login?stop"}, debug_port=port, timeout=600)
    run.wait_for("progress")
    assert f"{site.url}/login?stop" in tabs()
    run.signal(signal.SIGTERM)
    assert run.end() == 143
    eventually(lambda: f"{site.url}/login?stop" not in tabs())


def test_missing_browser_exits_as_transient(flows):
    flows.write("browse", "flow.page")
    with socket.socket() as silent:  # it keeps the port and does not listen
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        run = flows.run("browse", debug_port=port)
    assert run.process.returncode == 70
    assert str(port) in run.errors
    assert "Traceback" not in run.errors


def test_browser_crash_exits_as_transient(flows, site):
    flows.write("long", OPEN + "flow.progress(0.1)\nflow.page.wait_for_selector('#nothing', timeout=600_000)")
    with open_browser() as port:
        run = flows.begin("long", {"site": site.url}, debug_port=port, timeout=600)
        run.wait_for("progress")
    assert run.end() == 70


def test_try_command_keeps_profile(flows, site, tmp_path):
    flows.command("new", "mine").end()
    words = ("try", "--flow", "mine", "--payload", f'{{"site": "{site.url}"}}', "--profile", str(tmp_path / "p"))
    first = flows.command(*words)
    assert first.end() == 77, first.errors
    assert "SessionExpired: s1 is not logged in" in first.errors

    flows.write("log_in", LOG_IN)
    assert flows.command("try", "--flow", "log_in", *words[3:]).end() == 0
    second = flows.command(*words)
    assert second.end() == 0, second.errors
    assert second.result == {"title": "Orders · Demo market"}


# --- under the guard --------------------------------------------------------------------------------------------------


def build_run_spec(flows, tmp_path, name, param, *, flow_timeout, timeout):
    words = [sys.executable, "-m", "rpa_tasks.flow_sdk", "run", "--flow", name, "--param", param]
    words += ["--timeout", str(flow_timeout)]
    log = str(tmp_path / "run.log")
    return RunSpec(argv=words, env=flows.environment, timeout=timeout, log_path=log, extend_until=float("inf"))


def events(supervised, until):
    seen = []
    while not (seen and isinstance(seen[-1], until)):
        if event := supervised.next_event(timeout=1):
            seen.append(event)
    return seen


def test_timeout_leaves_page_and_cancel_closes_it(flows, site, port, tabs, tmp_path):
    # The flow's own time is short, and without effect until the supervisor's is over.
    flows.write(
        "long",
        "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0)\nflow.page.set_default_timeout(60_000)\n"
        + OPEN + "flow.progress(0.1)\ntime.sleep(600)",
    )  # fmt: skip
    param = f'{{"shop_id": "s1", "debug_port": {port}, "payload": {{"site": "{site.url}/login?%s"}}}}'
    for own, whole in TIMEOUTS:
        with SupervisedCommand(
            build_run_spec(flows, tmp_path, "long", param % "late", flow_timeout=own, timeout=whole)
        ) as guard:
            heard = events(guard, CommandResult)
        if any(isinstance(event, Progress) for event in heard):
            break
    assert (heard[-1].ended, heard[-1].exit, heard[-1].survivors) == (ExitCause.TIMEOUT, 143, 0)
    assert f"{site.url}/login?late" in tabs()

    spec = build_run_spec(flows, tmp_path, "long", param % "cancelled", flow_timeout=600, timeout=600)
    with SupervisedCommand(spec) as guard:
        events(guard, Progress)
        guard.stop("cancelled")
        (*_, ending) = events(guard, CommandResult)
    assert (ending.ended, ending.exit, ending.survivors) == (ExitCause.CANCELLED, 143, 0)
    eventually(lambda: f"{site.url}/login?cancelled" not in tabs())
