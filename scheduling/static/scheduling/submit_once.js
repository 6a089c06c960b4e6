// A second click on a button soon after the first sends nothing. A later one does: the answer may have been a file, after
// which the page stays.
"use strict";

(() => {
    const AGAIN_AFTER = 5000; // ms
    const sentAt = new WeakMap();
    window.addEventListener("submit", (event) => {
        if (Date.now() - sentAt.get(event.target) < AGAIN_AFTER) {
            event.preventDefault();
            event.stopImmediatePropagation(); // the page is still leaving, which other listeners noted at the first click
        }
    }, true);
    window.addEventListener("submit", (event) => {
        if (!event.defaultPrevented && event.target.getAttribute("method") === "post") sentAt.set(event.target, Date.now());
    });
})();
