// Under a node's form: what the edit means for the touches that wait, a moment after the last key.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
    const panel = document.getElementById("node-impact");
    const form = document.querySelector("#node_form");
    if (!panel || !form) return;
    const output = panel.querySelector("[data-output]");
    let timer = null;
    let latest = 0;

    const line = (each) => {
        const item = document.createElement("p");
        item.className = each.tone ? `at-note ${each.tone}` : "";
        item.textContent = each.text;
        return item;
    };

    const show = async () => {
        const mine = ++latest;
        const answer = await fetch(panel.dataset.url, { method: "POST", body: new FormData(form), credentials: "same-origin" });
        if (!answer.ok || mine !== latest) return; // refused, or asked again meanwhile
        const { lines } = await answer.json();
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
