"""Pause and resume, as buttons of a shop or a platform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from django.contrib import messages
from django.contrib.admin.utils import unquote
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.decorators import action, display

from rpa_tasks.admin.live import tag
from scheduling.admin.base import KeepsOthersEdits


class Pausing(KeepsOthersEdits):
    """Not fields of the form: who saves an old form must not start or stop anything."""

    #: By primary key, `by=` the person; False where nothing changed.
    pauses: ClassVar[Callable[..., bool]]
    resumes: ClassVar[Callable[..., bool]]

    def has_pause_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return bool(request.user.has_perm("scheduling.add_pause"))

    def has_resume_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return bool(request.user.has_perm("scheduling.delete_pause"))

    def has_run_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return bool(request.user.has_perm("rpa_tasks.run_job"))

    def hidden_actions(self, request: HttpRequest, row: Any) -> set[str]:
        """Buttons that have nothing to do for this row now."""
        if row.retired_at:
            return {"pause_row", "resume_row"}
        return {"pause_row"} if row.paused else {"resume_row"}

    def get_actions_detail(self, request: HttpRequest, object_id: Any) -> Any:
        row = self.get_object(request, unquote(str(object_id)))
        hidden = self.hidden_actions(request, row) if row else set()
        shown = super().get_actions_detail(request, object_id)
        return [each for each in shown if not any(each.action_name.endswith(f"_{name}") for name in hidden)]

    @display(description=gettext_lazy("state"))  # type: ignore[untyped-decorator]
    def shown_state(self, row: Any) -> str:
        if row.retired_at:
            return tag(_("Retired"), "default")
        return tag(_("Paused"), "warning") if row.paused else tag(_("In use"), "success")

    @action(description=gettext_lazy("Pause"), icon="pause_circle", url_path="pause", permissions=["pause"])  # type: ignore[untyped-decorator]
    def pause_row(self, request: HttpRequest, object_id: str) -> HttpResponse:
        text = _("Nothing of it starts any more; what runs goes on to its end. What is published meanwhile waits.")
        return self._switch(
            request, object_id, type(self).pauses, _("Pause “%(what)s”?"), text, _("Pause"), _("Paused.")
        )

    @action(description=gettext_lazy("Resume"), icon="play_circle", url_path="resume", permissions=["resume"])  # type: ignore[untyped-decorator]
    def resume_row(self, request: HttpRequest, object_id: str) -> HttpResponse:
        text = _("What waits for it starts as soon as a node is free.")
        return self._switch(
            request, object_id, type(self).resumes, _("Resume “%(what)s”?"), text, _("Resume"), _("It goes on.")
        )

    def _switch(
        self, request: HttpRequest, object_id: str, act: Callable[..., bool], title: str, text: str, button: str,
        done: str,
    ) -> HttpResponse:  # fmt: skip
        """Ask, then act."""
        row = self.found(request, object_id)
        back = self.url("change", row.pk)
        if request.method != "POST":
            return self.page(
                request, "ops/confirm.html", title % {"what": row}, text=text, button=button, back=back, original=row
            )
        if act(row.pk, by=request.user.get_username()):
            self.log_change(request, row, done)
            messages.success(request, done)
        else:
            messages.info(request, _("Nothing was changed: it was so already."))
        return redirect(back)
