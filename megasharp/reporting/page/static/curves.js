// Curves over steps: pinned ones first, then by section; those that are zero throughout and those of no section folded away.
"use strict";

const BESIDE_TIME = ["Throughput", "GPUs (NVML)"], REST = "Everything else";
const WITH_CURVES = ["pinned", "curves", "time"];

function panel(figure) {
  const pinned = state.pins.has(figure.name);
  const pin = el("button", { class: "pin", "aria-pressed": String(pinned), "aria-label": `${pinned ? "unpin" : "pin"} ${figure.title}`, onclick: () => togglePin(figure.name) }, pinned ? "unpin" : "pin");
  return el("figure", { "data-figure": figure.name }, el("figcaption", {}, el("b", { title: figure.name }, figure.title), pin),
    chart(figure.name, figure.title, () => specOf(figure)));
}

function togglePin(name) {
  if (!state.pins.delete(name)) state.pins.add(name);
  storePins(state.pins);
  WITH_CURVES.forEach(redraw);
}

function specOf(figure) {
  const lines = [];
  for (const one of figure.series.filter((series) => !state.hidden.has(series.run))) {
    const run = data.runs[one.run], curve = curveOf(one);
    const style = one.label
      ? { label: `${run.name}: ${one.label}`, colour: runColour(one.run), dash: one.label.startsWith("discarded") ? "dashed" : "solid", opacity: one.label.endsWith("mean") ? 1 : 0.5 }
      : { label: run.name, colour: runColour(one.run), dash: runDash(one.run) };
    const means = figure.noisy ? smoothed(curve.y, state.smooth) : curve.y;
    if (means !== curve.y) lines.push({ ...style, ...curve, faint: true });
    lines.push({ ...style, ...curve, y: means });
  }
  const marks = data.runs.flatMap((run, at) => (state.hidden.has(at) ? [] : run.marks.map((mark) =>
    ({ x: mark.step, colour: runColour(at), kind: mark.kind, text: `${run.name}, after step ${mark.step}: ${mark.text}` }))));
  return { lines, marks, axis: "step", x: "step", log: state.log, whole: [0, Math.max(1, data.last_step)] };
}

function grid(figures) {
  return el("div", { class: "grid" }, figures.map(panel));
}

function group(name, figures, open, heading = name) {
  if (!figures.length) return null;
  return folding({ class: "group" }, `charts: ${name}`, el("h3", {}, heading, " ", el("small", {}, String(figures.length))), state.query ? true : open, grid(figures));
}

// The figures of the data that the query asks for and that are not pinned.
function unpinned() {
  return data.figures.filter((figure) => asked(figure) && !state.pins.has(figure.name));
}

// Those that the part on time draws; a metric that is zero throughout is with its like.
function besideTime(figure) {
  return BESIDE_TIME.includes(figure.section) && !figure.zero;
}

function pinned() {
  const figures = data.figures.filter((figure) => state.pins.has(figure.name) && asked(figure));
  return el("section", { id: "pinned" }, figures.length ? [el("h2", {}, "Pinned"), grid(figures)] : null);
}

function curves() {
  const figures = unpinned().filter((figure) => state.query || !besideTime(figure));
  const zero = figures.filter((figure) => figure.zero), moving = figures.filter((figure) => !figure.zero);
  const sections = [...new Set(moving.map((figure) => figure.section))].filter((name) => name !== REST);
  const inSection = (name) => moving.filter((figure) => figure.section === name);
  const box = part("curves", "Curves over steps", curveControls(), markNote(), found(figures),
    sections.map((name) => group(name, inSection(name), isOpen(`charts: ${name}`))),
    group(REST, inSection(REST), isOpen(`charts: ${REST}`, false), "Further charts"),
    group("zero", zero, isOpen("charts: zero", false), "Zero at every step"));
  if (state.query) box.open = true;
  return box;
}

function found(figures) {
  const shown = figures.length + data.figures.filter((figure) => state.pins.has(figure.name) && asked(figure)).length;
  return state.query ? el("p", { class: "count" }, `${shown} of ${data.figures.length} charts match \u201c${state.query}\u201d.`) : null;
}

function curveControls() {
  const again = () => WITH_CURVES.forEach(redraw);
  const slider = el("input", { type: "range", min: 0, max: 0.3, step: 0.02, value: state.smooth, "aria-label": "smoothing",
    onchange: (event) => { state.smooth = Number(event.target.value); again(); } });
  const log = el("input", { type: "checkbox", checked: state.log, onchange: (event) => { state.log = event.target.checked; again(); } });
  return el("div", { class: "controls" }, runChips(WITH_CURVES), el("label", {}, log, "logarithmic"), el("label", {}, "smoothing", slider),
    el("small", {}, state.smooth ? `means over ${percent(state.smooth)} of the points` : "as recorded"), stepRange());
}

// The steps that are seen, for fingers and keyboards; the mouse drags over a chart, and a double click shows all.
function stepRange() {
  const field = (name) => el("input", { type: "number", name, min: 0, max: data.last_step, "aria-label": `${name} step`, onchange: change });
  const change = () => {
    const [low, high] = [first.value === "" ? 0 : Number(first.value), last.value === "" ? data.last_step : Number(last.value)];
    if (high > low) zoom("step", low <= 0 && high >= data.last_step ? null : [low, high]);
  };
  const first = field("first"), last = field("last"), all = el("button", { onclick: () => zoom("step", null) }, "all steps");
  const box = el("span", { class: "range" }, "steps", first, "to", last, all);
  sayRange(box);
  return box;
}

function sayRange(box) {
  const [low, high] = views.step || [0, data.last_step];
  box.querySelector("[name=first]").value = Math.round(low);
  box.querySelector("[name=last]").value = Math.round(high);
  box.querySelector("button").disabled = views.step === null;
}

document.addEventListener("zoomed", () => document.querySelectorAll(".range").forEach(sayRange));

function markNote() {
  const used = new Set(data.runs.flatMap((run) => run.marks.map((mark) => mark.kind)));
  const legend = Object.entries({ restart: "dotted", reset: "dashed", stage: "dash-dotted" }).filter(([kind]) => used.has(kind)).map(([kind, dash]) => `${dash}: ${kind}`);
  return el("p", { class: "note" }, legend.length ? `Vertical lines in a run's colour: ${legend.join(", ")}. ` : null,
    "Bands: 95% intervals. Drag across a chart to zoom every chart to those steps, double-click to see all. Hover over a name to see the metric's key.");
}
