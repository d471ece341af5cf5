// Elements, numbers and the hint beside the cursor. Text only ever becomes text nodes: nothing of a run is parsed as HTML.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function sv(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return String(Number(value.toPrecision(3)).toExponential()).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

// An axis's numbers, with as many digits as tell them apart.
function numbers(values) {
  let texts = values.map(number);
  for (let digits = 4; digits < 13 && new Set(texts).size < texts.length; digits += 1) {
    texts = values.map((value) => String(Number(value.toPrecision(digits))));
  }
  return texts;
}

function percent(share) {
  return share > 0 && share < 0.001 ? "<0.1%" : `${Number((100 * share).toPrecision(3))}%`;
}

// At most about `count` round numbers in [low, high].
function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  const found = [];
  for (let place = Math.ceil(low / step); place * step <= high * (1 + 1e-9) + 1e-12; place += 1) found.push(place * step);
  return found;
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

const tip = {
  show(event, ...children) {
    const box = document.getElementById("tip");
    box.replaceChildren(...children);
    box.hidden = false;
    const left = Math.min(event.pageX + 14, window.scrollX + document.documentElement.clientWidth - box.offsetWidth - 8);
    box.style.left = `${Math.max(4, left)}px`;
    box.style.top = `${event.pageY + 14}px`;
  },
  hide() { document.getElementById("tip").hidden = true; },
  rows(heading, rows) {
    return [el("strong", {}, heading), el("table", {}, rows.map(([colour, name, value]) =>
      el("tr", {}, el("td", {}, el("span", { class: "swatch", style: { "--colour": colour } }), name), el("td", {}, value))))];
  },
};

function chip(label, colour, pressed, onclick, dash = "solid") {
  return el("button", { class: "chip", "aria-pressed": String(pressed), style: { "--colour": colour, "--dash": dash }, onclick }, label);
}

function choice(label, options, chosen, onchange) {
  const box = el("select", { onchange: (event) => onchange(event.target.value), "aria-label": label },
    options.map(([value, text]) => el("option", { value, selected: String(value) === String(chosen) }, text)));
  return el("label", {}, label, box);
}
