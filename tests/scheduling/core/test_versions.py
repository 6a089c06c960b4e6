"""Every edit has a number of its own."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import IntegrityError, OperationalError, connection, transaction

from scheduling.models import Node, Template, TemplateText
from scheduling.models.versioned import lock_for_write
from tests.scheduling.core.conftest import deliver_when_due
from tests.support.second_connection import act_and_close, await_lock_waits
from tests.support.waiting import WAIT_LIMIT


@pytest.mark.django_db(transaction=True)
def test_concurrent_edits_get_distinct_versions(matrix, race):
    """Two that shared a number would let a process keep what it had made of the first."""
    node = matrix.node()

    def edit(number):
        mine = Node.objects.get(pk=node.pk)
        mine.delay = timedelta(minutes=number + 1)
        mine.save()

    race(8, edit)
    node.refresh_from_db()
    assert node.version == 9
    node.save()
    assert Node.objects.get(pk=node.pk).version == 9, "nothing has changed"


@pytest.mark.django_db
def test_added_and_deleted_texts_are_versions_of_their_template(matrix):
    """An automatic roll-out took the canary for the same content, and a repeat sent another text under one key."""
    template = matrix.template("guide")
    versions = [template.version]
    text = TemplateText(template=template, locale="en", body="hi")
    for act in (text.save, text.save, text.delete, template.texts.get().delete, text.save):
        act()
        template.refresh_from_db()
        versions.append(template.version)
    assert versions == [1, 2, 2, 3, 4, 5]


@pytest.mark.django_db
def test_template_read_before_an_edit_of_its_texts_keeps_the_version(matrix):
    template = matrix.template("guide")
    TemplateText.objects.create(template=template, locale="en", body="hi")
    assert template.version == 1, "as it was read"
    template.save()
    assert Template.objects.get().version == 2


@pytest.mark.django_db(transaction=True)
def test_writer_of_a_text_locks_the_template_first(matrix):
    """It and a deletion, which locked the template first, waited for each other."""
    template = matrix.template("guide")
    text = template.texts.get()
    text.body = "edited"

    def write_both():
        with template.store_as_one_version():
            pool.submit(act_and_close, text.save)
            await_lock_waits()
            TemplateText.objects.filter(pk=text.pk).update(subject="changed")

    with ThreadPoolExecutor(1) as pool:
        write_both()
    assert template.texts.get().body == "edited"


@pytest.mark.django_db(transaction=True)
def test_config_apply_does_not_deadlock_with_save(matrix):
    """Each would wait for the other: it has locked the table, the row is locked here."""
    node = matrix.node()
    node.enabled = False

    def lock_table(patience="100ms"):
        try:
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute("SELECT set_config('lock_timeout', %s, true)", [patience])
                cursor.execute("LOCK TABLE scheduling_node IN SHARE ROW EXCLUSIVE MODE")
        except OperationalError:
            return False
        finally:
            connection.close()
        return True

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            lock_for_write(Node.objects.all()).get(pk=node.pk)
            assert not pool.submit(lock_table).result(WAIT_LIMIT)
            node.save()
        assert pool.submit(lock_table, "15s").result(WAIT_LIMIT)


@pytest.mark.django_db(transaction=True)
def test_template_of_touch_is_not_deleted(matrix, record_event):
    """Also past Django, by a trigger: touches have no foreign key constraint to their template."""
    cell = matrix.node()
    (row,) = deliver_when_due(*record_event().task_ids)
    Node.objects.update(template=Template.objects.create(key="later", content_type="guide"))

    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM scheduling_templatetext")
        with pytest.raises(IntegrityError, match="is referenced by scheduling_touch"):
            cursor.execute("DELETE FROM scheduling_template WHERE id = %s", [cell.template_id])
    assert row.template_id == cell.template_id
