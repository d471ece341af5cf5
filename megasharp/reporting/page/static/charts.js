// Charts on the page: drawn when they come into view, zoomed together with all of the same x axis, read under the cursor.
"use strict";

const charts = new Map();
const waiting = new Map();
// The range that is seen of each x axis, null where it is seen whole; one for all charts of the axis.
const views = { step: null, k: null, rank: null };
const NEAR_PX = 12, MARK_PX = 6, AHEAD = "500px";

let pointed = null;

// The place of a chart: `spec()` is asked for {name, title, lines, marks, axis, x, log, zero, ends, whole} once it is in view.
function chart(name, title, spec) {
  const host = el("div", { class: "chart", role: "img", "aria-label": title, "data-chart": name });
  waiting.set(host, spec);
  return host;
}

const inView = new IntersectionObserver((entries) => entries.forEach((one) => one.isIntersecting && drawChart(one.target)), { rootMargin: AHEAD });
const resized = new ResizeObserver((entries) => entries.forEach(({ target, contentRect }) => {
  const drawn = charts.get(target);
  if (drawn && contentRect.width && Math.round(contentRect.width) !== drawn.width) drawn.setSize({ width: Math.round(contentRect.width), height: HEIGHT_PX });
}));

// After parts were drawn anew: forget charts that are gone, draw those in view now, and the others when they come into it.
function settle() {
  for (const [host, drawn] of charts) if (!host.isConnected) { drawn.destroy(); charts.delete(host); resized.unobserve(host); }
  for (const host of [...waiting.keys()]) {
    if (!host.isConnected) { waiting.delete(host); continue; }
    const { top, bottom, width } = host.getBoundingClientRect();
    if (width && bottom > 0 && top < window.innerHeight) drawChart(host);
    else inView.observe(host);
  }
}

function drawChart(host) {
  const spec = waiting.get(host)?.();
  if (!spec) return;
  waiting.delete(host);
  inView.unobserve(host);
  spec.lines = spec.lines.filter((line) => (spec.log ? Array.prototype.some.call(line.y, (value) => value > 0) : line.y.length));
  if (!spec.lines.length) {
    host.append(el("p", { class: "note" }, spec.log ? "nothing above zero to draw" : "nothing chosen"));
    return;
  }
  const columns = columnsOf(spec);
  const hooks = { view: () => views[spec.axis] || spec.whole || wholeOf(columns), zoom: (range) => zoom(spec.axis, range), pointed: (u) => u === pointed && read(u, spec, columns) };
  const drawn = new uPlot(optionsOf(spec, columns, host.clientWidth, hooks), joined(columns, spec.log), host);
  drawn.over.addEventListener("pointerenter", () => { pointed = drawn; });
  drawn.over.addEventListener("pointerleave", () => { pointed = null; tip.hide(); });
  drawn.axis = spec.axis;
  charts.set(host, drawn);
  resized.observe(host);
}

function wholeOf(columns) {
  return [Math.min(...columns.map(({ x }) => x[0])), Math.max(...columns.map(({ x }) => x.at(-1)))];
}

// Show `range` of an x axis in all of its charts; null: the whole.
function zoom(axis, range) {
  views[axis] = range;
  for (const drawn of charts.values()) {
    if (drawn.axis !== axis) continue;
    const [min, max] = drawn.scales.x.range(drawn);
    drawn.batch(() => { drawn.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false); drawn.setScale("x", { min, max }); });
  }
  document.dispatchEvent(new CustomEvent("zoomed", { detail: axis }));
}

// The values of all lines at the cursor, beside it.
function read(u, spec, columns) {
  const { left, idx, idxs } = u.cursor;
  if (left < 0 || idx === null) return tip.hide();
  const middle = u.data[0][idx], rows = [];
  columns.forEach(({ line, edge }, at) => {
    const place = idxs[at + 1];
    if (edge || line.faint || place === null || place === undefined || u.data[at + 1][place] == null) return;
    if (Math.abs(u.valToPos(u.data[0][place], "x") - u.valToPos(middle, "x")) > NEAR_PX) return;
    const bounds = line.low ? ` (${number(u.data[at - 1][place])} to ${number(u.data[at][place])})` : "";
    rows.push([line.colour, line.label, number(u.data[at + 1][place]) + bounds]);
  });
  const happened = (spec.marks || []).filter((mark) => Math.abs(u.valToPos(mark.x, "x") - left) < MARK_PX).map((mark) => el("div", {}, mark.text));
  const box = u.over.getBoundingClientRect();
  return tip.show({ pageX: box.left + window.scrollX + left, pageY: box.top + window.scrollY + u.cursor.top }, ...tip.rows(`${spec.x} ${number(middle)}`, rows), ...happened);
}

// What is read under the cursor, by chart and place, for the same chart when it is drawn anew.
function reading() {
  const host = [...charts].find(([, drawn]) => drawn === pointed)?.[0];
  return host ? { name: host.dataset.chart, left: pointed.cursor.left, top: pointed.cursor.top } : null;
}

function readOn(place) {
  const found = place && [...charts].find(([host]) => host.dataset.chart === place.name);
  if (!found) return;
  pointed = found[1];
  pointed.setCursor({ left: place.left, top: place.top });
}

function repaint() {
  palette = {};
  charts.forEach((drawn) => drawn.redraw(false));
}
