// Parts of a page that keep themselves up to date. A part has an id and `data-live`, the address of a page in which the
// part with the same id is newer; it is looked at again while it has `data-live-again`. Parts of rows name them in
// `data-row`: those rows are asked for together, as `?ids=`. Nothing is asked in a hidden tab, and a server that does
// not answer is asked ever more rarely. `data-live-every` names the ms between two looks. A page with the button
// `live-hold` can be held; `r` looks again without a reload of that page.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
    const EVERY = 3000;
    const SLOWEST = 60000;
    const REQUEST_TIMEOUT = 20000;
    const failed = document.getElementById("live-failed");
    const hold = document.getElementById("live-hold");
    let slowdown = 1;
    let timer = null;
    let asking = false; // an older answer must not replace a newer one
    let again = false; // asked for by `r` while a look was under way, which may have read before that

    const live = () => [...document.querySelectorAll("[data-live][data-live-again]")];
    const isHeld = () => hold?.getAttribute("aria-pressed") === "true";

    // A form's token looks different in each answer and is the same: a button that is just being pressed stays. So does a
    // canvas on which a chart was drawn, while its data are the same. An attribute may contain `>`.
    const contentOf = (part) => part.innerHTML.replace(
        /(name="csrfmiddlewaretoken" value=")[^"]*|<canvas(?:"[^"]*"|[^>"])*>/g, "$1",
    ) + [...part.querySelectorAll("canvas")].map((each) => each.dataset.value).join();

    // Draw the numbers of a canvas on the kept one if that has a chart, else on itself. Return whether it is the kept one.
    // Unfold draws those of the loaded page.
    const drawChart = (fresh, kept) => {
        const chart = kept && Chart.getChart(kept);
        const data = JSON.parse(fresh.dataset.value);
        if (chart) {
            kept.dataset.value = fresh.dataset.value;
            Object.assign(chart, { data }).update();
        } else {
            new Chart(fresh, { type: "bar", data, options: JSON.parse(fresh.dataset.options) });
        }
        return Boolean(chart);
    };

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
        // An image that is shown already need not be fetched and painted again. A chart gets its new numbers.
        old.querySelectorAll("[data-keep]").forEach((each) => {
            const kept = before.get(each.dataset.keep);
            const canvas = each.querySelector("canvas");
            const isKept = canvas ? drawChart(canvas, kept?.querySelector("canvas")) : kept;
            if (isKept) each.replaceWith(kept);
        });
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
        clearTimeout(timer);
        timer = null;
        if (document.hidden || asking) return; // `visibilitychange` or the answer goes on
        asking = true;
        again = false;
        try {
            await refresh();
            slowdown = 1;
        } catch {
            slowdown *= 2;
        }
        asking = false;
        if (failed) failed.hidden = slowdown === 1;
        if (again) turn();
        else plan();
    };

    const plan = () => {
        if (timer !== null || isHeld() || !live().length) return;
        const pace = Math.min(...live().map((part) => Number(part.dataset.liveEvery) || EVERY));
        timer = setTimeout(turn, Math.min(pace * slowdown, SLOWEST));
    };

    // A bar of a chart leads to the rows that it counts.
    document.addEventListener("click", (event) => {
        const chart = event.target.matches("canvas.chart") && Chart.getChart(event.target);
        const [bar] = chart ? chart.getElementsAtEventForMode(event, "nearest", { intersect: true }, false) : [];
        const link = bar && chart.data.datasets[bar.datasetIndex].links[bar.index];
        if (link) window.location.assign(link);
    });
    document.addEventListener("visibilitychange", () => {
        if (!document.hidden && !isHeld() && live().length) turn();
    });
    if (hold) {
        const held = document.getElementById("live-held");
        hold.hidden = false;
        hold.addEventListener("click", () => {
            hold.setAttribute("aria-pressed", String(!isHeld()));
            held.hidden = !isHeld();
            clearTimeout(timer);
            timer = null;
            if (!isHeld()) turn();
        });
        document.addEventListener("at:refresh", (event) => {
            event.preventDefault();
            again = true;
            turn();
        });
    }
    plan();
});
