// The matrix: a card that is dragged to another row fills and sends the form "move to" of the card. A card to which an
// act leads back stands where the user clicked: the browser scrolls it to the top edge.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
    const table = document.querySelector(".at-matrix");
    if (!table) return;
    const grid = table.parentElement; // scrolls sideways
    const PLACE = "aftertouch-matrix-place";
    let card = null;

    for (const name of ["click", "submit"]) {
        table.addEventListener(name, (event) => {
            const clicked = event.target.closest("[data-node], .at-add");
            const place = [grid.scrollLeft, clicked?.getBoundingClientRect().top];
            if (clicked) sessionStorage.setItem(PLACE, JSON.stringify(place));
        });
    }
    window.addEventListener("load", () => { // after the browser's own scroll
        const kept = JSON.parse(sessionStorage.getItem(PLACE));
        const named = document.getElementById(location.hash.slice(1));
        sessionStorage.removeItem(PLACE);
        if (!kept || !named) return;
        grid.scrollLeft = kept[0];
        named.scrollIntoView({ block: "nearest", inline: "nearest" });
        window.scrollBy(0, named.getBoundingClientRect().top - kept[1]);
    });

    const rowOf = (target) => target.closest?.("tr[data-stage]");
    const mark = (row) => {
        table.querySelectorAll(".at-drop").forEach((each) => each.classList.remove("at-drop"));
        row?.classList.add("at-drop");
    };
    const accepts = (row) => card && row && row !== rowOf(card) && moveForm(row);
    const moveForm = (row) => {
        const select = card.querySelector("select[name=stage]");
        return [...(select?.options ?? [])].some((each) => each.value === row.dataset.stage) && select.form;
    };

    for (const each of table.querySelectorAll("[data-node]:has(select[name=stage])")) each.draggable = true;
    table.addEventListener("dragstart", (event) => {
        card = event.target.closest?.("[data-node]");
        if (!card) return;
        event.dataTransfer.effectAllowed = "move";
        event.dataTransfer.setData("text/plain", card.id);
        card.classList.add("at-dragged");
    });
    table.addEventListener("dragover", (event) => {
        const row = rowOf(event.target);
        if (!accepts(row)) return mark(null);
        event.preventDefault();
        mark(row);
    });
    table.addEventListener("drop", (event) => {
        const row = rowOf(event.target);
        if (!accepts(row)) return;
        event.preventDefault();
        const form = moveForm(row);
        form.elements.stage.value = row.dataset.stage;
        form.requestSubmit();
    });
    table.addEventListener("dragend", () => {
        mark(null);
        card?.classList.remove("at-dragged");
        card = null;
    });
});
