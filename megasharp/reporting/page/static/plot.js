// What uPlot is told of one chart of lines: axes, lines, bands, vertical marks, and names at the lines' ends.
"use strict";

const HEIGHT_PX = 230, FONT = "12px system-ui, sans-serif", FEW_POINTS = 13;
// Names at lines' ends: their font, the space around them, and the share of a chart's width that they take at most.
const END_FONT = "600 11px system-ui, sans-serif", END_SPACE_PX = 6, MOST_ENDS = 0.42;
const DASHES = { dashed: [6, 4], dotted: [2, 3] };
const MARKS = { restart: [1, 3], reset: [7, 3], stage: [7, 3, 1, 3] };

const ruler = document.createElement("canvas").getContext("2d");

let palette = {};

function widthOf(text, font) {
  ruler.font = font;
  return ruler.measureText(text).width;
}

// A colour of the style sheet's as canvases take it: they know no variables.
function painted(colour, opacity = 1) {
  const name = colour.match(/--[\w-]+/)[0];
  palette[name] = palette[name] || getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return palette[name] + Math.round(255 * opacity).toString(16).padStart(2, "0");
}

function yRange(low, high, { log, zero }) {
  if (low === null || low === undefined || !Number.isFinite(low)) return [log ? 0.1 : 0, 1];
  if (log) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
  const bottom = zero || (low >= 0 && low < 0.5 * high) ? Math.min(0, low) : low, top = zero ? Math.max(0, high) : high;
  const pad = (top - bottom || Math.abs(top) || 1) * 0.06;
  return [bottom === 0 ? 0 : bottom - pad, top === 0 && zero ? 0 : top + pad];
}

// `spec.lines`: {label, colour, dash, opacity, faint, x, y, low, high}; each is a column, its band two more.
function columnsOf(spec) {
  return spec.lines.flatMap((line) => [...(line.low ? [{ line, edge: true, x: line.x, y: line.low }, { line, edge: true, x: line.x, y: line.high }] : []),
    { line, edge: false, x: line.x, y: line.y }]);
}

function seriesOf(column) {
  const { line, edge } = column;
  const few = line.y.length < FEW_POINTS && !line.faint && !edge;
  const opacity = edge ? 0.7 : line.faint ? 0.3 : line.opacity || 1;
  return {
    label: line.label, width: edge || line.faint ? 1 : 2, dash: line.faint ? undefined : DASHES[line.dash], pxAlign: 0,
    stroke: () => painted(line.colour, opacity), points: { show: few, size: 5.5, width: 0, fill: () => painted(line.colour, opacity) },
  };
}

// Bands of several lines lie over each other: fainter ones keep their colours apart.
function bandsOf(columns) {
  const bands = columns.filter((column) => column.edge).length / 2, opacity = bands > 1 ? 0.04 : 0.13;
  return columns.flatMap((column, at) => (column.edge && !columns[at - 1]?.edge ? [{ series: [at + 2, at + 1], fill: () => painted(column.line.colour, opacity) }] : []));
}

function axesOf(spec) {
  const grid = { stroke: () => painted("--line"), width: 1 }, text = { stroke: () => painted("--muted"), font: FONT, ticks: { show: false }, filter: (_, splits) => splits };
  const powers = (low, high) => Array.from({ length: Math.floor(Math.log2(high)) + 1 }, (_, at) => 2 ** at).filter((k) => k >= low);
  const few = (values) => values.filter((_, at) => values.length < 9 || at % 2 === 0);
  return [
    { ...text, grid: { show: false }, size: 20, gap: 2, label: spec.x, labelFont: FONT, labelSize: 14, labelGap: 0,
      splits: (_, __, low, high) => (spec.axis === "k" ? few(powers(low, high)) : ticks(low, high, 5).filter(Number.isInteger)), values: (_, splits) => splits.map((value) => value.toLocaleString("en")) },
    { ...text, grid, size: (_, values) => Math.max(48, ...(values || []).map((value) => 10 + 6.6 * value.length)), gap: 4, splits: (_, __, low, high) => (spec.log ? logTicks(low, high) : ticks(low, high, 5)), values: (_, splits) => numbers(splits) },
  ];
}

