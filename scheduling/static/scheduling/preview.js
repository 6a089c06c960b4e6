// The preview under a template's form: each text as rendered for the chosen customer, shortly after the last key.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
    const panel = document.getElementById("template-preview");
    if (!panel) return;
    const form = document.querySelector("#template_form");
    const output = panel.querySelector("[data-output]");
    const sample = panel.querySelectorAll("input, textarea");
    let timer = null;
    let latest = 0;

    const saidBy = (body) => {
        const locale = form.elements[body.name.replace(/-body$/, "-locale")];
        const subject = form.elements[body.name.replace(/-body$/, "-subject")];
        return { locale: locale ? locale.value : "", subject: subject ? subject.value : "", body: body.value };
    };

    const texts = () => {
        if (!document.querySelector("textarea[name$='-body']")) {
            return [...panel.querySelectorAll("template")].map((text) => ({ ...text.dataset })); // who may only look
        }
        const bodies = [...(form ? form.querySelectorAll("textarea[name$='-body']") : [])];
        return bodies.filter((body) => !body.name.includes("__prefix__") && body.value).map(saidBy);
    };

    const ask = async (text) => {
        const data = new FormData();
        data.set("csrfmiddlewaretoken", document.querySelector("[name=csrfmiddlewaretoken]").value);
        if (text.text) {
            data.set("text", text.text); // a stored one, by its id
        } else {
            data.set("locale", text.locale);
            data.set("subject", text.subject);
            data.set("body", text.body);
        }
        sample.forEach((input) => data.set(input.name, input.value));
        const answer = await fetch(panel.dataset.url, { method: "POST", body: data, credentials: "same-origin" });
        if (answer.redirected) throw new Error("logged out");
        return answer.ok ? { locale: text.locale, ...(await answer.json()) } : null; // refused: nothing to show
    };

    const bubble = (rendered) => {
        const item = document.createElement("div");
        const tag = document.createElement("span");
        tag.className = "at-tag";
        tag.textContent = rendered.locale;
        const body = document.createElement("div");
        body.className = rendered.problem ? "at-note bad" : "at-bubble";
        body.textContent = rendered.problem || [rendered.subject, rendered.body].filter(Boolean).join("\n");
        item.append(tag, body);
        return item;
    };

    const show = async () => {
        const mine = ++latest;
        let rendered;
        try {
            rendered = await Promise.all(texts().map(ask));
        } catch {
            if (mine === latest) output.textContent = panel.dataset.failed; // not the text of before the edit
            return;
        }
        if (mine === latest) output.replaceChildren(...rendered.filter(Boolean).map(bubble));
    };

    const soon = () => {
        clearTimeout(timer);
        timer = setTimeout(show, 400);
    };

    if (form) form.addEventListener("input", soon);
    panel.addEventListener("input", soon);
    show();
});
