"""A flow without a browser: its input, its output and its exit codes."""

import signal

import pytest


def test_flow_receives_job_fields_and_prints_result(flows):
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


def test_flow_reads_flat_parameter(flows):
    flows.write("look", 'return {"shop": flow.shop_id, "payload": flow.payload}')

    run = flows.command("run", "--flow", "look", "--param", '{"shop_id": "s1", "lease_no": 3, "page": 3, "text": "中"}')

    assert run.end() == 0
    assert run.result == {"shop": "s1", "payload": {"page": 3, "text": "中"}}


def test_flow_output_does_not_mix_with_result(flows):
    flows.write(
        "loud",
        'import os\nprint("no newline", end="")\nos.system("printf from-a-child")\n'
        'print({"result": 1})\nreturn {name: name in sys.modules for name in ("django", "playwright", "psycopg")}',
    )
    run = flows.run("loud")
    assert run.lines == [{"result": {"django": False, "playwright": False, "psycopg": False}}], "no unused module"
    assert "no newline" in run.errors
    assert "from-a-child" in run.errors


@pytest.mark.parametrize(
    ("error", "code"),
    [("BusinessError", 65), ("PlatformError", 75), ("SessionExpired", 77)],
)
def test_named_flow_error_sets_exit_status_without_traceback(flows, error, code):
    flows.write("fail", f'raise {error}("what is wrong")')
    run = flows.run("fail")
    assert (run.process.returncode, run.errors, run.result) == (code, f"{error}: what is wrong\n", None)


def test_other_flow_exception_exits_as_transient_with_traceback(flows):
    flows.write("fail", "return {}['nothing']")
    run = flows.run("fail")
    assert run.process.returncode == 70
    assert "Traceback" in run.errors
    assert "fail.py" in run.errors
    assert run.errors.endswith("KeyError: 'nothing'\n")


def test_flow_may_choose_its_exit_status(flows):
    flows.write("own", "sys.exit(99)")
    assert flows.run("own").process.returncode == 99


@pytest.mark.parametrize("value", ["'text'", "{'at': float('nan')}", "{'at': 'x' * 70_000}"])
def test_unstorable_flow_result_exits_as_business(flows, value):
    flows.write("odd", f"return {value}")
    run = flows.run("odd")
    assert (run.process.returncode, run.lines) == (65, [])
    assert run.errors.startswith("BusinessError: ")


def test_missing_payload_text_is_named(flows):
    flows.write("picky", 'return {"site": flow.text("site")}')
    run = flows.run("picky", {"site": "  "})
    assert (run.process.returncode, run.errors) == (
        65, "BusinessError: payload: site must be a text that is not empty.\n",
    )  # fmt: skip
    assert flows.run("picky", {"site": "here"}).result == {"site": "here"}


def test_flow_progress_is_clamped(flows):
    flows.write("far", 'for each in (-1, 2, float("nan"), True): flow.progress(each, "m" * 300)')
    said = flows.run("far").lines
    assert [line["progress"] for line in said] == [0.0, 1.0, 0.0, 1.0]
    assert {line["message"] for line in said} == {"m" * 200}


# --- command lines that do not fit ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("param", "complaint"),
    [
        ("[" * 100_000, "--param is not JSON"),
        ("[]", "--param must be a JSON object"),
        ("{}", "shop_id is missing"),
        ('{"shop_id": "s1", "lease_no": true}', "lease_no must be a whole number"),
        ('{"shop_id": "s1", "payload": ["hunter2"]}', "payload must be an object"),
        ('{"shop_id": "s1", "debug_port": 0}', "debug_port must be between 1 and 65535"),
    ],
)
def test_invalid_flow_parameter_is_explained(flows, param, complaint):
    flows.write("quiet", "pass")
    run = flows.command("run", "--flow", "quiet", "--param", param)
    assert run.end() == 64
    assert complaint in run.errors
    assert "Traceback" not in run.errors
    assert "hunter2" not in run.errors  # a payload may be secret


