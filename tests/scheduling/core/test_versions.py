"""Every edit has a number of its own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection

from scheduling.models import Node


@pytest.mark.django_db(transaction=True)
def test_edits_at_the_same_time_count_one_by_one(matrix: Any) -> None:
    """Two that shared a number would let a process keep what it had made of the first."""
    node = matrix.node()
    start = threading.Barrier(8)

    def edit(minutes: int) -> None:
        mine = Node.objects.get(pk=node.pk)
        mine.delay = timedelta(minutes=minutes)
        start.wait()
        mine.save()
        connection.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(edit, range(1, 9)))

    assert Node.objects.get(pk=node.pk).version == 9


@pytest.mark.django_db
def test_a_save_that_changes_nothing_is_no_edit(matrix: Any) -> None:
    node = matrix.node()
    node.save()
    assert Node.objects.get(pk=node.pk).version == 1
