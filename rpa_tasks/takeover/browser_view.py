"""The picture of a browser's tabs, and input into them, over one DevTools connection.

Commands are sent without waiting: a page that shows a dialog answers a click only after the dialog. DevTools executes
the commands of a tab in order.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from websockets.asyncio.client import ClientConnection

from rpa_tasks.takeover.wire import Input

QUALITY = 60  #: of JPEG, percent
WIDTH, HEIGHT = 1366, 1000  #: largest picture
TITLE_LIMIT, URL_SHOWN = 100, 500


@dataclass(frozen=True, slots=True)
class Picture:
    jpeg: bytes
    width: int  #: of the page, in the coordinates of its input
    height: int


@dataclass(slots=True)
class ShownTab:
    id: str
    title: str
    url: str


@dataclass(frozen=True, slots=True)
class FileChooser:
    """A question of the shown tab for files."""

    id: int  #: random, so that no answer is for the chooser of another browser
    multiple: bool
    element: int  #: the file input, by DevTools


@dataclass(slots=True)
class BrowserView:
    """The tab that is shown, among all tabs. The callbacks must not block."""

    socket: ClientConnection
    on_picture: Callable[[Picture], None]
    on_change: Callable[[], None]
    on_download: Callable[[dict[str, Any]], None]
    asks_for_files: bool  #: whether file choosers of pages are shown to the operator
    tabs: dict[str, ShownTab] = field(default_factory=dict)
    shown: str = ""  #: id of the tab
    dialog: dict[str, Any] | None = None  #: with a random id, which its answer repeats
    chooser: FileChooser | None = None
    _session: str = ""  #: of the shown tab; empty until the browser has attached to it
    _address: str = ""  #: entered before there was a session, and opened in it
    _number: int = 0
    _waiting: dict[int, Callable[[dict[str, Any]], None]] = field(default_factory=dict)
    _outbox: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    _unacknowledged: list[int] = field(default_factory=list)

    async def run(self) -> None:
        """Exchange commands and events until the connection ends."""
        sender = asyncio.create_task(self._send_commands())
        self._post("Target.setDiscoverTargets", discover=True)
        try:
            async for text in self.socket:
                self._handle(json.loads(text))
        finally:
            sender.cancel()

    async def _send_commands(self) -> None:
        while True:
            await self.socket.send(await self._outbox.get())

    def _post(
        self, method: str, *, then: Callable[[dict[str, Any]], None] | None = None, session: str = "", **params: Any
    ) -> None:
        """Queue a command; `then` gets its result, unless the browser refuses it."""
        self._number += 1
        if then:
            self._waiting[self._number] = then
        command = {"id": self._number, "method": method, "params": params}
        self._outbox.put_nowait(json.dumps(command | ({"sessionId": session} if session else {})))

    def _post_to_tab(self, method: str, **params: Any) -> None:
        if self._session:
            self._post(method, session=self._session, **params)

    # --- events -------------------------------------------------------------------------------------------------

    def _handle(self, message: dict[str, Any]) -> None:
        if "id" in message:
            then = self._waiting.pop(message["id"], None)
            if then and "result" in message:
                then(message["result"])
            return
        params, session = message.get("params", {}), message.get("sessionId", "")
        match message["method"]:
            case "Target.targetCreated" | "Target.targetInfoChanged":
                self._note_tab(params["targetInfo"])
            case "Target.targetDestroyed":
                self._forget_tab(params["targetId"])
            case "Page.loadEventFired":
                self.refresh_tabs()
            case "Page.screencastFrame" if session == self._session:
                page = params["metadata"]
                self._unacknowledged.append(params["sessionId"])
                self.on_picture(
                    Picture(base64.b64decode(params["data"]), int(page["deviceWidth"]), int(page["deviceHeight"]))
                )
            case "Page.javascriptDialogOpening" if session == self._session:
                kind = str(params["type"])
                self.dialog = {
                    "id": 1 + secrets.randbelow(2**31 - 1), "kind": kind, "message": params["message"][:1_000],
                    "text": params.get("defaultPrompt", "")[:1_000],
                }  # fmt: skip
                self.on_change()
            case "Page.javascriptDialogClosed" if session == self._session:
                self.dialog = None
                self.on_change()
            case "Page.fileChooserOpened" if session == self._session and "backendNodeId" in params:
                several = params["mode"] == "selectMultiple"
                self.chooser = FileChooser(1 + secrets.randbelow(2**31 - 1), several, params["backendNodeId"])
                self.on_change()
            case "Browser.downloadWillBegin" | "Browser.downloadProgress":
                self.on_download(params)

    def _note_tab(self, target: dict[str, Any]) -> None:
        if target["type"] != "page":
            return
        tab = ShownTab(target["targetId"], target["title"][:TITLE_LIMIT], target["url"][:URL_SHOWN])
        known = self.tabs.get(tab.id)
        if known == tab:
            return
        self.tabs[tab.id] = tab
        if known is None and (not self.shown or target.get("openerId") == self.shown):
            self.show(tab.id)
        self.on_change()

    def _forget_tab(self, tab: str) -> None:
        if self.tabs.pop(tab, None) and tab == self.shown:
            self.shown = self._session = self._address = ""
            self.dialog = self.chooser = None
            if self.tabs:
                self.show(next(reversed(self.tabs)))
        self.on_change()

    def refresh_tabs(self) -> None:
        """Read titles and addresses again: the browser reports no change of a title."""

        def note_all(result: dict[str, Any]) -> None:
            for target in result["targetInfos"]:
                if target["targetId"] in self.tabs:
                    self._note_tab(target)

        self._post("Target.getTargets", then=note_all)

    # --- what is shown ------------------------------------------------------------------------------------------

    def show(self, tab: str) -> None:
        """Show this tab from its next picture on.

        A tab with an open dialog stays: DevTools would forget the dialog, and the page would hang in it.
        """
        if tab == self.shown or tab not in self.tabs or self.dialog:
            return
        if self._session:
            self._post("Target.detachFromTarget", sessionId=self._session)
        if self.shown:
            self._address = ""  # it was meant for that tab
        self.shown, self._session, self.dialog, self.chooser = tab, "", None, None
        self._unacknowledged.clear()
        self._post("Target.activateTarget", targetId=tab)

        def begin(result: dict[str, Any]) -> None:
            if self.shown != tab:  # another tab was chosen meanwhile
                self._post("Target.detachFromTarget", sessionId=result["sessionId"])
                return
            self._session = result["sessionId"]
            self._post_to_tab("Page.enable")
            if self.asks_for_files:
                self._post_to_tab("Page.setInterceptFileChooserDialog", enabled=True)
            self._post_to_tab("Page.startScreencast", format="jpeg", quality=QUALITY, maxWidth=WIDTH, maxHeight=HEIGHT)
            if self._address:
                self._open(self._address)
            self.on_change()

        self._post("Target.attachToTarget", then=begin, targetId=tab, flatten=True)

    def acknowledge_pictures(self) -> None:
        """Let the browser send further pictures. It stops after a few that were not acknowledged."""
        for number in self._unacknowledged:
            self._post_to_tab("Page.screencastFrameAck", sessionId=number)
        self._unacknowledged.clear()

    # --- files --------------------------------------------------------------------------------------------------

    def answer_chooser(self, paths: list[str]) -> None:
        """Give these files to the page that asks for them; without files the question is dropped."""
        if self.chooser and paths:
            self._post_to_tab("DOM.setFileInputFiles", files=paths, backendNodeId=self.chooser.element)
        self.chooser = None
        self.on_change()

    def keep_downloads(self, folder: str) -> None:
        """Let the browser download into the folder and report it. The end of the connection ends it."""
        self._post("Browser.setDownloadBehavior", behavior="allowAndName", downloadPath=folder, eventsEnabled=True)

    def cancel_download(self, download: str) -> None:
        self._post("Browser.cancelDownload", guid=download)

    # --- input --------------------------------------------------------------------------------------------------

    def apply(self, action: Input) -> None:
        """Carry out a checked action of the operator."""
        match action["do"]:
            case "mouse":
                names = ("type", "x", "y", "button", "buttons", "modifiers")
                event = {name: action[name] for name in names}
                self._post_to_tab("Input.dispatchMouseEvent", **event, clickCount=action["clicks"])
            case "wheel":
                self._post_to_tab(
                    "Input.dispatchMouseEvent", type="mouseWheel", x=action["x"], y=action["y"],
                    deltaX=action["dx"], deltaY=action["dy"], modifiers=action["modifiers"],
                )  # fmt: skip
            case "key":
                self._post_to_tab("Input.dispatchKeyEvent", **_key_event(action))
            case "text":
                self._post_to_tab("Input.insertText", text=action["text"])
            case "go":
                self._open(action["url"])
            case "move" if action["step"] == 0:
                self._post_to_tab("Page.reload")
            case "move":
                self._move_in_history(action["step"])
            case "tab":
                self.show(action["id"])
            case "new_tab":
                self._post("Target.createTarget", then=lambda made: self.show(made["targetId"]), url="about:blank")
            case "close_tab" if len(self.tabs) > 1 and action["id"] in self.tabs:  # without a tab it may exit
                self._post("Target.closeTarget", targetId=action["id"])
            case "dialog" if self.dialog and self.dialog["id"] == action["id"]:
                self._post_to_tab("Page.handleJavaScriptDialog", accept=action["accept"], promptText=action["text"])
                self.dialog = None  # also if the page has crashed in it
                self.on_change()

    def _open(self, address: str) -> None:
        """Open the address in the shown tab, at the latest when the browser has attached to it."""
        self._address = "" if self._session else address
        self._post_to_tab("Page.navigate", url=address)

    def _move_in_history(self, step: int) -> None:
        session = self._session

        def move(history: dict[str, Any]) -> None:
            place = history["currentIndex"] + step
            if 0 <= place < len(history["entries"]):
                entry = history["entries"][place]["id"]
                self._post("Page.navigateToHistoryEntry", session=session, entryId=entry)

        if session:
            self._post("Page.getNavigationHistory", session=session, then=move)


def _key_event(action: Input) -> dict[str, Any]:
    """Return the event; only a key that writes a character has a text."""
    key, shortcut = action["key"], action["modifiers"] & ~8  # 8: Shift
    text = "\r" if key == "Enter" else key if len(key) == 1 and not shortcut else ""
    kind = "keyUp" if action["type"] == "up" else "keyDown" if text else "rawKeyDown"
    event = {
        "type": kind, "key": key, "code": action["code"], "modifiers": action["modifiers"],
        "windowsVirtualKeyCode": action["number"], "nativeVirtualKeyCode": action["number"],
    }  # fmt: skip
    return event | ({"text": text} if kind == "keyDown" else {})
