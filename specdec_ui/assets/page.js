// What the browser does alone: replay both lanes on one clock, hide dropped drafts.
window.specdec = {
  replay() {
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
document.addEventListener("scroll", ({ target }) => {
  if (target.classList?.contains("sd-text"))
    isAtEnd.set(target, target.scrollHeight - target.scrollTop - target.clientHeight < nearEnd);
}, true);
new MutationObserver((changes) => {
  const lanes = new Set(changes.map(({ target }) => target.closest?.(".sd-text")));
  for (const lane of lanes)
    if (lane && isAtEnd.get(lane) !== false) lane.scrollTop = lane.scrollHeight;
}).observe(document.documentElement, { childList: true, subtree: true });
