// Lines over one axis, with values under the cursor: curves over steps, and pass@k over k.
"use strict";

const WIDTH = 420, HEIGHT = 230, ROOM = { left: 46, right: 10, top: 10, bottom: 30 };

// Means over windows of this share of the points, each at its window's middle.
function smoothed(points, share) {
  const width = Math.round(share * points.length);
  if (width < 2) return points;
  const made = [];
  for (let start = 0; start + width <= points.length; start += 1) {
    const part = points.slice(start, start + width);
    made.push([0, 1].map((at) => part.reduce((sum, point) => sum + point[at], 0) / width));
  }
  return made;
}

function scale(low, high, from, to, kind) {
  const map = { log: Math.log10, log2: Math.log2 }[kind] || ((value) => value);
  const [a, b] = [map(low), map(high)];
  return (value) => from + (b === a ? 0.5 : (map(value) - a) / (b - a)) * (to - from);
}

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
  return [low, high];
}

function yRange(values, log) {
  let [low, high] = extent(values);
  if (log) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
  if (low >= 0 && low < 0.5 * high) low = 0;
  const pad = (high - low || Math.abs(high) || 1) * 0.06;
  return [low === 0 ? 0 : low - pad, high + pad];
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const factor of high / low < 30 ? [1, 2, 5] : [1]) {
      const value = factor * 10 ** power;
      if (value >= low && value <= high) found.push(value);
    }
  }
  return found.length ? found : [low, high];
}

// `lines`: {label, colour, dash, points, faint}. `marks`: {x, colour, dash, text}. `axis`: linear or log2.
function chart({ lines, marks = [], axis = "linear", log = false, x = "step", ends = false, zero = false, name = "" }) {
  const drawn = lines.map((line) => ({ ...line, points: line.points.filter((point) => !log || point[1] > 0) }))
    .filter((line) => line.points.length);
  const width = WIDTH, right = ends ? 108 : ROOM.right;
  const image = sv("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": name, tabindex: "-1" });
  if (!drawn.length) {
    image.append(sv("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, log ? "nothing above zero to draw" : "nothing chosen"));
    return image;
  }
  const all = drawn.flatMap((line) => line.points);
  let [left, last] = extent(all.map((point) => point[0]));
  if (axis === "linear" && x === "step") left = Math.min(left, 0);
  const [low, high] = yRange([...(zero ? [0] : []), ...all.flatMap((point) => point.slice(1).filter((value) => !log || value > 0))], log);
  const sx = scale(left, last, ROOM.left, width - right, axis);
  const sy = scale(low, high, HEIGHT - ROOM.bottom, ROOM.top, log ? "log" : "linear");
  const place = (point) => `${sx(point[0]).toFixed(1)},${sy(point[1]).toFixed(1)}`;
  const heights = log ? logTicks(low, high) : ticks(low, high, 5);
  const heightNames = numbers(heights);
  for (const [at, value] of heights.entries()) {
    image.append(sv("line", { class: "grid-line", x1: ROOM.left, x2: width - right, y1: sy(value), y2: sy(value) }),
      sv("text", { x: ROOM.left - 6, y: sy(value) + 4, "text-anchor": "end" }, heightNames[at]));
  }
  if (zero) image.append(sv("line", { class: "zero", x1: ROOM.left, x2: width - right, y1: sy(0), y2: sy(0) }));
  const powers = [];
  for (let k = 2 ** Math.ceil(Math.log2(left || 1)); axis === "log2" && k <= last; k *= 2) powers.push(k);
  for (const value of axis === "log2" ? powers.filter((_, at) => powers.length < 9 || at % 2 === 0) : ticks(left, last, 5)) {
    image.append(sv("text", { x: sx(value), y: HEIGHT - 12, "text-anchor": "middle" }, String(value)));
  }
  image.append(sv("text", { x: (ROOM.left + width - right) / 2, y: HEIGHT, "text-anchor": "middle" }, x));
  for (const mark of marks) {
    image.append(sv("line", { class: "mark", x1: sx(mark.x), x2: sx(mark.x), y1: ROOM.top, y2: HEIGHT - ROOM.bottom, stroke: mark.colour,
      "stroke-dasharray": mark.dash }, sv("title", {}, mark.text)));
  }
  for (const line of drawn) {
    const bounded = line.points.filter((point) => point.length >= 4 && (!log || point[2] > 0));
    if (bounded.length > 1) {
      const path = [...bounded.map((p) => place([p[0], p[3]])), ...bounded.reverse().map((p) => place([p[0], p[2]]))];
      image.append(sv("polygon", { class: "band", points: path.join(" "), fill: line.colour, stroke: line.colour }));
    }
  }
  for (const line of drawn) {
    const dash = { dashed: "6 4", dotted: "2 3" }[line.dash];
    image.append(sv("polyline", { class: line.faint ? "curve faint" : "curve", points: line.points.map(place).join(" "), stroke: line.colour,
      "stroke-dasharray": dash, "stroke-opacity": line.opacity }));
    if (line.points.length < 13 && !line.faint) {
      image.append(...line.points.map((p) => sv("circle", { cx: sx(p[0]), cy: sy(p[1]), r: 2.6, fill: line.colour })));
    }
  }
  if (ends) image.append(...endLabels(drawn.filter((line) => !line.faint), sy, width - right + 6));
  hover(image, drawn.filter((line) => !line.faint), sx, width, right, x, marks);
  return image;
}

// Each line named at its right end, moved apart so that none covers another.
function endLabels(lines, sy, left) {
  const placed = lines.map((line) => ({ line, y: sy(line.points.at(-1)[1]) })).sort((a, b) => a.y - b.y);
  placed.forEach((one, at) => { if (at && one.y < placed[at - 1].y + 13) one.y = placed[at - 1].y + 13; });
  let floor = HEIGHT - ROOM.bottom;
  for (const one of [...placed].reverse()) { one.y = Math.min(one.y, floor); floor = one.y - 13; }
  return placed.map(({ line, y }) => sv("text", { class: "label", x: left, y: y + 4, style: { fill: line.colour } },
    `${line.label.length > 9 ? `${line.label.slice(0, 8)}\u2026` : line.label} ${number(line.points.at(-1)[1])}`));
}

function hover(image, lines, sx, width, right, x, marks) {
  const cursor = sv("line", { class: "cursor", y1: ROOM.top, y2: HEIGHT - ROOM.bottom, visibility: "hidden" });
  image.append(cursor);
  image.addEventListener("pointermove", (event) => {
    const box = image.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * width;
    const near = (points) => points.reduce((best, point) => (Math.abs(sx(point[0]) - at) < Math.abs(sx(best[0]) - at) ? point : best));
    const found = lines.map((line) => [line, near(line.points)]);
    if (!found.length) return;
    const middle = near(found.map(([, point]) => point));
    cursor.setAttribute("x1", sx(middle[0]));
    cursor.setAttribute("x2", sx(middle[0]));
    cursor.setAttribute("visibility", "visible");
    const rows = found.filter(([, point]) => Math.abs(sx(point[0]) - sx(middle[0])) < 12).map(([line, point]) => [line.colour, line.label,
      number(point[1]) + (point.length >= 4 ? ` (${number(point[2])} to ${number(point[3])})` : "")]);
    const near_marks = marks.filter((mark) => Math.abs(sx(mark.x) - at) < 6).map((mark) => el("div", {}, mark.text));
    tip.show(event, ...tip.rows(`${x} ${number(middle[0])}`, rows), ...near_marks);
  });
  image.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); tip.hide(); });
}
