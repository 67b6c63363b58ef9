// Sphinx's own weights. A query of several words may be a message, and one page is made of messages; reasons and history
// come last.
var Scorer = {
  score: ([page, , , , score]) => {
    const words = (new URLSearchParams(window.location.search).get("q") || "").trim().split(/\s+/).length;
    if (page === "docs/troubleshooting") return score + (words > 1 ? 8 : 0);
    return /^docs\/decisions\/|^CHANGELOG/.test(page) ? score - 6 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
