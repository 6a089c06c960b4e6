"""Guarded roll-outs in words: why one waits or paused, both versions side by side, what it did."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop

from scheduling.admin.labels import learn, spoken
from scheduling.models import GuardedRollout, RolloutMove
from scheduling.policy.rollout import Finding, Limit, Plan, Tally, read_plan
from scheduling.policy.shares import Share

RATE_NAMES: Mapping[str, str | Promise] = {
    "complaints": gettext_lazy("Complaints"),
    "failures": gettext_lazy("Failures"),
    "opt_outs": gettext_lazy("Opt-outs"),
}
WHY: Mapping[str, str | Promise] = {
    "time": gettext_lazy("This step has not lasted long enough yet."),
    "canary": gettext_lazy("Not enough touches with the canary have ended at this step yet."),
    "stable": gettext_lazy("Not enough touches with the stable version have ended to compare with."),
    "edited": gettext_lazy("Somebody changed the template, the canary or its share at the node. Their edit stands."),
    "content": gettext_lazy("Somebody changed one of the two texts: what was counted was about another one."),
    "unseen": gettext_lazy("Its figures could not be counted for five minutes. Nobody gets what cannot be judged."),
    "person": gettext_lazy("A person paused it."),
}
#: Codes that carry a rate behind these.
ABOUT = {
    "limit:": gettext_noop("%(rate)s: worse than the stable version by more than the limit, beyond chance."),
    "doubt:": gettext_noop("%(rate)s: worse than the limit, perhaps by chance. It stays until more is known."),
}

#: What `scheduling.policy.rollout` objects to.
learn(
    {},
    {},
    (
        (r"must be like \+0\.5 .*",
         gettext_noop("must be like +0.5 (percentage points above the stable version) or x2 (times)")),
        (r"must be above x1: .*", gettext_noop("must be above x1: two equal versions differ by chance")),
        (r"must be above 0 and at most 100 points: .*",
         gettext_noop("must be above 0 and at most 100 points: two equal versions differ by chance")),
        (r"must be a list of 1 to (?P<most>\d+) percentages", gettext_noop("must be 1 to %(most)s percentages")),
        (r"must grow from above 0 to at most 100", gettext_noop("must grow from above 0 to at most 100")),
        (r"must begin below 100: .*",
         gettext_noop("must begin below 100: there would be nobody left to compare with")),
        (r"must be there unless another limit is: .*",
         gettext_noop("must be there unless another limit is: nothing would be guarded")),
        (r"must be another template than the stable one.*",
         gettext_noop("Choose a canary template that is not the stable one, and save the node.")),
        (r"the node is retired", gettext_noop("The node is retired.")),
        (r"a guarded roll-out of this node is under way.*",
         gettext_noop("A guarded roll-out of this node is under way; stop it first.")),
        (r"the node says something else now than when this roll-out began.*",
         gettext_noop("The node says something else now than when this roll-out began; stop it and start another.")),
        (r"somebody decided about it already, or it moved by itself",
         gettext_noop("Somebody decided about it already, or it moved by itself.")),
    ),
)  # fmt: skip


def why(code: str) -> str:
    for prefix, words in ABOUT.items():
        if code.startswith(prefix):
            rate = code.removeprefix(prefix)
            return _(words) % {"rate": RATE_NAMES.get(rate, rate)}
    return str(WHY.get(code, code))


def told(rollout: GuardedRollout) -> dict[str, Any]:
    """Everything that a page shows of one roll-out."""
    plan = read_plan(rollout.plan)
    canary, stable = (Tally(**rollout.figures.get(name, {})) for name in ("canary", "stable"))
    return {
        "row": rollout,
        "tone": {"running": "info", "paused": "danger", "finished": "success"}.get(rollout.state, ""),
        "why": why(rollout.reason) if rollout.reason else "",
        "steps": [(f"{each:g} %", _place(number, rollout)) for number, each in enumerate(plan.steps)],
        "rule": _rule(plan),
        "ended": (canary.ended, stable.ended),
        "rates": [_rate(plan, rate, canary, stable) for rate in RATE_NAMES],
        "moves": [_move(each) for each in rollout.moves.order_by("-pk")],
    }


def _place(number: int, rollout: GuardedRollout) -> str:
    if number == rollout.step and rollout.is_open:
        return "now"
    return "done" if number < rollout.step or rollout.state == "finished" else ""


def _rule(plan: Plan) -> str:
    words = _("Each step lasts at least %(time)s and until %(touches)s touches with the canary have ended at it.")
    return words % {"time": spoken(plan.time) if plan.time > timedelta(0) else "0", "touches": plan.touches}


def _rate(plan: Plan, rate: str, canary: Tally, stable: Tally) -> dict[str, Any]:
    limit = plan.limits.get(rate)
    shares = canary.share(rate), stable.share(rate)
    return {
        "name": RATE_NAMES[rate],
        "canary": _share(shares[0]),
        "stable": _share(shares[1]),
        "limit": limit_in_words(limit) if limit else _("none"),
        "verdict": _verdict(plan, Finding(rate, limit, *shares)) if limit else ("", "–"),
    }


def _share(share: Share) -> tuple[str, str]:
    if not share.of:
        return "–", ""
    return f"{100 * share.rate:.2f} %", _("%(hits)s of %(of)s") % {"hits": share.hits, "of": share.of}


def limit_in_words(limit: Limit) -> str:
    if limit.factor != 1:
        return _("at most %(factor)s times the stable version's") % {"factor": f"{limit.factor:g}"}
    return _("at most %(points)s points above the stable version's") % {"points": f"{limit.points:g}"}


def _verdict(plan: Plan, found: Finding) -> tuple[str, str]:
    if min(found.canary.of, found.stable.of) < plan.judged_from:
        return "", _("judged from %(count)s of each") % {"count": plan.judged_from}
    if found.at_least > 0:
        return "danger", _("beyond the limit")
    return ("warning", _("worse, perhaps by chance")) if found.excess > 0 else ("success", _("inside the limit"))


def _move(move: RolloutMove) -> dict[str, Any]:
    return {
        "row": move,
        "tone": {"paused": "danger", "finished": "success", "grew": "info"}.get(move.verb, ""),
        "why": why(move.reason) if move.reason else "",
        "who": move.actor_name or _("by itself"),
        "percent": f"{move.percent:g} %",
        "figures": [
            (name, Tally(**move.figures[key]))
            for key, name in (("canary", _("canary")), ("stable", _("stable")))
            if key in move.figures
        ],
    }
