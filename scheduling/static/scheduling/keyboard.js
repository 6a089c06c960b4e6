// The back office by keyboard: `/` searches everything, `f` this list, `j` and `k` go through rows, `o` opens, `x` selects, `r` looks again, `?` helps.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
    const HERE = "at-here";
    const help = document.getElementById("keyboard-help");

    const rows = () => [...document.querySelectorAll("#result_list tbody tr, .at-table tbody tr")].filter(
        (row) => row.offsetParent !== null && row.querySelector("a[href], input"),
    );

    const linkOf = (row) => row.querySelector("th a[href]") || row.querySelector("a[href]");

    const here = () => document.querySelector(`tr.${HERE}`);

    const move = (step) => {
        const all = rows();
        if (!all.length) return;
        const at = all.indexOf(here());
        const next = all[Math.min(Math.max(at < 0 ? (step > 0 ? 0 : all.length - 1) : at + step, 0), all.length - 1)];
        here()?.classList.remove(HERE);
        next.classList.add(HERE);
        linkOf(next)?.focus({ preventScroll: true }); // Enter opens it, and a screen reader reads it
        next.scrollIntoView({ block: "nearest" });
    };

    const search = () => {
        const field = document.querySelector("#searchbar, [role=search] input:not([type=hidden]), input[type=search]");
        field?.focus();
        field?.select();
        return Boolean(field);
    };

    const select = () => {
        const box = here()?.querySelector("input.action-select, input[type=checkbox]");
        box?.click();
        return Boolean(box);
    };

    const open = () => {
        const link = here() && linkOf(here());
        link?.click();
        return Boolean(link);
    };

    const refresh = () => {
        const handled = !document.dispatchEvent(new CustomEvent("at:refresh", { cancelable: true }));
        if (!handled) location.reload();
    };

    const KEYS = {
        "/": () => document.dispatchEvent(new CustomEvent("at:search")),
        f: search,
        j: () => move(1),
        k: () => move(-1),
        o: open,
        x: select,
        r: refresh,
        "?": () => help?.showModal(),
    };

    const typing = (target) => target.closest?.("input:not([type=checkbox]), textarea, select, [contenteditable], [role=textbox]");

    document.addEventListener("keydown", (event) => {
        if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
        if (typing(event.target)) {
            if (event.key === "Escape") event.target.blur();
            return;
        }
        if (document.querySelector("dialog[open]")) return; // it has keys of its own
        const act = KEYS[event.key];
        if (!act || act() === false) return;
        event.preventDefault();
        event.stopPropagation(); // Unfold's list search listens for `/` too
    });

    // Django's boxes for choosing several name their hints without a role.
    window.addEventListener("load", () => {
        for (const hint of document.querySelectorAll(".help-tooltip[aria-label]")) hint.setAttribute("role", "img");
    });

    help?.querySelector("[data-close]").addEventListener("click", () => help.close());
    help?.addEventListener("click", (event) => { if (event.target === help) help.close(); });
});
