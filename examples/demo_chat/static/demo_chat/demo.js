// Demo chat: both sides of a session with a socket each, and the history of its silences.
import { SessionClient } from "../chat_sessions/client.js";

const settled = JSON.parse(document.getElementById("settled").textContent);
const words = settled.words;
const $ = (id) => document.getElementById(id);
const format = (text, values) => text.replace(/\{(\w+)\}/g, (_, name) => values[name]);
const clock = (at) => new Date(at).toLocaleTimeString(settled.language, { hour12: false });
document.querySelector("[name=language]").addEventListener("change", ({ target }) => target.form.submit());
const element = (tag, name, text) => Object.assign(document.createElement(tag), { className: name, textContent: text ?? "" });

class Side {
    constructor(role) {
        this.role = role;
        this.pane = $(role);
        this.list = this.pane.querySelector(".messages");
        this.input = this.pane.querySelector("input");
        this.status = this.pane.querySelector(".status");
        this.sign = this.pane.querySelector(".sign");
        this.typedAt = 0;
        this.pane.querySelector("form").addEventListener("submit", (event) => { event.preventDefault(); this.speak(); });
        this.input.addEventListener("input", () => this.typing());
    }

    enter(session, token, pingEvery) {
        this.chat?.leave();
        this.list.replaceChildren();
        this.chat = new SessionClient({ sessionId: session, token, cursor: "0", pingEvery });
        this.chat.addEventListener("state", ({ detail }) => this.show(detail));
        this.chat.addEventListener("message", ({ detail }) => this.hear(detail));
        this.chat.addEventListener("ack", ({ detail }) => this.bubble(detail.id)?.classList.remove("unsent"));
        this.chat.addEventListener("typing", () => this.passing(words.typing));
        this.chat.addEventListener("closed", ({ detail }) => this.note(format(words.left, { side: words[detail.by] ?? detail.by })));
        this.chat.connect();
    }

    speak() {
        const text = this.input.value.trim();
        if (!text) return;
        const id = this.chat.message(text);
        this.input.value = "";
        this.put({ id, from: this.role, text, at: Date.now() }).classList.add("unsent");
        story.soon();
    }

    typing() {
        if (this.chat.present && Date.now() - this.typedAt > 1500) {
            this.typedAt = Date.now();
            this.chat.sign("typing");
        }
    }

    hear(message) {
        this.passing("");
        const known = this.bubble(message.id);
        if (known) known.classList.remove("unsent");
        else this.put(message);
        story.soon();
    }

    put(message) {
        const side = message.from === this.role ? "mine" : message.from === "system" ? "guide" : "theirs";
        const bubble = element("li", `bubble ${side}`);
        bubble.dataset.id = message.id;
        bubble.append(
            element("span", "who", words[message.from] ?? message.from), element("p", "text", message.text),
            element("time", "at", clock(message.at)), element("span", "mark", words.unsent),
        );
        this.list.append(bubble);
        this.list.scrollTop = this.list.scrollHeight;
        return bubble;
    }

    bubble(id) { return [...this.list.children].find((each) => each.dataset.id === id); }

    note(text) {
        this.list.append(element("li", "note", text));
        this.list.scrollTop = this.list.scrollHeight;
    }

    passing(text) {
        this.sign.textContent = text;
        clearTimeout(this.passes);
        if (text) this.passes = setTimeout(() => { this.sign.textContent = ""; }, 3000);
    }

    show({ state, reason }) {
        this.pane.dataset.state = state;
        this.status.textContent = words[state] + (reason ? ` (${reason})` : "");
    }
}

class Story {
    constructor() {
        this.armings = new Map();
    }

    start(session) {
        this.session = session;
        this.armings.clear();
        $("timeline").replaceChildren();
        this.look();
    }

    /** Refresh at once after a message, not at the next second. */
    soon() { clearTimeout(this.timer); this.timer = setTimeout(() => this.look(), 120); }

    async look() {
        clearTimeout(this.timer);
        const session = this.session;
        try {
            const answer = await fetch(`${settled.state}?session=${encodeURIComponent(session)}`);
            if (!answer.ok) throw new Error(answer.status);
            const snapshot = await answer.json();
            if (session === this.session) this.update(snapshot);
        } catch {
            this.stand("away", words.away);
        }
        clearTimeout(this.timer);
        this.timer = setTimeout(() => this.look(), document.hidden ? 5000 : 500);
    }

    update(snapshot) {
        const left = snapshot.deadline && Math.max(0, new Date(snapshot.deadline) - new Date(snapshot.now)) / 1000;
        const silenced = snapshot.silences.some((each) => each.id === `${this.session}:${snapshot.armed_at}`);
        if (snapshot.state === "closed") this.stand("closed", words.closed);
        else if (snapshot.state === "paused") this.stand("paused", format(words.paused, { why: snapshot.pause }));
        else if (snapshot.deadline) this.stand("armed", format(words[`armed_${snapshot.awaited || "customer"}`], { seconds: left.toFixed(1) }));
        else if (snapshot.state === "silent") this.stand("silent", words.silent);
        else this.stand("unknown", format(words.not_armed, { why: snapshot.why }));
        $("why").textContent = format(words.why, snapshot);
        if (snapshot.deadline && !silenced) this.armings.set(snapshot.armed_at, snapshot);
        this.draw(snapshot);
    }

