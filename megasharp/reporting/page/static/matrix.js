// Candidates of a response's segment: a column a position, the likeliest on top, until they hold 0.95, at most 12; what was said is framed.
"use strict";

const SEGMENT = 20;

function visible(text) {
  return text.replace(/ /g, "\u2423").replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5") || "\u2205";
}

// `cells`: for each position [probability of the token, its rank, word, probability, word, probability ...].
function matrix(cells, tokens, words, start) {
  const end = Math.min(start + SEGMENT, cells.length);
  const columns = cells.slice(start, end).map((cell, at) => candidates(cell, tokens[start + at], words));
  const depth = Math.max(1, ...columns.map((column) => column.length));
  const rows = [];
  for (let rank = 0; rank < depth; rank += 1) {
    rows.push(el("tr", {}, columns.map((column) => cellOf(column[rank]))));
  }
  const head = el("tr", {}, columns.map((_, at) => el("th", { scope: "col" }, String(start + at + 1))));
  return el("table", { class: "matrix" }, el("thead", {}, head), el("tbody", {}, rows));
}

// The sampled token is always among them, last where it is beyond the mass.
function candidates(cell, token, words) {
  const [chance, rank, ...pairs] = cell;
  const found = [];
  for (let at = 0; at < pairs.length; at += 2) found.push({ text: words[pairs[at]], chance: pairs[at + 1], rank: at / 2, said: at / 2 === rank });
  if (rank >= found.length) found.push({ text: token, chance, rank, said: true });
  return found;
}

function cellOf(one) {
  if (!one) return el("td", { class: "empty" });
  const state = `${one.said ? " said" : ""}${one.chance > 0.55 ? " strong" : ""}`;
  const hint = `${visible(one.text)}  ${percent(one.chance)}, rank ${one.rank + 1}${one.said ? ", sampled" : ""}`;
  return el("td", { class: `cell${state}`, title: hint, style: { "--p": String(0.06 + 0.94 * one.chance) } }, visible(one.text));
}
