// What a reader has chosen about the charts: pins, which outlive the page, and words to search for.
"use strict";

const PINS = "megasharp report: pins";

// Storage may be full, forbidden or absent, as it can be for a file: the pins then last as long as the page.
function storedPins() {
  try {
    const stored = JSON.parse(window.localStorage.getItem(PINS));
    return Array.isArray(stored) ? stored.filter((name) => typeof name === "string") : [];
  } catch {
    return [];
  }
}

function storePins(names) {
  try {
    window.localStorage.setItem(PINS, JSON.stringify([...names]));
  } catch {
    // They are kept in `state` alone.
  }
}

const state = {
  hidden: new Set(), log: false, smooth: 0, models: null, passLog: false, probes: {}, browser: browserState(), stored: storedState(), query: "", pins: new Set(storedPins()), open: new Map(),
};
const narrow = window.matchMedia("(max-width: 760px)");

// Parts and groups of charts that nobody has opened or closed are open where the window is wide.
function isOpen(name, wide = true) {
  return state.open.has(name) ? state.open.get(name) : wide && !narrow.matches;
}

function folding(attributes, name, heading, open, ...children) {
  const box = el("details", { ...attributes, open, "data-fold": name }, el("summary", { onclick: () => state.open.set(name, !box.open) }, heading), ...children);
  return box;
}

function part(name, heading, ...children) {
  return folding({ id: name, class: "part" }, name, el("h2", {}, heading), isOpen(name), ...children);
}

function unfold(name) {
  const box = document.getElementById(name);
  if (box) { state.open.set(name, true); box.open = true; }
}

// All words of the query are in a chart's key, its name or its section's.
function asked(figure) {
  const text = `${figure.name} ${figure.title} ${figure.section}`.toLowerCase();
  return state.query.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}
