// Timers of a page that run in time while it is hidden.
//
// Browsers wake the timers of a hidden page once a minute, but not those of its worker. Each timer runs in both, and the
// first counts: the page's own one is enough in a browser, or under a policy, that starts no worker.

const waiting = new Map(); // what a timer will run, by its number
const worker = startWorker();
let last = 0;

/** Call `run` once after this many ms. Returns what `cancel` takes. */
export function after(delay, run) {
    const timer = ++last;
    waiting.set(timer, run);
    setTimeout(finish, delay, timer);
    worker?.postMessage({ timer, delay });
    return timer;
}

/** Call `run` now and again after this many ms, until it returns false. */
export function every(delay, run) {
    if (run() !== false) after(delay, () => every(delay, run));
}

export function cancel(timer) { waiting.delete(timer); }

function finish(timer) {
    const run = waiting.get(timer);
    waiting.delete(timer);
    run?.();
}

function startWorker() {
    try {
        let file = new URL("./timers_worker.js", import.meta.url).href;
        // A page of another origin may not start the file, but a script of its own that imports it.
        if (!file.startsWith(`${location.origin}/`)) {
            file = URL.createObjectURL(new Blob([`importScripts(${JSON.stringify(file)})`], { type: "text/javascript" }));
        }
        const started = new Worker(file);
        started.onmessage = ({ data }) => finish(data);
        return started;
    } catch {
        return null;
    }
}