@pytest.mark.parametrize(
    ("name", "complaint"), [("nowhere", "There is no flow"), ("../flows/quiet", "is no name for a flow")]
)
def test_unknown_flow_name_is_explained(flows, name, complaint):
    flows.write("quiet", "pass")
    run = flows.command("run", f"--flow={name}", "--param", '{"shop_id": "s1"}')
    assert run.end() == 64
    assert complaint in run.errors


@pytest.mark.parametrize(("text", "complaint"), [("def run(", "SyntaxError"), ("run = 1", "no function run")])
def test_invalid_flow_file_is_explained(flows, text, complaint):
    (flows.folder / "broken.py").write_text(text)
    run = flows.run("broken")
    assert run.process.returncode == 64
    assert complaint in run.errors
    assert "broken.py" in run.errors


def test_invalid_command_line_exits_as_usage_error(flows):
    run = flows.command("run", "--flow", "x", "--param", "{}", "--timeout", "0")
    assert run.end() == 64
    assert "usage:" in run.errors


def test_flow_without_debug_port_names_it(flows):
    flows.write("browse", 'flow.page.goto("about:blank")')
    run = flows.run("browse", debug_port=None)
    assert run.process.returncode == 64
    assert "debug_port" in run.errors


# --- files ------------------------------------------------------------------------------------------------------------


def test_own_flow_overrides_shipped_flow_and_imports_neighbours(flows):
    (flows.folder / "common.py").write_text("ANSWER = 42")
    (flows.folder / "json.py").write_text("raise RuntimeError('not the library')")
    body = 'import common, json\nreturn {"answer": common.ANSWER, "one": json.loads("1")}'
    for name in ("demo_sync_order", "my-shop.v2_sync.order"):
        flows.write(name, body)
        assert flows.run(name).result == {"answer": 42, "one": 1}


def test_list_command_shows_all_flows(flows):
    (flows.folder / "broken.py").write_text("def run(")
    (flows.folder / "mine.py").write_text('"""Does it.\n\nAnd more."""')
    run = flows.command("list")
    rest, _ = run.process.communicate()
    shown = {line.split()[0]: line for line in rest.splitlines()}
    assert set(shown) == {"broken", "mine", "demo_sync_order", "demo_batch_reply"}
    assert "Does it." in shown["mine"]
    assert "cannot be read" in shown["broken"]


def test_new_command_writes_flow_once(flows, tmp_path):
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
def test_flow_ends_on_signal(flows, number, code):
    flows.write("long", 'flow.progress(0.1)\ntime.sleep(600)\nreturn {"never": 1}')
    run = flows.begin("long")
    run.wait_for("progress")
    run.signal(number)
    assert run.end() == code
    assert run.result is None
    assert number.name in run.errors


def test_thread_left_by_flow_delays_no_exit_and_a_late_signal_changes_no_status(flows):
    flows.write("hangs", 'import threading\nthreading.Thread(target=threading.Event().wait).start()\nreturn {"ok": 1}')
    assert flows.run("hangs").process.returncode == 0
    run = flows.begin("hangs")
    run.wait_for("result")
    run.signal(signal.SIGTERM)
    assert run.end() == 0


def test_flow_ends_itself_after_timeout(flows):
    flows.write("long", "time.sleep(600)")
    run = flows.run("long", timeout=0.1)
    assert (run.process.returncode, run.errors) == (124, "The flow's time is over.\n")


def test_flow_with_closed_stdout_succeeds(flows):
    flows.write("deaf", 'for each in range(5000): flow.progress(0.5, "x" * 100)\nreturn {"done": 1}')
    run = flows.begin("deaf")
    run.process.stdout.close()
    run.process.stdout = None
    assert run.process.wait(60) == 0


def test_try_command_requires_json_object(flows):
    run = flows.command("try", "--flow", "quiet", "--payload", "[]")
    assert run.end() == 64
    assert "--payload" in run.errors