    stand(kind, text) {
        $("standing").dataset.kind = kind;
        $("standing").textContent = text;
    }

    /** Show only the last start of the timer before a silence: pings restart it every few seconds. */
    draw(snapshot) {
        const entries = snapshot.silences.flatMap((silence) => [...this.outcomes(silence).reverse(), this.silence(silence)]);
        const latest = [...this.armings.values()].at(-1);
        this.armings = new Map(latest ? [[latest.armed_at, latest]] : []);
        if (latest && snapshot.deadline && latest.armed_at === snapshot.armed_at) {
            const until = format(words.entry_armed_until, { time: clock(snapshot.deadline) });
            entries.unshift({ kind: "armed", at: snapshot.armed_at / 1000, head: words.entry_armed, text: until, key: "armed" });
        }
        const list = $("timeline");
        const html = entries.map((entry) => this.entry(entry));
        if (list.innerHTML !== html.map((each) => each.outerHTML).join("")) list.replaceChildren(...html);
    }

    silence(silence) {
        const unanswered = silence.awaited === "agent";
        const text = format(unanswered ? words.entry_step : words.entry_silent_number, { number: silence.nudge });
        return { kind: "silent", at: silence.at, head: unanswered ? words.entry_unanswered : words.entry_silent, text };
    }

    outcomes(silence) {
        if (!silence.touches.length) return [{ kind: "none", at: silence.at, head: "–", text: words.no_touch }];
        return silence.touches.map((touch) => {
            const parts = [touch.reason, touch.state === "delivered" && touch.late !== null ? format(words.late, { ms: touch.late }) : "",
                format(words.by, touch)];
            return { kind: touch.state, at: touch.at ?? silence.at, head: touch.words, text: parts.filter(Boolean).join(" · ") };
        });
    }

    entry({ kind, at, head, text }) {
        const item = element("li", `entry ${kind}`);
        item.append(element("time", "at", clock(at)), element("b", "head", head), element("span", "text", text));
        return item;
    }
}

const story = new Story();
const sides = { user: new Side("user"), agent: new Side("agent") };
let chosen = null;

async function start(session, tag) {
    const answer = await fetch(settled.start, {
        method: "POST", body: new URLSearchParams({ session, tag }),
        headers: { "X-CSRFToken": document.querySelector("[name=csrfmiddlewaretoken]").value },
    });
    if (!answer.ok) throw new Error((await answer.json()).error);
    return answer.json();
}

async function open(session, tag) {
    const snapshot = await start(session, tag);
    chosen = settled.tags.find((each) => each.tag === snapshot.tag);
    $("tag").value = snapshot.tag;
    const query = new URLSearchParams({ session: snapshot.session, tag: snapshot.tag });
    history.replaceState(null, "", `?${query}`);
    $("second").href = `?${query}`;
    $("session").textContent = snapshot.session;
    const pingEvery = Math.min(15000, chosen.seconds * 1000 / 3);
    let fresh = snapshot.tokens; // the first connection of each side uses these tokens without a second request
    for (const [role, side] of Object.entries(sides)) {
        let first = fresh[role];
        side.enter(snapshot.session, async () => {
            const token = first ?? (await start(snapshot.session, snapshot.tag)).tokens[role];
            first = null;
            return token;
        }, pingEvery);
    }
    presence(true);
    story.start(snapshot.session);
}

function presence(present) {
    const seconds = (sides.user.chat.pingEvery / 1000).toFixed(1).replace(/\.0$/, "");
    sides.user.chat.present = present;
    if (present) sides.user.chat.ping();
    $("silence").textContent = present ? words.go_silent : words.come_back;
    $("silence").setAttribute("aria-pressed", String(!present));
    $("presence").textContent = present ? format(words.present, { seconds }) : words.gone;
}

$("silence").addEventListener("click", () => presence(!sides.user.chat.present));
$("fresh").addEventListener("click", () => open("", $("tag").value));
$("tag").addEventListener("change", () => open("", $("tag").value));
$("finish").addEventListener("click", () => sides.user.chat.closeSession());
document.querySelectorAll("[data-sign]").forEach((button) => button.addEventListener("click", () => {
    sides.agent.chat.sign(button.dataset.sign);
    story.soon();
}));

const asked = new URLSearchParams(location.search);
open(asked.get("session") ?? "", asked.get("tag") ?? settled.tags[0].tag).catch(() => open("", settled.tags[0].tag));
