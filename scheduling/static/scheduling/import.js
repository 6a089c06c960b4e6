// The upload of a file for an import: in parts, because a request must not exceed 1 MB. A part that failed is repeated.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
    const PART = 512 * 1024;
    const TRIES = 4;
    const form = document.getElementById("import-upload");
    if (!form) return;

    const find = (name) => form.querySelector(`[data-${name}]`);
    const wait = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));

    const fail = (text) => {
        find("problem").textContent = text || find("problem").dataset.lost;
        find("problem").hidden = false;
        find("progress").hidden = true;
        form.querySelector("button").disabled = false;
    };

    const show = (sent, size) => {
        const percent = Math.floor((100 * sent) / size);
        find("progress").hidden = false;
        find("progress").querySelector("progress").value = percent;
        find("progress").querySelector("span").textContent = `${percent}%`;
    };

    const send = async (address, part) => {
        for (let tries = 1; ; tries += 1) {
            const answer = await fetch(address, {
                method: "POST", body: part, credentials: "same-origin", redirect: "error",
                headers: { "Content-Type": "application/octet-stream", "X-CSRFToken": form.elements.csrfmiddlewaretoken.value },
            }).catch(() => null);
            if (answer && answer.ok) return;
            if (answer && answer.status < 500) throw new Error(answer.status === 409 ? await answer.text() : "");
            if (tries === TRIES) throw new Error("");
            await wait(2 ** tries);
        }
    };

    const upload = async (file) => {
        form.elements.file_name.value = file.name.slice(-200);
        form.elements.size.value = file.size;
        const answer = await fetch(location.href, { method: "POST", body: new FormData(form), credentials: "same-origin" });
        if (!answer.redirected) {
            const page = new DOMParser().parseFromString(await answer.text(), "text/html");
            const notes = page.querySelectorAll("#import-upload .errorlist li");
            throw new Error([...notes].map((each) => each.textContent).join("\n"));
        }
        for (let start = 0; start < file.size; start += PART) {
            show(start, file.size);
            await send(new URL(`../part/?start=${start}`, answer.url), file.slice(start, start + PART));
        }
        location.assign(answer.url);
    };

    form.addEventListener("submit", (event) => {
        event.preventDefault();
        find("problem").hidden = true;
        form.querySelector("button").disabled = true;
        upload(document.getElementById("import-file").files[0]).catch((error) => fail(error instanceof TypeError ? "" : error.message));
    });
});
