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
