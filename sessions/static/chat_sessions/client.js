// One side of one live session, for browsers: pings, reconnects, and reads missed messages.
//
//     import { SessionClient } from "/static/chat_sessions/client.js";
//     const chat = new SessionClient({ sessionId: "s-1", token: async () => (await fetch("/my/token")).text() });
//     chat.addEventListener("message", (event) => show(event.detail.from, event.detail.text));
//     chat.addEventListener("state", (event) => dot(event.detail.state));
//     chat.connect();
//     chat.message("hello");
//
// Events: `state` (connecting, open, waiting, ended), and one for each frame of the server. A frame's event has the
// frame's type as name and the frame as detail: message, typing, ack, error, closed …. A message without acknowledgement
// is sent again after a reconnect, under the same id, so the server stores it once. `token` is called before each
// connection, as tokens are short-lived. `cursor: "0"` requests all kept messages; "" requests only new ones.

import { after, cancel, every } from "../scheduling/timers.js";

const FINAL = new Set([1000, 1009, 4400, 4406]); // a new connection would end in the same way
const FINAL_ERRORS = new Set(["invalid", "replayed"]); // a repeated message would be rejected again
const FIRST_PAUSE = 500;
const LONGEST_PAUSE = 30000;
const AT_ONCE = 30; // messages repeated at once after a reconnect: the server permits 60, and 20 a second
const PACE = 100; // ms between further ones
const FRAME_TIMEOUT = 10000; // ms until a frame must arrive after a ping
const LATE = 1000; // ms
const WAKES = ["online", "visibilitychange"]; // after these the connection may be dead, or possible again

export class SessionClient extends EventTarget {
    constructor({ sessionId, token, server = location.origin, cursor = "", pingEvery = 15000 }) {
        super();
        this.address = `${server.replace(/^http/, "ws")}/ws/v1/sessions/${encodeURIComponent(sessionId)}`;
        this.token = token;
        this.cursor = cursor;
        this.pingEvery = pingEvery;
        this.spoken = false; // a message was acknowledged: pings carry `spoken`, in case Redis loses the session
        this.present = true; // false: no pings, as from a closed page
        this.state = "ended";
        this.unacknowledged = new Map();
        this.failures = 0;
        this.attempt = 0; // older connections that end late are ignored
        this.wake = () => {
            if (this.state === "waiting") this.#open();
            else if (this.present) this.ping();
        };
    }

    connect() {
        WAKES.forEach((name) => addEventListener(name, this.wake));
        this.#open();
    }

    /** Disconnect without ending the session. */
    leave() {
        WAKES.forEach((name) => removeEventListener(name, this.wake));
        this.attempt += 1;
        this.#stopTimers();
        this.socket?.close();
        this.#become("ended");
    }

    message(text) {
        const frame = { type: "message", text, id: uuid() };
        this.unacknowledged.set(frame.id, frame);
        if (!this.repeating) this.#send(frame);
        return frame.id;
    }

    /** Typing, read; for agents tool, transfer, queue, resume. Lost where there is no connection. */
    sign(kind) { this.#send({ type: kind }); }

    /**
     * A CloudEvent about the user of this session: `specversion`, `id`, a `type` that is registered, perhaps `time` and
     * `data`. Whose it is, its chat and its source are the token's. The frame `ack` or `error` with this id answers.
     */
    event(event, id = uuid()) { this.#send({ type: "event", event, id }); return id; }

    /** The conversation is over: nothing more is sent for its silence. */
    closeSession() { this.#send({ type: "close" }); }

    ping() {
        if (this.state !== "open") return;
        this.#send({ type: "ping", ...(this.spoken && { spoken: true }) });
        this.deadline ??= this.#expectFrame();
    }

    async #open() {
        const mine = ++this.attempt;
        this.#stopTimers();
        this.#become("connecting");
        let token;
        try {
            token = await this.token();
        } catch {
            if (mine === this.attempt) this.#again();
            return;
        }
        if (mine !== this.attempt) return;
        const query = new URLSearchParams({ token, ...(this.cursor && { cursor: this.cursor }) });
        const socket = this.socket = new WebSocket(`${this.address}?${query}`);
        socket.onmessage = (event) => { if (mine === this.attempt) this.#take(JSON.parse(event.data)); };
        socket.onclose = (event) => { if (mine === this.attempt) this.#lost(event); };
    }

    #take(frame) {
        this.#stopExpecting();
        if (frame.type === "welcome") {
            this.cursor ||= frame.cursor;
            this.failures = 0;
            this.#become("open");
            this.#keepAlive();
            this.#repeat();
        } else if (frame.type === "message") {
            this.cursor = frame.cursor;
        } else if (frame.type === "ack") {
            if (this.unacknowledged.delete(frame.id)) this.spoken = true;
        } else if (frame.type === "error" && FINAL_ERRORS.has(frame.reason)) {
            this.unacknowledged.delete(frame.id);
        } else if (frame.type === "error" && this.unacknowledged.has(frame.id)) {
            after(2 * FIRST_PAUSE, () => this.unacknowledged.has(frame.id) && this.#send(this.unacknowledged.get(frame.id)));
        }
        this.dispatchEvent(new CustomEvent(frame.type, { detail: frame }));
    }

    /** Unacknowledged frames in order, with those added during the send. */
    #repeat() {
        const mine = this.attempt;
        const sent = new Set();
        every(PACE, () => {
            if (mine !== this.attempt) return false;
            const left = [...this.unacknowledged.keys()].filter((id) => !sent.has(id)).slice(0, sent.size ? 1 : AT_ONCE);
            left.forEach((id) => { sent.add(id); this.#send(this.unacknowledged.get(id)); });
            this.repeating = left.length > 0;
            return this.repeating;
        });
    }

    #keepAlive() {
        if (this.present) this.ping();
        this.pinging = after(this.pingEvery, () => this.#keepAlive());
    }

    /**
     * Without a frame in time the connection is dead. A late timer shows a page that slept or was blocked, perhaps with
     * the frame unread: it pings once more first.
     */
    #expectFrame(repeated = false) {
        const due = Date.now() + FRAME_TIMEOUT;
        return after(FRAME_TIMEOUT, () => {
            if (!repeated && Date.now() - due > LATE) {
                this.deadline = this.#expectFrame(true);
                this.ping();
                return;
            }
            this.attempt += 1; // a browser waits for the end of a dead connection
            this.socket.close();
            this.#lost({ code: 1006, reason: "" });
        });
    }

    #stopExpecting() {
        cancel(this.deadline);
        this.deadline = null;
    }

    #stopTimers() {
        cancel(this.reconnecting);
        cancel(this.pinging);
        this.#stopExpecting();
    }

    #lost(event) {
        this.#stopTimers();
        if (FINAL.has(event.code)) {
            this.#become("ended", event.code, event.reason);
        } else {
            this.#again(event.code, event.reason);
        }
    }

    /** The pause grows with random jitter, so that clients do not reconnect at the same time. */
    #again(code = 0, reason = "") {
        const pause = Math.min(FIRST_PAUSE * 2 ** this.failures, LONGEST_PAUSE) * (0.5 + Math.random() / 2);
        this.failures += 1;
        this.#become("waiting", code, reason);
        this.reconnecting = after(pause, () => this.#open());
    }

    #send(frame) {
        if (this.state === "open" && this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(frame));
    }

    #become(state, code = 0, reason = "") {
        this.state = state;
        this.dispatchEvent(new CustomEvent("state", { detail: { state, code, reason } }));
    }
}

/** `crypto.randomUUID` exists only where the page came over TLS or from this machine. */
function uuid() {
    return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
