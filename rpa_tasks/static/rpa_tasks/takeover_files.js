// Files between the operator's machine and the page in the shop's browser. They travel in parts; a part that is not
// confirmed is sent again, so a lost message only delays the file. A new connection goes on where the old one ended.
import { every } from "../scheduling/timers.js";

export function exchangeFiles(find, act) {
    const PART = 45000; // bytes, limit of the server
    const AHEAD = 8; // parts that are not confirmed yet
    const TICK = 20; // ms between parts: the server takes 100 messages a second
    const REPEAT_AFTER = 3000;
    const FILES = 20; // limit of the node
    const form = find("-chooser");
    const input = form.querySelector("input");
    const progress = form.querySelector("progress");
    const list = find("-downloads");
    const problem = find("-file-problem");
    let limit = 0;
    let chooser = null;
    let upload = null;
    let download = null;
    let isExchanging = false;

    const showProblem = (name) => {
        problem.hidden = !name;
        if (name) problem.textContent = (problem.dataset[name] || problem.dataset.disk).replace("{limit}", Math.floor(limit / 2 ** 20));
    };

    // --- from this machine to the page ---

    const chooseFiles = () => {
        const files = [...input.files];
        const size = files.reduce((sum, file) => sum + file.size, 0);
        if (!files.length) return;
        if (files.length > FILES) { showProblem("too_many"); return; }
        if (size > limit) { showProblem("too_large"); return; }
        showProblem("");
        const token = [...crypto.getRandomValues(new Uint8Array(16))].map((each) => each.toString(16).padStart(2, "0")).join("");
        upload = { chooser: chooser.id, token, files, number: 0, begun: false, sent: 0, confirmed: 0, movedAt: Date.now() };
        progress.max = Math.max(size, 1);
        progress.value = 0;
        progress.hidden = false;
        input.hidden = true;
        exchange();
    };

    const sendPart = () => {
        const { chooser: asked, token, number, files } = upload;
        const file = files[number];
        if (!file || upload.reading) return; // after the last file the node gives them to the page
        if (Date.now() - upload.movedAt > REPEAT_AFTER) {
            Object.assign(upload, { begun: false, sent: upload.confirmed, movedAt: Date.now() });
        }
        if ((upload.begun && upload.sent >= file.size) || upload.sent - upload.confirmed >= AHEAD * PART) return;
        const mine = upload;
        const offset = mine.sent;
        mine.reading = true;
        const reader = new FileReader();
        reader.addEventListener("loadend", () => {
            mine.reading = false;
            if (upload !== mine || mine.number !== number) return;
            if (reader.error) { upload = null; act({ do: "no_upload", chooser: asked }); showProblem("unreadable"); return; }
            const data = reader.result.slice(reader.result.indexOf(",") + 1);
            act({ do: "upload", chooser: asked, token, number, of: files.length, name: file.name.slice(-255), size: file.size, offset, data: file.size ? data : "" });
            mine.begun = true;
            mine.sent = Math.min(offset + PART, file.size);
        });
        reader.readAsDataURL(file.slice(offset, offset + PART));
    };

    const noteUpload = (notice) => {
        if (!upload || notice.token !== upload.token || notice.number !== upload.number) return; // it knows it already
        if (notice.received < upload.confirmed) upload.sent = upload.confirmed = notice.received; // the node has lost it
        if (notice.received <= upload.confirmed && upload.files[upload.number].size) return;
        upload.confirmed = notice.received;
        upload.movedAt = Date.now();
        const before = upload.files.slice(0, upload.number).reduce((sum, file) => sum + file.size, 0);
        progress.value = before + upload.confirmed;
        if (upload.confirmed >= upload.files[upload.number].size) {
            Object.assign(upload, { number: upload.number + 1, begun: false, sent: 0, confirmed: 0 });
        }
    };

    const showChooser = (asked) => {
        if (asked && chooser && asked.id === chooser.id && !form.hidden) return;
        chooser = asked;
        form.hidden = !asked;
        if (!asked || upload) return;
        input.value = "";
        input.multiple = asked.multiple;
        input.hidden = false;
        progress.hidden = true;
        showProblem("");
        input.focus();
    };

    // --- from the page to this machine ---

    const askForPart = () => {
        download.askedAt = Date.now();
        download.asks = false;
        act({ do: "fetch", id: download.id, offset: download.received });
    };

    const notePart = (notice) => {
        if (!download || notice.id !== download.id || notice.offset !== download.received) return;
        const bytes = Uint8Array.from(atob(notice.data), (each) => each.charCodeAt(0));
        download.parts.push(bytes);
        download.received += bytes.length;
        if (download.received < notice.size && bytes.length) { download.asks = true; return; }
        const link = document.createElement("a");
        link.href = URL.createObjectURL(new Blob(download.parts, { type: "application/octet-stream" }));
        link.download = notice.name;
        link.click();
        setTimeout(() => URL.revokeObjectURL(link.href), 60000);
        act({ do: "fetched", id: notice.id });
        download = null;
    };

    // --- both ways ---

    const exchangePart = () => {
        if (upload) sendPart();
        if (download && (download.asks || Date.now() - download.askedAt > REPEAT_AFTER)) askForPart();
        isExchanging = Boolean(upload || download);
        return isExchanging;
    };
    const exchange = () => { if (!isExchanging) every(TICK, exchangePart); };

    const buttonOf = (words, action) => {
        const button = document.createElement("button");
        button.type = "button";
        button.className = "at-button at-slim";
        button.textContent = words;
        button.addEventListener("click", action);
        return button;
    };

    const rowOf = (each, controls) => {
        const row = document.createElement("li");
        row.className = "at-row";
        const name = document.createElement("span");
        const size = document.createElement("span");
        name.textContent = each.name;
        name.className = "at-strong";
        size.className = "at-quiet";
        size.textContent = each.state === "done" || each.state === "running" ? `${(each.size / 2 ** 20).toFixed(1)} MB` : "";
        const state = document.createElement("span");
        state.textContent = list.dataset[each.state].replace("{limit}", Math.floor(limit / 2 ** 20));
        row.append(name, size, state);
        if (!controls) return row;
        if (each.state === "done") {
            row.append(buttonOf(list.dataset.save, () => {
                if (download) return;
                showProblem("");
                download = { id: each.id, parts: [], received: 0, asks: true, askedAt: 0 };
                exchange();
            }));
        }
        row.append(buttonOf(list.dataset.remove, () => act({ do: "fetched", id: each.id })));
        return row;
    };

    form.addEventListener("submit", (event) => event.preventDefault());
    input.addEventListener("change", chooseFiles);
    form.querySelector("[data-dismiss]").addEventListener("click", () => {
        if (chooser) act({ do: "no_upload", chooser: chooser.id });
        upload = null;
    });

    return {
        show(files, controls) {
            limit = files.limit;
            if (upload && files.chooser?.id !== upload.chooser) upload = null; // without control it only waits
            showChooser(controls ? files.chooser : null);
            list.hidden = !files.downloads.length;
            list.querySelector("ul").replaceChildren(...files.downloads.map((each) => rowOf(each, controls)));
        },
        note(notice) {
            if (notice.type === "upload") noteUpload(notice);
            else if (notice.type === "part") notePart(notice);
            else if (notice.type === "file_problem" && (upload || download)) {
                if (upload) { upload = null; input.value = ""; input.hidden = false; progress.hidden = true; }
                download = null;
                showProblem(notice.problem);
            }
        },
    };
}