function optionsOf(spec, columns, width, hooks) {
  return {
    width, height: HEIGHT_PX, legend: { show: false }, padding: [8, (u) => rightOf(spec, u.width || width, hooks.view()[1]), 0, 0],
    scales: { x: { time: false, range: () => hooks.view(), ...(spec.axis === "k" ? { distr: 3, log: 2 } : {}) },
      y: { distr: spec.log ? 3 : 1, range: (_, low, high) => yRange(low, high, spec) } },
    axes: axesOf(spec), series: [{}, ...columns.map(seriesOf)], bands: bandsOf(columns),
    cursor: { y: false, drag: { x: true, y: false, setScale: false, dist: 4 }, sync: { key: spec.axis, scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
      points: { size: (_, at) => (columns[at - 1].edge || columns[at - 1].line.faint ? 0 : 7) }, bind: { dblclick: () => () => hooks.zoom(null) } },
    hooks: {
      setSelect: [(u) => u.select.width > 0 && hooks.zoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")])],
      setCursor: [hooks.pointed],
      drawClear: [(u) => drawMarks(u, spec)],
      draw: [(u) => spec.ends && drawEnds(u, spec)],
    },
  };
}

// The space beside a chart: for the names at its lines' ends, or for half of the last number under it.
function rightOf(spec, width, last) {
  const half = widthOf(Math.floor(last).toLocaleString("en"), FONT) / 2 + 2;
  return Math.ceil(Math.max(10, half, ...(spec.ends ? endsOf(spec, width).map(({ text }) => widthOf(text, END_FONT) + 2 * END_SPACE_PX) : [])));
}

// A name without letters of its middle, so that it takes `room`; `share` of those that stay are its first.
function fitted(name, room, share) {
  let text = name;
  for (let kept = name.length - 1; kept >= 2 && widthOf(text, END_FONT) > room; kept -= 1) {
    const head = Math.max(1, Math.round(share * kept));
    text = `${name.slice(0, head)}\u2026${name.slice(name.length - kept + head)}`;
  }
  return text;
}

// The lines with their ends' names and values. Values are whole; names are cut where they still differ, if they can.
function endsOf(spec, width) {
  const ends = spec.lines.filter((line) => line.y.length).map((line) => ({ line, value: line.y.at(-1), figure: ` ${number(line.y.at(-1))}` }));
  const named = (share) => ends.map(({ line, figure }) => fitted(line.label, MOST_ENDS * width - widthOf(figure, END_FONT) - 2 * END_SPACE_PX, share));
  const choices = [0.5, 0.3, 0.7].map(named), names = choices.find((some) => new Set(some).size === some.length) || choices[0];
  return ends.map((end, at) => ({ ...end, text: names[at] + end.figure }));
}

// Beneath the lines: what happened to a run, and zero where values are changes.
function drawMarks(u, spec) {
  const { ctx, bbox } = u, ratio = uPlot.pxRatio;
  const line = (from, to, colour, dash, width) => {
    ctx.strokeStyle = colour;
    ctx.lineWidth = width * ratio;
    ctx.setLineDash(dash.map((length) => length * ratio));
    ctx.beginPath();
    ctx.moveTo(...from);
    ctx.lineTo(...to);
    ctx.stroke();
  };
  ctx.save();
  for (const mark of spec.marks || []) {
    const x = u.valToPos(mark.x, "x", true);
    if (x >= bbox.left && x <= bbox.left + bbox.width) line([x, bbox.top], [x, bbox.top + bbox.height], painted(mark.colour, 0.75), MARKS[mark.kind], 1.2);
  }
  if (spec.zero) {
    const y = u.valToPos(0, "y", true);
    line([bbox.left, y], [bbox.left + bbox.width, y], painted("--muted"), [], 1.5);
  }
  ctx.restore();
}

// Each line named at its right end, moved apart so that none covers another.
function drawEnds(u, spec) {
  const { ctx, bbox } = u, ratio = uPlot.pxRatio, gap = 13 * ratio;
  const placed = endsOf(spec, u.width).map((end) => ({ ...end, y: u.valToPos(end.value, "y", true) })).sort((a, b) => a.y - b.y);
  placed.forEach((one, at) => { if (at) one.y = Math.max(one.y, placed[at - 1].y + gap); });
  // The last number of the axis stands below.
  let floor = bbox.top + bbox.height - 4 * ratio;
  for (const one of [...placed].reverse()) { one.y = Math.min(one.y, floor); floor = one.y - gap; }
  ctx.save();
  ctx.font = END_FONT.replace("11px", `${11 * ratio}px`);
  ctx.textBaseline = "middle";
  ctx.textAlign = "left";
  for (const { line, text, y } of placed) {
    ctx.fillStyle = painted(line.colour);
    ctx.fillText(text, bbox.left + bbox.width + END_SPACE_PX * ratio, y);
  }
  ctx.restore();
}
