"""What the codes of this app mean, wherever the back office shows them."""

from __future__ import annotations

from django.utils.translation import gettext_lazy as _
from django.utils.translation import gettext_noop

from scheduling.admin.labels import learn

#: The plain name of a table, which the list of permissions shows.
PLAIN = (gettext_noop("nudge mark"),)

learn(
    {
        "no_session": _("The customer has no chat that is open"),
        "inapp_away": _("The live sessions cannot be reached, trying again"),
        "inapp_busy": _("Too much waits for the live sessions, trying again"),
        "stale": _("Too late to guide anybody"),
    },
    {},
    ((r"must be later than starts_at", gettext_noop("must be later than the beginning")),),
)
