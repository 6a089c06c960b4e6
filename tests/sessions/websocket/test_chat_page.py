"""The demo chat in a real browser, with the whole way behind it: web, watcher, worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import pytest
from django.core.management import call_command
from pytest_django import DjangoDbBlocker

from scheduling.models import Event, Touch
from tests.scheduling.api.serving import Gate, eventually
from tests.sessions.websocket.web_processes import process
from tests.support.chromium import launch_chromium
from tests.support.screenshots import save_screenshot

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.browser, pytest.mark.django_db(transaction=True)]

QUEUES = "ticks,long,touch.high,touch.normal,touch.low"
WORKER = f"-m celery -A config worker -Q {QUEUES} -P threads -c 2 --without-gossip -l warning"
SOON = 120_000  #: ms; silence comes after 5 s, on a busy machine later
GUIDE = "#user .bubble.guide"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with launch_chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def programs(address: str, django_db_blocker: DjangoDbBlocker) -> Iterator[str]:
    """Start a watcher and a worker beside the web process. They go on while tests empty the servers."""
    with django_db_blocker.unblock(), process("manage.py", "watch_sessions"), process(*WORKER.split()):
        yield address


@pytest.fixture
def stack(programs: str, initial_rows: None) -> str:
    call_command("bootstrap", verbosity=0)
    return f"http://{programs}/demo/chat/"


@pytest.fixture
def gate(stack: str) -> Iterator[Gate]:
    gate = Gate(urlsplit(stack).port or 80)
    yield gate
    gate.shut()


@pytest.fixture
def visit(chromium: Browser, stack: str) -> Iterator[Callable[..., Page]]:
    """Open the page in a language and a light, and wait until both sides are connected."""
    contexts = []

    def visit(url: str = "", *, language: str = "en", scheme: str = "light", width: int = 1200) -> Page:
        contexts.append(
            chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 960}, locale=language)
        )
        contexts[-1].set_default_timeout(SOON)
        tab = contexts[-1].new_page()
        tab.troubles = []
        tab.on("pageerror", lambda error: tab.troubles.append(str(error)))
        tab.on("console", lambda said: said.type == "error" and tab.troubles.append(said.text))
        tab.goto(url or stack)
        for side in ("#user", "#agent"):
            tab.wait_for_selector(f"{side}[data-state=open]", timeout=SOON)
        return tab

    yield visit
    for context in contexts:
        context.close()


def write(tab: Page, side: str, text: str) -> None:
    tab.fill(f"{side} input", text)
    tab.click(f"{side} form button")
    tab.wait_for_selector(f"{side} .bubble.mine:not(.unsent) >> text={text}", timeout=SOON)


def session_of(tab: Page) -> str:
    return parse_qs(urlsplit(tab.url).query)["session"][0]


def test_silent_chat_gets_one_guide_message(visit: Callable[..., Page]) -> None:
    tab = visit()
    write(tab, "#user", "How long is delivery?")
    tab.wait_for_selector("#agent .bubble.theirs >> text=How long is delivery?")
    tab.wait_for_selector("#standing[data-kind=unknown] >> text=the customer wrote last", timeout=SOON)
    write(tab, "#agent", "Two days")
    tab.wait_for_selector("#standing[data-kind=armed]", timeout=SOON)
    second = visit(tab.url)
    second.wait_for_selector("#user .bubble.mine >> text=How long is delivery?")
    for each in (tab, second):
        each.click("#silence")
    for each in (tab, second):
        each.wait_for_selector(GUIDE, timeout=SOON)
        each.wait_for_selector("#timeline .entry.delivered", timeout=SOON)
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
    tab.locator(GUIDE).nth(1).wait_for(timeout=SOON)
    assert second.locator(GUIDE).count() <= 2


def test_transfer_pauses_silence_until_agent_writes(visit: Callable[..., Page]) -> None:
    tab = visit()
    write(tab, "#user", "Hello")
    tab.click("[data-sign=transfer]")
    tab.wait_for_selector("#standing[data-kind=paused]", timeout=SOON)
    write(tab, "#agent", "I am your new agent")
    tab.wait_for_selector("#standing[data-kind=armed]", timeout=SOON)
    tab.click("#silence")  # not before: without pings the timer runs for 5 s only, and a slow page would miss it
    tab.wait_for_selector(GUIDE, timeout=SOON)
    armed_for = Event.objects.get(type="session.silent").data
    assert armed_for["tag"] == "demo"


def test_both_sides_have_a_timer_and_a_reason(visit: Callable[..., Page]) -> None:
    tab = visit()
    tab.select_option("#tag", "demo-sla")
    tab.wait_for_url("**tag=demo-sla**")
    tab.wait_for_selector("#user[data-state=open]", timeout=SOON)
    write(tab, "#user", "Is anyone there?")
    tab.wait_for_selector("#standing[data-kind=armed] >> text=Waiting for an agent", timeout=SOON)
    tab.wait_for_selector("#why >> text=policy demo-sla", timeout=SOON)
    tab.wait_for_selector("#timeline .entry.silent >> text=step 1", timeout=SOON)
    write(tab, "#agent", "Yes")
    tab.wait_for_selector("#standing[data-kind=armed] >> text=Waiting for the customer", timeout=SOON)
    tab.wait_for_selector("#why >> text=policy demo", timeout=SOON)


def test_page_after_lost_connection_shows_missed_messages(stack: str, visit: Callable[..., Page], gate: Gate) -> None:
    tab = visit(stack.replace(urlsplit(stack).netloc, f"127.0.0.1:{gate.port}"))
    write(tab, "#user", "Hello")
    other = visit(f"{stack}?{urlsplit(tab.url).query}")
    tab.click("#silence")
    gate.shut()
    tab.wait_for_selector("#user:not([data-state=open])", timeout=SOON)
    write(other, "#agent", "While you were away")
    other.click("#silence")
    other.wait_for_selector(GUIDE, timeout=SOON)
    assert tab.locator("#user .bubble").count() == 1
    gate.open()
    tab.wait_for_selector("#user[data-state=open]", timeout=SOON)
    tab.wait_for_selector("#user .bubble.theirs >> text=While you were away", timeout=SOON)
    tab.wait_for_selector(GUIDE, timeout=SOON)
    assert tab.locator("#user .bubble").count() == 3


def test_client_drops_refused_message(visit: Callable[..., Page]) -> None:
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


def test_client_of_hidden_page_closes_only_a_dead_connection(visit: Callable[..., Page]) -> None:
    """The browser runs the timers of a page that is hidden for long once a minute."""
    assert visit().evaluate(ONCE_A_MINUTE) == {"answered": 0, "dead": 1}


ONCE_A_MINUTE = """async () => {
    let socket, turn, at = 0, closed = 0;
    window.WebSocket = class {
        static OPEN = 1; readyState = 1; constructor() { socket = this; } send() {} close() { closed += 1; }
    };
    window.setInterval = (run) => { turn = run; };
    Date.now = () => at;
    const { SessionClient } = await import("/static/chat_sessions/client.js");
    const chat = new SessionClient({ sessionId: "s-1", token: async () => "t" });
    chat.connect();
    while (!socket?.onmessage) await new Promise((done) => setTimeout(done));
    const hear = (frame) => socket.onmessage({ data: JSON.stringify(frame) });
    hear({ type: "welcome", cursor: "0-0" });
    for (let minute = 0; minute < 3; minute += 1) {
        hear({ type: "pong" });
        at += 60000;
        turn();
    }
    const answered = closed;
    at += 60000;
    turn();
    return { answered, dead: closed - answered };
}"""


@pytest.mark.parametrize("language", ["zh-CN", "en"])
def test_chat_page_fits_in_all_layouts(visit: Callable[..., Page], language: str) -> None:
    for scheme, width in (("light", 1200), ("dark", 1200), ("light", 380)):
        tab = visit(language=language, scheme=scheme, width=width)
        write(tab, "#user", "你好" if language == "zh-CN" else "Hello")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert ("演示聊天" in tab.content()) is (language == "zh-CN")
        asked = tab.evaluate("performance.getEntriesByType('resource').map(each => new URL(each.name).host)")
        assert set(asked) == {urlsplit(tab.url).netloc}
        assert tab.troubles == []
        write(tab, "#agent", "您好" if language == "zh-CN" else "Good day")
        tab.wait_for_selector("#timeline .entry.armed", timeout=SOON)
        save_screenshot(tab, f"demo-chat-{language}-{scheme}-{width}", full_page=True, animations="disabled")
