"""What is as good as a password lies encrypted, and is never handed out again."""

from io import StringIO

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import connection

from scheduling.models import ChannelConfig, Community
from scheduling.models.encrypted import build_cipher
from scheduling.operations.commands import create_api_key
from tests.support.tables import each_row

pytestmark = pytest.mark.django_db

SECRET = "whsec_" + "Y" * 32
HUSH = "https://example.com/in?token=hush"


@pytest.fixture
def keys(settings):
    """Choose the keys, first the one that encrypts."""

    def keys(*chosen):
        settings.AFTERTOUCH_SECRETS_KEYS = list(chosen)
        build_cipher.cache_clear()

    yield keys
    build_cipher.cache_clear()


def channel():
    return ChannelConfig.objects.create(key="hook", kind="webhook", config={"url": HUSH, "secret": SECRET})


def dump_tables():
    """Return every text of the product's tables, as in a stolen dump."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        tables = [name for (name,) in cursor.fetchall()]
        found = []
        for table in tables:
            cursor.execute(f'SELECT row_to_json(each)::text FROM "{table}" AS each')
            found += [text for (text,) in cursor.fetchall()]
    return "\n".join(found)


def test_database_contains_no_plain_secrets():
    row = channel()
    row.timeout *= 2
    row.save()  # once more into the history
    Community.objects.create(chat_id="c1", targets={"wecom": {"url": HUSH}})
    key = create_api_key("shop", ["events"])
    User.objects.create_user("ann", password="correct horse")
    dump = dump_tables()
    assert '"hook"' in dump
    for secret in ("hush", SECRET, key, "correct horse"):
        assert secret not in dump


def test_rotate_secrets_encrypts_rows_with_new_key(keys):
    keys("old")
    row = channel()
    Community.objects.create(chat_id="c1", targets={"wecom": {"url": HUSH}})
    keys("new", "old")
    said = StringIO()
    call_command("rotate_secrets", stdout=said)
    assert set(said.getvalue().split("\n")) >= {"scheduling.ChannelConfig.config: 1", "scheduling.Community.targets: 1"}
    keys("new")
    assert ChannelConfig.objects.get().config == {"url": HUSH, "secret": SECRET}
    assert Community.objects.get().targets == {"wecom": {"url": HUSH}}
    assert ChannelConfig.objects.get().version == row.version
    assert row.history.count() == 1


def test_rotate_secrets_names_and_keeps_unreadable_row(keys):
    keys("lost")
    row = channel()
    keys("new", "old")
    with pytest.raises(CommandError, match=f"ChannelConfig {row.pk}: none of the keys"):
        call_command("rotate_secrets", stdout=StringIO())
    keys("lost")
    assert ChannelConfig.objects.get().config["secret"] == SECRET


@each_row("words", [["--dry-run"], []])
def test_export_config_replaces_secrets(words, tmp_path):
    channel()
    said = StringIO()
    call_command("export_config", stdout=said)
    assert "(kept)" in said.getvalue()
    changed = tmp_path / "changed.yaml"
    changed.write_text(said.getvalue().replace("(kept)", "whsec_" + "Z" * 32, 2), "utf-8")
    told = StringIO()
    try:
        call_command("apply_config", str(changed), *words, stdout=told, stderr=told)
    except CommandError as error:
        told.write(str(error))
    for secret in ("hush", SECRET, "whsec_ZZZ"):
        assert secret not in said.getvalue()
        assert secret not in told.getvalue()
