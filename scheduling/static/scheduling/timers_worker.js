// The worker of `timers.js`: it answers each timer when its time has come.
onmessage = ({ data: { timer, delay } }) => setTimeout(() => postMessage(timer), delay);
