// Under a node's form: what the node would send to a customer. Without JavaScript the form opens the send preview.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
    const panel = document.getElementById("node-preview");
    if (!panel) return;
    const form = panel.querySelector("form");
    const output = panel.querySelector("[data-output]");
    let request = null;

    const show = async () => {
        request?.abort();
        const mine = request = new AbortController();
        const user = encodeURIComponent(form.elements.user_id.value.trim());
        try {
            const answer = await fetch(`${panel.dataset.url}?user_id=${user}`, { signal: mine.signal });
            if (!answer.ok || answer.redirected) throw new Error(String(answer.status));
            output.innerHTML = await answer.text(); // rendered by the server, which escapes every value
        } catch (error) {
            if (error.name !== "AbortError") output.textContent = panel.dataset.failed;
        }
    };

    form.addEventListener("submit", (event) => {
        event.preventDefault();
        show();
    });
    show();
});
