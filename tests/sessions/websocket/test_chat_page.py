"""The demo chat in a real browser, with the whole way behind it: web, watcher, worker."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest
from django.core.management import call_command

from scheduling.models import Event, Touch
from tests.scheduling.api.serving import Gate, process
from tests.support.chromium import launch_chromium
from tests.support.screenshots import save_screenshot
from tests.support.thread_servers import serving_in_thread
from tests.support.waiting import WAIT_LIMIT_MS, eventually

if TYPE_CHECKING:
    pass

pytestmark = pytest.mark.django_db(transaction=True)

QUEUES = "ticks,long,touch.high,touch.normal,touch.low"
WORKER = f"-m celery -A config worker -Q {QUEUES} -P threads -c 2 --without-gossip -l warning"
GUIDE = "#user .bubble.guide"


@pytest.fixture(scope="module")
def chromium():
    with launch_chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def programs(address, django_db_blocker):
    """Start a watcher and a worker beside the web process. They go on while tests empty the servers."""
    with django_db_blocker.unblock(), process("manage.py", "watch_sessions"), process(*WORKER.split()):
        yield address


@pytest.fixture
def stack(programs, initial_rows):
    call_command("bootstrap", verbosity=0)
    return f"http://{programs}/demo/chat/"


@pytest.fixture
def gate(stack):
    gate = Gate(urlsplit(stack).port or 80)
    yield gate
    gate.shut()


@pytest.fixture
def visit(chromium, stack):
    """Open the page in a language and a light, and wait until both sides are connected."""
    contexts = []

    def visit(url="", *, language="en", scheme="light"):
        contexts.append(
            chromium.new_context(color_scheme=scheme, viewport={"width": 1200, "height": 960}, locale=language)
        )
        contexts[-1].set_default_timeout(WAIT_LIMIT_MS)
        tab = contexts[-1].new_page()
        tab.troubles = []
        tab.on("pageerror", lambda error: tab.troubles.append(str(error)))
        tab.on("console", lambda said: said.type == "error" and tab.troubles.append(said.text))
        tab.goto(url or stack)
        for side in ("#user", "#agent"):
            tab.wait_for_selector(f"{side}[data-state=open]", timeout=WAIT_LIMIT_MS)
        return tab

    yield visit
    for context in contexts:
        context.close()


def write(tab, side, text):
    tab.fill(f"{side} input", text)
    tab.click(f"{side} form button")
    tab.wait_for_selector(f"{side} .bubble.mine:not(.unsent) >> text={text}", timeout=WAIT_LIMIT_MS)


def session_of(tab):
    return parse_qs(urlsplit(tab.url).query)["session"][0]


def test_silent_chat_gets_one_guide_message(visit):
    tab = visit()
    write(tab, "#user", "How long is delivery?")
    tab.wait_for_selector("#agent .bubble.theirs >> text=How long is delivery?")
    tab.wait_for_selector("#standing[data-kind=unknown] >> text=the customer wrote last", timeout=WAIT_LIMIT_MS)
    write(tab, "#agent", "Two days")
    tab.wait_for_selector("#standing[data-kind=armed]", timeout=WAIT_LIMIT_MS)
    second = visit(tab.url)
    second.wait_for_selector("#user .bubble.mine >> text=How long is delivery?")
    for each in (tab, second):
        each.click("#silence")
    for each in (tab, second):
        each.wait_for_selector(GUIDE, timeout=WAIT_LIMIT_MS)
        each.wait_for_selector("#timeline .entry.delivered", timeout=WAIT_LIMIT_MS)
        each.wait_for_selector("#timeline .entry.silent")
    assert "Are you still there?" in tab.inner_text(GUIDE)
    save_screenshot(tab, "demo-chat", full_page=True, animations="disabled")
    (event,) = Event.objects.filter(type="session.silent")
    touch = eventually(lambda: Touch.objects.filter(event=event, state="delivered").first())
    assert touch.chat_id == session_of(tab)
    for each in (tab, second):
        assert each.locator(GUIDE).count() == 1
        assert each.locator("#agent .bubble.guide").count() == 1
        assert each.troubles == []
    # Writing ends the silence; a new one gets a message of its own.
    write(tab, "#user", "Still here")
    write(tab, "#agent", "Anything else?")
    tab.locator(GUIDE).nth(1).wait_for(timeout=WAIT_LIMIT_MS)
    assert second.locator(GUIDE).count() <= 2


def test_transfer_pauses_silence_until_agent_writes(visit):
    tab = visit()
    write(tab, "#user", "Hello")
    tab.click("[data-sign=transfer]")
    tab.wait_for_selector("#standing[data-kind=paused]", timeout=WAIT_LIMIT_MS)
    write(tab, "#agent", "I am your new agent")
    tab.wait_for_selector("#standing[data-kind=armed]", timeout=WAIT_LIMIT_MS)
    tab.click("#silence")  # not before: without pings the timer runs for 5 s only, and a slow page would miss it
    tab.wait_for_selector(GUIDE, timeout=WAIT_LIMIT_MS)
    armed_for = Event.objects.get(type="session.silent").data
    assert armed_for["tag"] == "demo"


def test_both_sides_have_a_timer_and_a_reason(visit):
    tab = visit()
    tab.select_option("#tag", "demo-sla")
    tab.wait_for_url("**tag=demo-sla**")
    tab.wait_for_selector("#user[data-state=open]", timeout=WAIT_LIMIT_MS)
    write(tab, "#user", "Is anyone there?")
    tab.wait_for_selector("#standing[data-kind=armed] >> text=Waiting for an agent", timeout=WAIT_LIMIT_MS)
    tab.wait_for_selector("#why >> text=policy demo-sla", timeout=WAIT_LIMIT_MS)
    tab.wait_for_selector("#timeline .entry.silent >> text=step 1", timeout=WAIT_LIMIT_MS)
    write(tab, "#agent", "Yes")
    tab.wait_for_selector("#standing[data-kind=armed] >> text=Waiting for the customer", timeout=WAIT_LIMIT_MS)
    tab.wait_for_selector("#why >> text=policy demo", timeout=WAIT_LIMIT_MS)


def test_page_after_lost_connection_shows_missed_messages(stack, visit, gate):
    tab = visit(stack.replace(urlsplit(stack).netloc, f"127.0.0.1:{gate.port}"))
    write(tab, "#user", "Hello")
    other = visit(f"{stack}?{urlsplit(tab.url).query}")
    tab.click("#silence")
    gate.shut()
    tab.wait_for_selector("#user:not([data-state=open])", timeout=WAIT_LIMIT_MS)
    write(other, "#agent", "While you were away")
    other.click("#silence")
    other.wait_for_selector(GUIDE, timeout=WAIT_LIMIT_MS)
    assert tab.locator("#user .bubble").count() == 1
    gate.open()
    tab.wait_for_selector("#user[data-state=open]", timeout=WAIT_LIMIT_MS)
    tab.wait_for_selector("#user .bubble.theirs >> text=While you were away", timeout=WAIT_LIMIT_MS)
    tab.wait_for_selector(GUIDE, timeout=WAIT_LIMIT_MS)
    assert tab.locator("#user .bubble").count() == 3


def test_client_drops_refused_message(visit):
    page = visit()
    for reason in ("invalid", "replayed"):
        assert page.evaluate(REFUSED, reason) == {"waiting": 1, "told": [reason], "left": 0}


REFUSED = """async (reason) => {
    let socket;
    window.WebSocket = class { static OPEN = 1; readyState = 1; constructor() { socket = this; } send() {} close() {} };
    const { SessionClient } = await import("/static/chat_sessions/client.js");
    const chat = new SessionClient({ sessionId: "s-1", token: async () => "t" });
    const told = [];
    chat.addEventListener("error", (event) => told.push(event.detail.reason));
    chat.connect();
    while (!socket?.onmessage) await new Promise((done) => setTimeout(done));
    const hear = (frame) => socket.onmessage({ data: JSON.stringify(frame) });
    hear({ type: "welcome", cursor: "0-0" });
    const id = chat.message("hello");
    const waiting = chat.unacknowledged.size;
    hear({ type: "error", id, reason });
    chat.leave();
    return { waiting, told, left: chat.unacknowledged.size };
}"""


class ShopPage(BaseHTTPRequestHandler):
    """An empty page, with the content security policy of its query."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Security-Policy", unquote(urlsplit(self.path).query))
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def visit_shop(chromium):
    """Open a page of another origin than the chat server's."""
    shop, context = ThreadingHTTPServer(("127.0.0.1", 0), ShopPage), chromium.new_context()
    with serving_in_thread(shop):

        def visit_shop(policy=""):
            page = context.new_page()
            page.goto(f"http://127.0.0.1:{shop.server_port}/?{quote(policy)}")
            return page

        yield visit_shop
        context.close()


