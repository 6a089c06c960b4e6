"""A flow without a browser: what it is told, what it says, and how it ends."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest


def test_a_flow_gets_what_the_job_says_and_its_result_is_told(flows: Any) -> None:
    flows.write(
        "look",
        """
        flow.progress(0.4, "half way")
        return {"shop": flow.shop_id, "platform": flow.platform, "profile": flow.profile_id, "task": flow.task_id,
                "key": flow.delivery_key, "lease": flow.lease_no, "timeout": flow.timeout, "payload": flow.payload}
        """.replace("        ", ""),
    )

    run = flows.run("look", {"page": 3}, profile_id="p", task_id="t", delivery_key="k", lease_no=7, timeout=30)

    assert run.process.returncode == 0
    assert run.lines == [
        {"progress": 0.4, "message": "half way"},
        {"result": {
            "shop": "s1", "platform": "demo", "profile": "p", "task": "t", "key": "k", "lease": 7, "timeout": 30.0,
            "payload": {"page": 3},
        }},
    ]  # fmt: skip


def test_a_result_may_be_missing(flows: Any) -> None:
    flows.write("quiet", "pass")
    run = flows.run("quiet")
    assert (run.process.returncode, run.lines, run.errors) == (0, [], "")


def test_what_a_flow_prints_garbles_nothing(flows: Any) -> None:
    flows.write(
        "loud",
        'import os\nprint("no newline", end="")\nos.system("printf from-a-child")\n'
        'print({"result": 1})\nreturn {"ok": True}',
    )
    run = flows.run("loud")
    assert run.lines == [{"result": {"ok": True}}]
    assert "no newline" in run.errors
    assert "from-a-child" in run.errors


def test_neither_django_nor_an_unused_browser_is_loaded(flows: Any) -> None:
    flows.write("light", 'return {name: name in sys.modules for name in ("django", "playwright", "psycopg")}')
    assert flows.run("light").result == {"django": False, "playwright": False, "psycopg": False}


@pytest.mark.parametrize(
    ("error", "code"),
    [("BusinessError", 65), ("Transient", 70), ("PlatformError", 75), ("SessionExpired", 77), ("Misused", 64)],
)
def test_each_named_error_has_its_exit_status_and_no_stack_trace(flows: Any, error: str, code: int) -> None:
    flows.write("fail", f'raise {error}("what is wrong")')
    run = flows.run("fail")
    assert (run.process.returncode, run.errors, run.result) == (code, f"{error}: what is wrong\n", None)


def test_any_other_exception_may_pass_and_shows_where_it_was(flows: Any) -> None:
    flows.write("fail", "return {}['nothing']")
    run = flows.run("fail")
    assert run.process.returncode == 70
    assert "Traceback" in run.errors
    assert "fail.py" in run.errors
    assert run.errors.endswith("KeyError: 'nothing'\n")


def test_a_flow_may_choose_an_exit_status_of_its_own(flows: Any) -> None:
    flows.write("own", "sys.exit(99)")
    assert flows.run("own").process.returncode == 99


@pytest.mark.parametrize("value", ["[1]", "'text'", "{'at': object()}", "{'at': float('nan')}", "{'at': 'x' * 70_000}"])
def test_a_result_that_cannot_be_kept_is_said_at_once(flows: Any, value: str) -> None:
    flows.write("odd", f"return {value}")
    run = flows.run("odd")
    assert (run.process.returncode, run.lines) == (65, [])
    assert run.errors.startswith("BusinessError: ")


def test_a_missing_payload_field_is_named(flows: Any) -> None:
    flows.write("picky", 'return {"site": flow.text("site")}')
    run = flows.run("picky", {"site": "  "})
    assert (run.process.returncode, run.errors) == (
        65, "BusinessError: payload: site must be a text that is not empty.\n",
    )  # fmt: skip
    assert flows.run("picky", {"site": "here"}).result == {"site": "here"}


def test_progress_stays_within_its_bounds(flows: Any) -> None:
    flows.write("far", 'for each in (-1, 2, float("nan"), True): flow.progress(each, "m" * 300)')
    said = flows.run("far").lines
    assert [line["progress"] for line in said] == [0.0, 1.0, 0.0, 1.0]
    assert {line["message"] for line in said} == {"m" * 200}


# --- command lines that do not fit ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("param", "complaint"),
    [
        ("{", "--param is not JSON"),
        ("[" * 100_000, "--param is not JSON"),
        ("[]", "--param must be a JSON object"),
        ("{}", "shop_id is missing"),
        ('{"shop_id": 1}', "shop_id must be a string"),
        ('{"shop_id": "s1", "lease_no": "1"}', "lease_no must be a whole number"),
        ('{"shop_id": "s1", "lease_no": true}', "lease_no must be a whole number"),
        ('{"shop_id": "s1", "payload": ["hunter2"]}', "payload must be an object"),
        ('{"shop_id": "s1", "debug_port": "9222"}', "debug_port must be a port number or null"),
        ('{"shop_id": "s1", "debug_port": 0}', "debug_port must be between 1 and 65535"),
    ],
)
def test_a_parameter_that_does_not_fit_is_explained(flows: Any, param: str, complaint: str) -> None:
    flows.write("quiet", "pass")
    run = flows.command("run", "--flow", "quiet", "--param", param)
    assert run.end() == 64
    assert complaint in run.errors
    assert "Traceback" not in run.errors
    assert "hunter2" not in run.errors  # a payload may be secret


@pytest.mark.parametrize("name", ["nowhere", "../flows/quiet", "/etc/passwd", "", "-x", "a" * 141])
def test_a_flow_that_is_not_there_is_explained(flows: Any, name: str) -> None:
    flows.write("quiet", "pass")
    run = flows.command("run", f"--flow={name}", "--param", '{"shop_id": "s1"}')
    assert run.end() == 64
    assert "There is no flow" in run.errors or "is no name for a flow" in run.errors
    if name == "nowhere":
        assert str(flows.folder) in run.errors


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("def run(", "SyntaxError"), ("import nothing_like_it", "ModuleNotFoundError"), ("run = 1", "no function run")],
)
def test_a_file_that_is_no_flow_is_explained(flows: Any, text: str, complaint: str) -> None:
    (flows.folder / "broken.py").write_text(text)
    run = flows.run("broken")
    assert run.process.returncode == 64
    assert complaint in run.errors
    assert "broken.py" in run.errors


@pytest.mark.parametrize("words", [[], ["fly"], ["run"], ["run", "--flow", "x", "--param", "{}", "--timeout", "0"]])
def test_bad_words_end_with_the_same_status(flows: Any, words: list[str]) -> None:
    run = flows.command(*words)
    assert run.end() == 64
    assert "usage:" in run.errors


def test_a_browser_that_was_not_lent_is_named(flows: Any) -> None:
    flows.write("browse", 'flow.page.goto("about:blank")')
    run = flows.run("browse", debug_port=None)
    assert run.process.returncode == 64
    assert "debug_port" in run.errors


# --- files ------------------------------------------------------------------------------------------------------------


def test_own_flows_come_first_and_may_import_what_lies_beside_them(flows: Any) -> None:
    (flows.folder / "common.py").write_text("ANSWER = 42")
    (flows.folder / "json.py").write_text("raise RuntimeError('not the library')")
    flows.write("demo_sync_order", 'import common, json\nreturn {"answer": common.ANSWER, "one": json.loads("1")}')
    assert flows.run("demo_sync_order").result == {"answer": 42, "one": 1}


def test_a_name_may_have_what_platforms_and_task_types_may(flows: Any) -> None:
    flows.write("my-shop.v2_sync.order", 'return {"file": __file__}')
    assert flows.run("my-shop.v2_sync.order").result == {"file": str(flows.folder / "my-shop.v2_sync.order.py")}


def test_the_list_shows_all_flows_even_broken_ones(flows: Any) -> None:
    (flows.folder / "broken.py").write_text("def run(")
    (flows.folder / "mine.py").write_text('"""Does it.\n\nAnd more."""')
    run = flows.command("list")
    rest, _ = run.process.communicate()
    shown = {line.split()[0]: line for line in rest.splitlines()}
    assert set(shown) == {"broken", "mine", "demo_sync_order", "demo_batch_reply"}
    assert "Does it." in shown["mine"]
    assert "cannot be read" in shown["broken"]


def test_a_new_flow_is_written_once(flows: Any, tmp_path: Path) -> None:
    first = flows.command("new", "mine")
    assert str(flows.folder / "mine.py") in first.process.communicate()[0]
    text = (flows.folder / "mine.py").read_text()
    assert "NAME" not in text
    compile(text, "mine.py", "exec")

    (flows.folder / "mine.py").write_text("changed")
    again = flows.command("new", "mine")
    assert again.end() == 64
    assert (flows.folder / "mine.py").read_text() == "changed"

    elsewhere = flows.command("new", "mine", "--to", str(tmp_path / "else"))
    assert f"AFTERTOUCH_RPA_FLOWS={tmp_path / 'else'}" in elsewhere.process.communicate()[0]
    assert (tmp_path / "else" / "mine.py").is_file()
    assert flows.command("new", "../mine").end() == 64


# --- ends from outside ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_it_ends_when_it_is_told_to(flows: Any, number: signal.Signals, code: int) -> None:
    flows.write("long", 'flow.progress(0.1)\ntime.sleep(600)\nreturn {"never": 1}')
    run = flows.begin("long")
    run.wait_for("progress")
    run.signal(number)
    assert run.end() == code
    assert run.result is None
    assert number.name in run.errors


def test_a_told_result_stands_whatever_hangs_behind_it(flows: Any) -> None:
    flows.write("hangs", 'import threading\nthreading.Thread(target=threading.Event().wait).start()\nreturn {"ok": 1}')
    run = flows.begin("hangs")
    run.wait_for("result")
    run.signal(signal.SIGTERM)
    assert run.end() == 0


def test_what_hangs_behind_the_result_is_not_waited_for(flows: Any) -> None:
    flows.write("hangs", 'import threading\nthreading.Thread(target=threading.Event().wait).start()\nreturn {"ok": 1}')
    assert flows.run("hangs").process.returncode == 0


def test_it_ends_by_itself_where_nobody_minds_its_time(flows: Any) -> None:
    flows.write("long", "time.sleep(600)")
    run = flows.run("long", timeout=0.1)
    assert (run.process.returncode, run.errors) == (124, "The flow's time is over.\n")


def test_nobody_listening_is_no_failure(flows: Any) -> None:
    flows.write("deaf", 'for each in range(5000): flow.progress(0.5, "x" * 100)\nreturn {"done": 1}')
    run = flows.begin("deaf")
    run.process.stdout.close()
    run.process.stdout = None
    assert run.process.wait(60) == 0


def test_a_try_needs_a_payload_that_fits(flows: Any) -> None:
    for payload in ("{", "[]", json.dumps("x")):
        run = flows.command("try", "--flow", "quiet", "--payload", payload)
        assert run.end() == 64
        assert "--payload" in run.errors
