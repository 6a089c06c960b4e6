// Keeps the overview up to date: every ten seconds, not in a hidden tab, and shows when a refresh failed.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
    const EVERY = 10_000;
    const REQUEST_TIMEOUT = 20_000;
    const board = document.getElementById("dashboard");
    const statusLine = document.getElementById("dashboard-status");
    const hold = document.getElementById("dashboard-hold");
    if (!board || !statusLine) return;
    let timer = null;
    let asking = false;
    let again = false; // asked for while a look was under way, which may have read before that

    const held = () => hold.getAttribute("aria-pressed") === "true";

    const showStatus = (how) => {
        statusLine.firstChild.textContent = `${statusLine.dataset[how]} `;
        statusLine.classList.toggle("at-bad", how === "failed");
    };

    const replace = (page) => {
        const open = [...board.querySelectorAll("details[open][id]")].map((each) => each.id);
        const focused = board.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
        board.replaceChildren(...page.getElementById(board.id).childNodes);
        statusLine.querySelector("time").replaceWith(page.querySelector(`#${statusLine.id} time`));
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
                credentials: "same-origin", headers: { "X-Live": "1" }, signal: AbortSignal.timeout(REQUEST_TIMEOUT),
            });
            if (!answer.ok || answer.redirected) throw new Error(answer.status); // logged out, or a server that restarts
            const page = new DOMParser().parseFromString(await answer.text(), "text/html");
            if (!page.getElementById(board.id)) throw new Error("no figures");
            replace(page);
            showStatus(held() ? "paused" : "read");
        } catch {
            showStatus("failed");
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
        showStatus(held() ? "paused" : "read");
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