MINUTE = 60_000
PONG, SHOWN = ("pong", 0), ("show", 0)


def wake(*times):
    return [("wake", at) for at in times]


#: What a connection does, and how many pings and connections there are then.
LIVES = {
    "answers": ([PONG, *wake(15_000), PONG, *wake(30_000), PONG], 3, 1),
    "is dead": (wake(10_000, 10_500), 1, 2),
    "answers after a sleep": ([*wake(60 * MINUTE), PONG, *wake(60 * MINUTE + 10_000)], 3, 1),
    "is dead after a sleep": (wake(60 * MINUTE, 60 * MINUTE + 10_000, 61 * MINUTE), 3, 2),
    "answers a page that is shown": ([PONG, SHOWN, PONG, *wake(10_500)], 2, 1),
    "is dead when a page is shown": ([PONG, SHOWN, *wake(10_000, 10_500)], 2, 2),
    "answers each minute": ([PONG, *wake(MINUTE), PONG, *wake(2 * MINUTE), PONG], 3, 1),
    "is dead each minute": ([PONG, *wake(MINUTE, 2 * MINUTE, 3 * MINUTE, 4 * MINUTE)], 4, 2),
}


def test_client_gives_up_only_a_dead_connection(visit_shop, programs):
    """In a browser without workers, whose timers may be late. A dead connection reports no end."""
    found = {
        name: visit_shop().evaluate(GIVING_UP, [f"http://{programs}{CLIENT}", steps])
        for name, (steps, _, _) in LIVES.items()
    }
    assert found == {
        name: {"pings": pings, "connections": connections} for name, (_, pings, connections) in LIVES.items()
    }


