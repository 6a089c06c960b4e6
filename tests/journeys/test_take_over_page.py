"""The page of a take-over, with a node that the test plays."""

import json
import struct
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from django.contrib.auth.models import User
from django.urls import reverse
from django.utils.timezone import now

from config.local.processes import wait_until
from rpa_tasks.models import Platform, Shop, TakeOver
from tests.support.waiting import WAIT_LIMIT

if TYPE_CHECKING:
    pass


class PlayedNode:
    """Send the page the states of a browser, and keep the actions of the operator."""

    def __init__(self, page):
        self.actions = []
        self.page = page
        self.refuses = False
        page.route_web_socket("**/ws/v1/take-overs/*", self.accept)

    def accept(self, socket):
        if self.refuses:
            socket.close()
            return
        self.socket = socket
        socket.on_message(lambda text: self.actions.append(json.loads(text)))
        socket.send(json.dumps({"type": "welcome", "connection": "c1", "controls": True}))
        self.show()

    def show(self, dialog=None, chooser=None, controller="c1"):
        files = {"limit": 2**20, "chooser": chooser, "downloads": []}
        state = {"type": "state", "controller": controller, "tabs": [], "shown": "", "dialog": dialog, "files": files}
        self.socket.send(json.dumps(state))

    def paint(self, number, picture):
        self.socket.send(struct.pack(">IHH", number, 640, 480) + picture)

    def confirm(self, part, received):
        notice = {"type": "upload", "token": part["token"], "number": part["number"], "received": received}
        self.socket.send(json.dumps(notice))

    def find(self, do):
        self.page.evaluate("0")  # what the page has sent before is here
        return [each for each in self.actions if each["do"] == do]


@pytest.fixture
def node(ops):
    page = ops("en")
    shop = Shop.objects.create(platform=Platform.objects.create(key="pdd", name="PDD"), shop_id="s1", name="Flagship")
    TakeOver.objects.create(
        shop=shop, user=User.objects.get(username="ops"), username="ops", lease_no=1, node="n1", key=b"k" * 32,
        lease_until=now() + timedelta(hours=1),
    )  # fmt: skip
    node = PlayedNode(page)
    page.goto(reverse("admin:rpa_tasks_shop_take_over", args=[shop.pk]))
    page.wait_for_selector("#take-over-status:text-is('You control this browser')")
    return node


def test_dialog_that_follows_at_once_is_shown_and_answered(node):
    form = "#take-over-dialog:not([hidden])"
    node.show({"id": 7, "kind": "alert", "message": "Saved.", "text": ""})
    node.page.wait_for_selector(f"{form} >> text=Saved.")
    node.show({"id": 8, "kind": "confirm", "message": "Delete all goods?", "text": ""})
    node.page.wait_for_selector(f"{form} >> text=Delete all goods?")
    node.page.click(f"{form} >> text=Cancel")
    assert [(each["id"], each["accept"]) for each in node.find("dialog")] == [(8, False)]


def test_upload_goes_on_after_a_loss_of_control(node):
    """Redis was lost, and the node knows the controller only after the next greeting."""
    asked = {"id": 5, "multiple": False}
    node.show(chooser=asked)
    node.page.wait_for_selector("#take-over-chooser input")
    node.page.set_input_files(
        "#take-over-chooser input", {"name": "a.png", "mimeType": "image/png", "buffer": b"0" * 100_000}
    )
    node.page.wait_for_selector("#take-over-chooser progress")
    assert wait_until(lambda: bool(node.find("upload")), WAIT_LIMIT)
    part = node.find("upload")[0]
    node.confirm(part, len(part["data"]) * 3 // 4)
    node.show(chooser=asked, controller="")
    node.page.wait_for_selector("#take-over-chooser", state="hidden")
    node.show(chooser=asked)
    node.page.wait_for_selector("#take-over-chooser progress")
    assert node.page.locator("#take-over-chooser input").is_hidden()

    node.actions.clear()
    node.confirm(part, 0)  # another window has uploaded meanwhile, so the node has dropped the parts
    assert wait_until(lambda: any(each["offset"] == 0 for each in node.find("upload")), WAIT_LIMIT)


def test_more_files_than_a_page_can_get_are_refused(node):
    node.show(chooser={"id": 5, "multiple": True})
    node.page.wait_for_selector("#take-over-chooser input")
    files = [{"name": f"{number}.png", "mimeType": "image/png", "buffer": b"0"} for number in range(21)]
    node.page.set_input_files("#take-over-chooser input", files)
    node.page.wait_for_selector("#take-over-file-problem >> text=20 files")
    assert node.find("upload") == []


def test_shortcut_of_the_search_goes_to_the_page(node):
    node.page.focus("#take-over-keys")
    node.page.keyboard.press("Control+k")
    assert [each["key"] for each in node.find("key") if each["type"] == "down"] == ["Control", "k"]
    assert node.page.locator("#global-search").is_hidden()


def test_picture_that_cannot_be_painted_is_acknowledged(node):
    """The node sends no further picture before that."""
    node.paint(7, b"no picture")
    assert wait_until(lambda: [each["number"] for each in node.find("ack")] == [7], WAIT_LIMIT)


def test_page_leads_to_the_login_when_the_login_has_expired(node):
    """The handshake is refused without a reason, and the page tried again until it was reloaded."""
    node.page.context.clear_cookies()
    node.refuses = True
    node.socket.close()
    node.page.wait_for_url("**/admin/login/**")
