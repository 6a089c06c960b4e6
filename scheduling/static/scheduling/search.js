// The search of every page: Ctrl+K or `/` opens it, arrows choose, Enter opens, Ctrl+Enter opens in a new tab.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
    const dialog = document.getElementById("global-search");
    if (!dialog) return;
    const PAUSE = 120; // ms after the last key
    const input = dialog.querySelector("input");
    const results = dialog.querySelector("[role=listbox]");
    const note = dialog.querySelector("[role=status]");
    let timer = 0;
    let request = null;
    let shown = ""; // the term of the results

    const options = () => [...results.querySelectorAll("[role=option]")];
    const chosen = () => results.querySelector("[aria-selected=true]");

    const choose = (option) => {
        chosen()?.setAttribute("aria-selected", "false");
        option?.setAttribute("aria-selected", "true");
        option?.scrollIntoView({ block: "nearest" });
        if (option) input.setAttribute("aria-activedescendant", option.id);
        else input.removeAttribute("aria-activedescendant");
    };

    const show = (html, term) => {
        shown = term;
        results.innerHTML = html; // rendered by the server, which escapes every value
        const last = results.querySelector("[data-note]");
        note.textContent = last?.textContent ?? "";
        last?.remove();
        input.setAttribute("aria-expanded", String(options().length > 0));
        choose(options()[0]);
    };

    const look = async () => {
        const asked = input.value.trim();
        request?.abort();
        const mine = request = new AbortController();
        try {
            const answer = await fetch(`${dialog.dataset.url}?s=${encodeURIComponent(asked)}`, { signal: mine.signal });
            if (!answer.ok) throw new Error(String(answer.status));
            const html = await answer.text();
            if (mine !== request) return;
            show(answer.redirected ? "" : html, asked);
            if (answer.redirected) note.textContent = dialog.dataset.loggedOut; // a reload would lose what is typed in the page
        } catch (error) {
            if (error.name === "AbortError") return;
            show("", asked);
            note.textContent = dialog.dataset.failed;
        }
    };

    const open = () => {
        if (dialog.open) return;
        dialog.showModal();
        input.select();
        look();
    };

    input.addEventListener("input", () => {
        clearTimeout(timer);
        timer = setTimeout(look, PAUSE);
    });

    input.addEventListener("keydown", (event) => {
        if (event.isComposing) return; // the Enter of an input method ends a word
        const all = options();
        const at = all.indexOf(chosen());
        if (event.key === "Escape") dialog.close(); // otherwise the first Escape only empties the field
        else if (event.key === "ArrowDown") choose(all[(at + 1) % all.length]);
        else if (event.key === "ArrowUp") choose(all[(at - 1 + all.length) % all.length]);
        else if (event.key === "Enter" && chosen() && shown === input.value.trim()) {
            if (event.ctrlKey || event.metaKey) window.open(chosen().href, "_blank", "noopener");
            else chosen().click();
        } else return;
        event.preventDefault();
    });

    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    document.getElementById("search-button")?.addEventListener("click", open);
    document.addEventListener("at:search", open);
    document.addEventListener("keydown", (event) => {
        if (event.defaultPrevented) return; // a key for the browser of a take-over
        if ((event.ctrlKey || event.metaKey) && !event.altKey && !event.shiftKey && event.key.toLowerCase() === "k") {
            event.preventDefault();
            event.stopPropagation();
            open();
        }
    });
});
