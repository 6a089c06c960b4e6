// The live browser of a shop: pictures from the node on a canvas, and mouse, keyboard and pasted text to it. A picture is
// acknowledged when it is painted, so a slow line gets fewer of them. Nothing that is typed stays in this page.
import { after, every } from "../scheduling/timers.js";
import { exchangeFiles } from "./takeover_files.js";

document.addEventListener("DOMContentLoaded", () => {
    const MOVE_EVERY = 50; // ms between positions of the mouse
    const PASTE_PART = 5000; // characters of one message
    const PING_EVERY = 5000;
    const ENDED = 4000;
    const FORBIDDEN = 4403;
    const find = (name) => document.getElementById(`take-over${name}`);
    const browser = find("");
    if (!browser) return;
    const canvas = find("-page");
    const keys = find("-keys");
    const status = find("-status");
    const isMac = /Mac/.test(navigator.platform);
    let socket = null;
    let connection = "";
    let controls = false;
    let isLeaving = false;
    let wait = 500;
    let size = { width: canvas.width, height: canvas.height };

    const send = (action) => {
        if (socket && socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify(action));
    };
    const act = (action) => controls && send(action);
    const files = exchangeFiles(find, act);

    // --- what comes from the node ---

    const paint = async (data) => {
        const head = new DataView(data);
        try {
            const picture = await createImageBitmap(new Blob([new Uint8Array(data, 8)], { type: "image/jpeg" }));
            if (canvas.width !== picture.width || canvas.height !== picture.height) {
                canvas.width = picture.width;
                canvas.height = picture.height;
            }
            canvas.getContext("2d").drawImage(picture, 0, 0);
            picture.close();
            size = { width: head.getUint16(4), height: head.getUint16(6) };
            canvas.dataset.pictures = Number(canvas.dataset.pictures || 0) + 1;
        } catch (error) {
            console.warn("a picture was not painted", error); // unacknowledged, it would be the last one
        }
        send({ do: "ack", number: head.getUint32(0) });
    };

    const showStatus = (name) => {
        status.textContent = status.dataset[name];
        status.className = `at-tag ${{ controls: "success", lost: "danger", watches: "info" }[name] || "default"}`;
        browser.classList.toggle("at-controlled", controls);
        if (find("-here")) find("-here").hidden = name !== "elsewhere";
    };

    const tabOf = (tab, shown) => {
        const words = find("-tabs").dataset;
        const each = document.createElement("span");
        const choose = document.createElement("button");
        choose.type = "button";
        choose.setAttribute("role", "tab");
        choose.setAttribute("aria-selected", String(shown));
        choose.textContent = (tab.url === "about:blank" ? "" : tab.title) || words.blank;
        choose.title = tab.url;
        choose.addEventListener("click", () => act({ do: "tab", id: tab.id }));
        const close = document.createElement("button");
        close.type = "button";
        close.title = words.close;
        close.setAttribute("aria-label", words.close);
        close.textContent = "×";
        close.addEventListener("click", () => act({ do: "close_tab", id: tab.id }));
        each.append(choose, close);
        return each;
    };

    let asked = 0; // the dialog that is shown: another may follow it at once
    const showDialog = (dialog) => {
        const form = find("-dialog");
        const wasShown = !form.hidden && asked === dialog?.id;
        form.hidden = !dialog;
        if (!dialog || wasShown) return;
        asked = dialog.id;
        form.querySelector("p").textContent = dialog.message;
        const answer = form.querySelector("input");
        answer.hidden = dialog.kind !== "prompt";
        answer.value = dialog.text;
        form.querySelector("[data-dismiss]").hidden = dialog.kind === "alert";
        (answer.hidden ? form.querySelector("[type=submit]") : answer).focus();
    };

    const showState = (state) => {
        controls = state.controller === connection;
        if (!state.controller) showStatus("waiting");
        else showStatus(controls ? "controls" : "controls" in browser.dataset ? "elsewhere" : "watches");
        find("-tabs").replaceChildren(...state.tabs.map((tab) => tabOf(tab, tab.id === state.shown)));
        const shown = state.tabs.find((tab) => tab.id === state.shown);
        const url = find("-url");
        if (shown && document.activeElement !== url) url.value = shown.url === "about:blank" ? "" : shown.url;
        showDialog(state.dialog);
        files.show(state.files, controls);
    };

    // A server refuses the handshake of a user who is logged out, and a browser does not say why.
    const checkLogin = async () => {
        const answer = await fetch(location.href, { method: "HEAD", redirect: "manual" }).catch(() => null);
        if (answer?.type === "opaqueredirect" && !isLeaving) location.reload();
    };

    const connect = () => {
        let isWelcome = false;
        const scheme = location.protocol === "https:" ? "wss" : "ws";
        socket = new WebSocket(`${scheme}://${location.host}${browser.dataset.socket}`);
        socket.binaryType = "arraybuffer";
        socket.addEventListener("message", ({ data }) => {
            wait = 500;
            if (typeof data !== "string") { paint(data); return; }
            const notice = JSON.parse(data);
            if (notice.type === "welcome") {
                isWelcome = true;
                connection = notice.connection;
            } else if (notice.type === "state") showState(notice);
            else files.note(notice);
        });
        socket.addEventListener("close", ({ code }) => {
            controls = false;
            if (isLeaving) return; // a reload would cancel the navigation of the form that ended the take-over
            if (code === ENDED || code === FORBIDDEN) { location.reload(); return; }
            if (!isWelcome) checkLogin();
            showStatus("lost");
            after(wait, connect);
            wait = Math.min(wait * 2, 10000);
        });
    };

    // --- what goes to the node ---

    const modifiersOf = (event) => {
        const meta = event.metaKey && !isMac;
        const control = event.ctrlKey || (event.metaKey && isMac);
        return (event.altKey ? 1 : 0) + (control ? 2 : 0) + (meta ? 4 : 0) + (event.shiftKey ? 8 : 0);
    };

    const pointOf = (event) => {
        const shown = canvas.getBoundingClientRect();
        return {
            x: Math.round((event.clientX - shown.left) * size.width / shown.width),
            y: Math.round((event.clientY - shown.top) * size.height / shown.height),
            modifiers: modifiersOf(event),
        };
    };

    const sendMouse = (type, event) => act({
        do: "mouse", type, ...pointOf(event), buttons: event.buttons & 7,
        button: type === "mouseMoved" && !event.buttons ? "none" : ["left", "middle", "right"][event.button] || "none",
        clicks: type === "mouseMoved" ? 0 : Math.min(event.detail || 1, 3),
    });

    let pressed = false;
    let movedAt = 0;
    canvas.addEventListener("mousedown", (event) => {
        event.preventDefault();
        keys.focus({ preventScroll: true });
        pressed = true;
        sendMouse("mousePressed", event);
    });
    window.addEventListener("mouseup", (event) => {
        if (pressed) sendMouse("mouseReleased", event);
        pressed = false;
    });
    window.addEventListener("mousemove", (event) => {
        if ((event.target !== canvas && !pressed) || event.timeStamp - movedAt < MOVE_EVERY) return;
        movedAt = event.timeStamp;
        sendMouse("mouseMoved", event);
    });
    canvas.addEventListener("contextmenu", (event) => event.preventDefault());

    let turned = null;
    canvas.addEventListener("wheel", (event) => {
        if (!controls) return;
        event.preventDefault();
        const lines = event.deltaMode === 1 ? 16 : 1;
        if (!turned) {
            turned = { dx: 0, dy: 0 };
            setTimeout(() => {
                const limit = (value) => Math.max(-5000, Math.min(5000, value));
                act({ do: "wheel", ...pointOf(event), dx: limit(turned.dx), dy: limit(turned.dy) });
                turned = null;
            }, MOVE_EVERY);
        }
        turned.dx += event.deltaX * lines;
        turned.dy += event.deltaY * lines;
    }, { passive: false });

    const sendKey = (type, event) => act({
        do: "key", type, key: event.key.slice(0, 30), code: event.code.slice(0, 30), number: event.keyCode & 255,
        modifiers: modifiersOf(event),
    });
    // An input method writes into the text field; its result is sent as text. Ctrl+V becomes a paste event.
    const isOwnKey = (event) => event.isComposing || event.keyCode === 229 || event.key === "Dead"
        || ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "v");
    for (const [name, type] of [["keydown", "down"], ["keyup", "up"]]) {
        keys.addEventListener(name, (event) => {
            if (isOwnKey(event)) return;
            event.preventDefault();
            sendKey(type, event);
        });
    }
    const sendText = (text) => {
        const characters = [...text];
        for (let start = 0; start < characters.length; start += PASTE_PART) {
            act({ do: "text", text: characters.slice(start, start + PASTE_PART).join("") });
        }
    };
    keys.addEventListener("compositionend", (event) => {
        sendText(event.data);
        keys.value = "";
    });
    keys.addEventListener("input", (event) => {
        if (event.isComposing || (event.inputType || "").includes("Composition")) return;
        sendText(keys.value);
        keys.value = "";
    });
    keys.addEventListener("paste", (event) => {
        event.preventDefault();
        sendText(event.clipboardData.getData("text/plain"));
    });
    keys.addEventListener("focus", () => browser.classList.add("at-focused"));
    keys.addEventListener("blur", () => browser.classList.remove("at-focused"));

    const bar = find("-bar");
    bar.addEventListener("submit", (event) => {
        event.preventDefault();
        act({ do: "go", url: find("-url").value });
        keys.focus({ preventScroll: true });
    });
    bar.querySelectorAll("[data-step]").forEach((each) => each.addEventListener("click", () => act({ do: "move", step: Number(each.dataset.step) })));
    bar.querySelector("[data-new-tab]").addEventListener("click", () => act({ do: "new_tab" }));
    const answer = (accept) => {
        act({ do: "dialog", id: asked, accept, text: find("-dialog").querySelector("input").value });
        keys.focus({ preventScroll: true });
    };
    find("-dialog").addEventListener("submit", (event) => { event.preventDefault(); answer(true); });
    find("-dialog").querySelector("[data-dismiss]").addEventListener("click", () => answer(false));
    if (find("-here")) find("-here").addEventListener("click", () => send({ do: "hello" }));

    document.addEventListener("submit", (event) => { isLeaving = !event.defaultPrevented; });
    every(PING_EVERY, () => send({ do: "ping" }));
    connect();
});
