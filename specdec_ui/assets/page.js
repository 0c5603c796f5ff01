// What the browser does alone: replay both lanes on one clock, hide dropped drafts.
const watchable = 4; // seconds that a replay takes at least
window.specdec = {
  replay() {
    const times = [...document.querySelectorAll(".sd-text .s:last-child")].map((step) =>
      parseFloat(step.style.getPropertyValue("--t")));
    const slower = Math.max(1, Math.ceil(watchable / Math.max(...times, 0.001)));
    document.body.style.setProperty("--sd-slower", slower);
    const name = "Replay side by side" + (slower > 1 ? ` (${slower}x slower)` : "");
    document.querySelector("#sd-replay").textContent = name;
    delete document.body.dataset.sdReplaying;
    void document.body.offsetWidth; // lets the animations start again
    document.body.dataset.sdReplaying = "";
  },
  // A live run must not wait for times that a replay would.
  live() {
    delete document.body.dataset.sdReplaying;
  },
  hideDropped(hide) {
    if (hide) document.body.dataset.sdHideDropped = "";
    else delete document.body.dataset.sdHideDropped;
  },
};

// A lane that is read at its end stays there as it grows; one that was scrolled back stays too.
const nearEnd = 40; // pixels
const isAtEnd = new WeakMap();
const lastTop = new WeakMap(); // where this script has scrolled a lane to
const fromEnd = (lane) => lane.scrollHeight - lane.scrollTop - lane.clientHeight;
document.addEventListener("scroll", ({ target }) => {
  if (target.classList?.contains("sd-text")) isAtEnd.set(target, fromEnd(target) < nearEnd);
}, true);
new MutationObserver((changes) => {
  const lanes = new Set(changes.map(({ target }) => target.closest?.(".sd-text")));
  for (const lane of lanes) {
    if (!lane) continue;
    // Scrolled back a moment ago: its event comes only with the next frame.
    if (lane.scrollTop < lastTop.get(lane) - 1) isAtEnd.set(lane, fromEnd(lane) < nearEnd);
    if (isAtEnd.get(lane) === false) continue;
    lane.scrollTop = lane.scrollHeight;
    lastTop.set(lane, lane.scrollTop);
  }
}).observe(document.documentElement, { childList: true, subtree: true });