CLIENT = "/static/chat_sessions/client.js"
GIVING_UP = """async ([client, steps]) => {
    let socket, at = 0, pings = 0, connections = 0, timers = [];
    window.WebSocket = class {
        static OPEN = 1; readyState = 1;
        constructor() { socket = this; connections += 1; }
        send() { pings += 1; }
        close() {}
    };
    window.Worker = undefined;
    window.setTimeout = (run, delay, ...given) => timers.push({ due: at + delay, run: () => run(...given) });
    Date.now = () => at;
    const { SessionClient } = await import(client);
    const settle = async () => { for (let turn = 0; turn < 20; turn += 1) await null; };
    const hear = (type) => socket.onmessage({ data: JSON.stringify({ type, cursor: "0-0" }) });
    const acts = {
        pong: () => hear("pong"),
        show: () => document.dispatchEvent(new Event("visibilitychange", { bubbles: true })),
        wake: (time) => {
            at = time;
            const due = timers.filter((timer) => timer.due <= at).sort((one, other) => one.due - other.due);
            timers = timers.filter((timer) => timer.due > at);
            due.forEach((timer) => timer.run());
        },
    };
    new SessionClient({ sessionId: "s-1", token: async () => "t" }).connect();
    await settle();
    hear("welcome");
    for (const [act, time] of steps) { acts[act](time); await settle(); }
    return { pings, connections };
}"""


def test_timers_run_in_a_page_of_another_origin(visit_shop, programs):
    """Without a policy, with one that permits the worker, and with one that permits none."""
    server = f"http://{programs}"
    strict = f"default-src 'none'; script-src {server}"
    for policy, workers in (("", 1), (f"{strict}; worker-src blob:", 1), (strict, 0)):
        page = visit_shop(policy)
        page.evaluate(TIMER, [f"{server}/static/scheduling/timers.js", workers])
        assert len(page.workers) == workers, policy


#: Where there is a worker, the page's own timers do not count.
TIMER = """async ([timers, workers]) => {
    if (workers) window.setTimeout = () => 0;
    const { after } = await import(timers);
    await new Promise((done) => after(10, done));
}"""


def test_chat_page_in_chinese_fits_and_loads_nothing_external(visit):
    tab = visit(language="zh-CN", scheme="dark")
    write(tab, "#user", "你好")
    write(tab, "#agent", "您好")
    tab.wait_for_selector("#timeline .entry.armed", timeout=WAIT_LIMIT_MS)
    assert "演示聊天" in tab.content()
    for width in (380, 1200):
        tab.set_viewport_size({"width": width, "height": 960})
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
    asked = tab.evaluate("performance.getEntriesByType('resource').map(each => new URL(each.name).host)")
    assert set(asked) == {urlsplit(tab.url).netloc}
    assert tab.troubles == []
