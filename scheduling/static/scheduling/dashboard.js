// Keeps the overview up to date: every ten seconds, not in a hidden tab, and it says when a look failed.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
    const EVERY = 10_000;
    const PATIENCE = 20_000;
    const board = document.getElementById("dashboard");
    const said = document.getElementById("dashboard-said");
    const hold = document.getElementById("dashboard-hold");
    if (!board || !said) return;
    let timer = null;
    let asking = false;
    let again = false; // asked for while a look was under way, which may have read before that

    const held = () => hold.getAttribute("aria-pressed") === "true";

    const tell = (how) => {
        said.firstChild.textContent = `${said.dataset[how]} `;
        said.querySelector("time").textContent = board.dataset.readAt;
        said.classList.toggle("at-bad", how === "failed");
    };

    const replace = (fresh) => {
        const open = [...board.querySelectorAll("details[open][id]")].map((each) => each.id);
        const focused = board.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
        board.replaceChildren(...fresh.childNodes);
        board.dataset.readAt = fresh.dataset.readAt;
        open.forEach((id) => document.getElementById(id)?.setAttribute("open", ""));
        if (focused) [...board.querySelectorAll("a[href]")].find((each) => each.getAttribute("href") === focused)?.focus();
    };

    const look = async () => {
        if (asking) {
            again = true;
            return;
        }
        clearTimeout(timer);
        asking = true;
        again = false;
        try {
            const answer = await fetch(location.href, {
                credentials: "same-origin", headers: { "X-Live": "1" }, signal: AbortSignal.timeout(PATIENCE),
            });
            if (!answer.ok || answer.redirected) throw new Error(answer.status); // logged out, or a server that restarts
            const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("dashboard");
            if (!fresh) throw new Error("no figures");
            replace(fresh);
            tell(held() ? "paused" : "read");
        } catch {
            tell("failed");
        } finally {
            asking = false;
            if (again) look();
            else plan();
        }
    };

    const plan = () => {
        clearTimeout(timer);
        if (!document.hidden && !held()) timer = setTimeout(look, EVERY);
    };

    hold.hidden = false;
    hold.addEventListener("click", () => {
        hold.setAttribute("aria-pressed", String(!held()));
        tell(held() ? "paused" : "read");
        if (held()) clearTimeout(timer);
        else look();
    });
    document.addEventListener("visibilitychange", () => {
        clearTimeout(timer);
        if (!document.hidden && !held()) look();
    });
    document.addEventListener("at:refresh", (event) => { event.preventDefault(); look(); });
    plan();
});
