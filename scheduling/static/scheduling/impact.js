// Under a form: what the edit means for the touches that wait, a moment after the last key.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
    const panel = document.getElementById("edit-impact");
    const form = panel && document.getElementById(panel.dataset.form);
    if (!form) return;
    const output = panel.querySelector("[data-output]");
    let timer = null;
    let asking = new AbortController();

    const line = (each) => {
        const item = document.createElement("p");
        item.className = each.tone ? `at-note ${each.tone}` : "";
        item.textContent = each.text;
        return item;
    };

    const show = async () => {
        asking.abort(); // what was asked before has no one to read it
        asking = new AbortController();
        const { signal } = asking;
        let lines;
        try {
            const answer = await fetch(panel.dataset.url, { method: "POST", body: new FormData(form), credentials: "same-origin", signal });
            if (!answer.ok || answer.redirected) throw new Error(String(answer.status)); // refused or logged out
            ({ lines } = await answer.json());
        } catch {
            if (signal.aborted) return;
            lines = [{ tone: "bad", text: panel.dataset.failed }]; // not the impact of an earlier edit
        }
        panel.hidden = !lines.length;
        output.replaceChildren(...lines.map(line));
    };

    const soon = () => {
        clearTimeout(timer);
        timer = setTimeout(show, 400);
    };

    form.addEventListener("input", soon);
    form.addEventListener("change", soon);
    soon(); // a form that comes back with what was typed
});
