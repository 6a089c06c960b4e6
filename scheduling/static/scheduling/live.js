// Parts of a page that keep themselves up to date. A part has an id and `data-live`, the address of a page in which the
// part with the same id is newer; it is looked at again while it has `data-live-again`. Parts of rows name them in
// `data-row`: those rows are asked for together, as `?ids=`. Nothing is asked in a hidden tab, and a server that does
// not answer is asked ever more rarely.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
    const EVERY = 3000;
    const SLOWEST = 60000;
    const REQUEST_TIMEOUT = 20000;
    const failed = document.getElementById("live-failed");
    let wait = EVERY;
    let timer = null;
    let asking = false; // an older answer must not replace a newer one

    const live = () => [...document.querySelectorAll("[data-live][data-live-again]")];

    // A form's token looks different in each answer and is the same: a button that is just being pressed stays.
    const contentOf = (part) => part.innerHTML.replace(/(name="csrfmiddlewaretoken" value=")[^"]*/g, "$1");

    // Return a selector of the focused element, for the same one in the fresh content, or "".
    const findFocus = (part) => {
        const focused = document.activeElement;
        const name = part.contains(focused) && ["id", "href", "formaction", "name"].find((each) => focused.hasAttribute(each));
        return name ? `[${name}="${CSS.escape(focused.getAttribute(name))}"]` : "";
    };

    const replace = (old, fresh) => {
        if (contentOf(old) === contentOf(fresh)) return;
        const focus = findFocus(old);
        const isChosen = focus && document.activeElement.closest("tr.at-here"); // by `j` and `k`
        const open = new Set([...old.querySelectorAll("details[open][id]")].map((each) => each.id));
        const before = new Map([...old.querySelectorAll("[data-keep]")].map((each) => [each.dataset.keep, each]));
        old.replaceChildren(...fresh.childNodes);
        old.querySelectorAll("details[id]").forEach((each) => { if (open.has(each.id)) each.open = true; });
        // An image that is shown already need not be fetched and painted again.
        old.querySelectorAll("[data-keep]").forEach((each) => before.has(each.dataset.keep) && each.replaceWith(before.get(each.dataset.keep)));
        const same = focus ? old.querySelector(focus) : null;
        same?.focus({ preventScroll: true });
        if (isChosen) same?.closest("tr")?.classList.add("at-here");
    };

    const refresh = async () => {
        const addresses = new Map();
        for (const part of live()) {
            addresses.set(part.dataset.live, [...(addresses.get(part.dataset.live) || []), part]);
        }
        for (const [address, parts] of addresses) {
            const rows = [...new Set(parts.map((part) => part.dataset.row).filter(Boolean))];
            const answer = await fetch(rows.length ? `${address}?ids=${rows.join(",")}` : address, {
                credentials: "same-origin", headers: { "X-Live": "1" }, signal: AbortSignal.timeout(REQUEST_TIMEOUT),
            });
            if (!answer.ok || answer.redirected) throw new Error(answer.status); // logged out, or a server that restarts
            const page = new DOMParser().parseFromString(await answer.text(), "text/html");
            for (const part of parts) {
                const fresh = page.getElementById(part.id);
                if (!fresh) { part.removeAttribute("data-live-again"); continue; }
                part.toggleAttribute("data-live-again", fresh.hasAttribute("data-live-again"));
                replace(part, fresh);
            }
        }
    };

    const turn = async () => {
        timer = null;
        if (document.hidden || asking) return; // `visibilitychange` or the answer goes on
        asking = true;
        try {
            await refresh();
            wait = EVERY;
        } catch {
            wait = Math.min(wait * 2, SLOWEST);
        }
        asking = false;
        if (failed) failed.hidden = wait === EVERY;
        plan();
    };

    const plan = () => {
        if (timer === null && live().length) timer = setTimeout(turn, wait);
    };

    document.addEventListener("visibilitychange", () => {
        if (document.hidden || !live().length) return;
        clearTimeout(timer);
        turn();
    });
    plan();
});
