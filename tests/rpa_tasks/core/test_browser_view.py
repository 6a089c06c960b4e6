"""The tab that operators see. The browser answers by hand, so each order of its answers can be played."""

import asyncio
import json

from rpa_tasks.takeover.browser_view import BrowserView


class Browser:
    """The connection to a browser whose answers the test sends."""

    def __init__(self):
        self.commands = []
        self._messages = asyncio.Queue()

    async def send(self, text):
        self.commands.append(json.loads(text))

    async def __aiter__(self):
        while True:
            yield await self._messages.get()

    def open_tab(self, tab):
        info = {"targetId": tab, "type": "page", "title": "", "url": "about:blank"}
        self._messages.put_nowait(json.dumps({"method": "Target.targetCreated", "params": {"targetInfo": info}}))

    def close_tab(self, tab):
        self._messages.put_nowait(json.dumps({"method": "Target.targetDestroyed", "params": {"targetId": tab}}))

    def attach(self, tab):
        """Answer the request to attach to the tab, which gets the session of its name."""
        number = next(
            each["id"]
            for each in self.commands
            if each["method"] == "Target.attachToTarget" and each["params"]["targetId"] == tab
        )
        self._messages.put_nowait(json.dumps({"id": number, "result": {"sessionId": f"session of {tab}"}}))

    @property
    def visits(self):
        return [
            (each["sessionId"], each["params"]["url"])
            for each in self.commands
            if each["method"] == "Page.navigate"
        ]  # fmt: skip


#: What happens, and the tabs in which the address is opened.
ORDERS = [
    ("open a, go, attach a", ["a"]),
    ("go, open a, attach a", ["a"]),
    ("open a, attach a, go", ["a"]),
    ("open a, attach a, go, go", ["a", "a"]),
    ("open a, go, go, attach a", ["a"]),
    ("open a, open b, go, show b, attach a, attach b", []),  # the operator saw a
    ("open a, open b, go, close a, attach b", []),
    ("open a, go, close a, open b, attach b", []),
]


async def play(steps):
    browser = Browser()
    view = BrowserView(browser, lambda picture: None, lambda: None, lambda event: None, asks_for_files=False)
    running = asyncio.create_task(view.run())
    for step in steps.split(", "):
        match step.split():
            case ["open", tab]:
                browser.open_tab(tab)
            case ["close", tab]:
                browser.close_tab(tab)
            case ["attach", tab]:
                browser.attach(tab)
            case ["show", tab]:
                view.show(tab)
            case ["go"]:
                view.apply({"do": "go", "url": "https://a.example/"})
        for _ in range(5):  # the tasks of the view take turns
            await asyncio.sleep(0)
    running.cancel()
    return browser.visits


def test_address_before_the_tab_is_attached_is_kept_for_it():
    for steps, tabs in ORDERS:
        visits = [(f"session of {tab}", "https://a.example/") for tab in tabs]
        assert asyncio.run(play(steps)) == visits, steps
