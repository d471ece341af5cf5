// Shares in bins, as outlines of several models over each other, and seconds of stages on top of each other.
"use strict";

const WIDTH = 420, HEIGHT = 230, ROOM = { left: 46, right: 10, top: 10, bottom: 30 };

function scale(low, high, from, to, kind) {
  const map = kind === "log" ? Math.log10 : (value) => value;
  const [a, b] = [map(low), map(high)];
  return (value) => from + (b === a ? 0.5 : (map(value) - a) / (b - a)) * (to - from);
}

// `bars`: {label, colour, dash, shares}. `edges` are numbers (one more than bins), or `labels` name the bins.
function outlines({ bars, edges = null, labels = null, log = false, x = "", name = "" }) {
  const image = sv("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": name });
  const count = bars.length ? bars[0].shares.length : 0;
  if (!count) {
    image.append(sv("text", { x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing chosen"));
    return image;
  }
  const some = bars.flatMap((bar) => bar.shares).filter((share) => share > 0);
  const low = log ? Math.min(...some) / 1.6 : 0, high = log ? 1.2 : Math.min(1, Math.max(...some) * 1.08);
  const sx = scale(0, count, ROOM.left, WIDTH - ROOM.right, "linear");
  const sy = scale(low, high, HEIGHT - ROOM.bottom, ROOM.top, log ? "log" : "linear");
  for (const value of log ? logTicks(low, high) : ticks(low, high, 5)) {
    image.append(sv("line", { class: "grid-line", x1: ROOM.left, x2: WIDTH - ROOM.right, y1: sy(value), y2: sy(value) }),
      sv("text", { x: ROOM.left - 6, y: sy(value) + 4, "text-anchor": "end" }, percent(value)));
  }
  const words = labels || edges;
  const every = labels ? (count > 8 ? 2 : 1) : Math.ceil(count / 7);
  for (const place of named(words.length, every)) {
    image.append(sv("text", { x: sx(labels ? place + 0.5 : place), y: HEIGHT - 14, "text-anchor": "middle" },
      typeof words[place] === "number" ? number(words[place]) : words[place]));
  }
  image.append(sv("text", { x: WIDTH / 2, y: HEIGHT, "text-anchor": "middle" }, x));
  const floor = HEIGHT - ROOM.bottom;
  for (const bar of bars) {
    const height = (share) => (share > 0 ? sy(share) : floor);
    const path = bar.shares.map((share, at) => `${at ? "L" : `M${sx(0)},${floor}L`}${sx(at)},${height(share)}L${sx(at + 1)},${height(share)}`).join("");
    image.append(sv("path", { d: `${path}L${sx(count)},${floor}Z`, fill: bar.colour, "fill-opacity": 0.12 / bars.length }),
      sv("path", { class: "curve", d: `${path}L${sx(count)},${floor}`, stroke: bar.colour, "stroke-dasharray": { dashed: "6 4", dotted: "2 3" }[bar.dash],
        "stroke-opacity": bar.opacity }));
  }
  image.addEventListener("pointermove", (event) => {
    const box = image.getBoundingClientRect();
    const at = Math.floor((((event.clientX - box.left) / box.width) * WIDTH - ROOM.left) / ((WIDTH - ROOM.left - ROOM.right) / count));
    if (at < 0 || at >= count) return tip.hide();
    const heading = labels ? labels[at] : `${number(edges[at])} to ${number(edges[at + 1])}`;
    return tip.show(event, ...tip.rows(heading, bars.map((bar) => [bar.colour, bar.label, percent(bar.shares[at])])));
  });
  image.addEventListener("pointerleave", () => tip.hide());
  return image;
}

// Every `every`-th place and the last one, in whose favour a place right before it goes without.
function named(count, every) {
  const places = [];
  for (let place = 0; place < count - 1; place += every) places.push(place);
  if (places.length > 1 && count - 1 - places.at(-1) < every) places.pop();
  return [...places, count - 1];
}

const STAGE_COLOURS = 8;

// `rows`: [first step, last step, seconds of each of `names`].
function stacked({ names, rows, name, order }) {
  const colours = names.map((one) => stageColour(order.indexOf(one)));
  const image = sv("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": name });
  const highest = Math.max(...rows.map((row) => row.slice(2).reduce((sum, value) => sum + value, 0))) || 1;
  const sx = scale(0, rows.length, ROOM.left, WIDTH - ROOM.right, "linear");
  const sy = scale(0, highest * 1.05, HEIGHT - ROOM.bottom, ROOM.top, "linear");
  for (const value of ticks(0, highest * 1.05, 5)) {
    image.append(sv("line", { class: "grid-line", x1: ROOM.left, x2: WIDTH - ROOM.right, y1: sy(value), y2: sy(value) }),
      sv("text", { x: ROOM.left - 6, y: sy(value) + 4, "text-anchor": "end" }, number(value)));
  }
  const labels = Math.ceil(rows.length / 6);
  rows.forEach((row, at) => {
    let base = 0;
    names.forEach((_, stage) => {
      const value = row[2 + stage];
      image.append(sv("rect", { x: sx(at) + 0.4, width: Math.max(0.5, sx(at + 1) - sx(at) - 0.8), y: sy(base + value), height: Math.max(0, sy(base) - sy(base + value)),
        fill: colours[stage] }));
      base += value;
    });
    if (at % labels === 0) image.append(sv("text", { x: sx(at + 0.5), y: HEIGHT - 14, "text-anchor": "middle" }, String(row[0])));
  });
  image.append(sv("text", { x: WIDTH / 2, y: HEIGHT, "text-anchor": "middle" }, "step"));
  image.addEventListener("pointermove", (event) => {
    const box = image.getBoundingClientRect();
    const at = Math.floor((((event.clientX - box.left) / box.width) * WIDTH - ROOM.left) / ((WIDTH - ROOM.left - ROOM.right) / rows.length));
    if (at < 0 || at >= rows.length) return tip.hide();
    const row = rows[at];
    const heading = row[0] === row[1] ? `step ${row[0]}` : `steps ${row[0]} to ${row[1]}, mean`;
    return tip.show(event, ...tip.rows(heading, names.map((one, stage) => [colours[stage], one, `${number(row[2 + stage])} s`])));
  });
  image.addEventListener("pointerleave", () => tip.hide());
  return image;
}

function stageColour(stage) {
  const colour = `var(--run-${stage % STAGE_COLOURS})`;
  return stage < STAGE_COLOURS ? colour : `color-mix(in srgb, ${colour} 45%, var(--paper))`;
}
