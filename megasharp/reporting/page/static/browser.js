// The responses of training: filters, tokens shaded by how unlikely each was, two runs side by side on one prompt.
"use strict";

const CARDS = 20;

function rolloutSection(data, state, again) {
  const rows = data.rollouts.rows;
  const box = part("rollouts", "Responses of training", el("p", { class: "note" }, data.rollouts.note));
  if (!rows.length) return box;
  const filter = state.browser;
  const set = (key) => (value) => { filter[key] = value; filter.page = 0; again("rollouts"); };
  const unique = (key) => [...new Set(rows.map((row) => row[key]))].sort((a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b))));
  const any = (values, name = String) => [["", "all"], ...values.map((value) => [value, name(value)])];
  const search = el("input", { type: "search", value: filter.text, placeholder: "text of prompt or response", "aria-label": "search",
    oninput: (event) => searched("rollouts", event.target.value, set("text")) });
  const controls = el("div", { class: "controls" },
    data.runs.length > 1 && !filter.pair ? choice("run", any(data.runs.map((_, at) => at), (at) => data.runs[at].name), filter.run, set("run")) : null,
    choice("step", any(unique("step")), filter.step, set("step")),
    choice("outcome", any(unique("outcome")), filter.outcome, set("outcome")),
    choice("problem", any(unique("problem")), filter.problem, set("problem")),
    choice("reward", [["", "all"], ["zero", "0"], ["part", "between 0 and 1"], ["one", "1 and more"], ["less", "below 0"]], filter.reward, set("reward")),
    choice("code errors", [["", "all"], ["yes", "reported"], ["no", "none"]], filter.error, set("error")),
    el("label", {}, "search", search),
    data.runs.length > 1 ? el("label", {}, el("input", { type: "checkbox", checked: filter.pair, onchange: (event) => set("pair")(event.target.checked) }),
      "two runs side by side") : null,
    el("button", { onclick: () => { state.browser = browserState(filter.pair); again("rollouts"); } }, "clear filters"));
  const legend = el("p", { class: "note" }, "Shading: how improbable a token was under the policy when it was sampled; probability 1 ",
    el("span", { class: "legend-scale" }), " 0. Its number is in the token's tooltip.");
  const found = rows.filter((row) => passes(row, filter));
  box.append(controls, legend, filter.pair && data.runs.length > 1 ? sideBySide(data, state, found, again)
    : paged("rollouts", filter, found, again, "responses", (row) => card(data, row, false, filter.text)));
  return box;
}

// A part is drawn anew as a whole, so whoever types gets the cursor back into the new field.
function searched(part, text, set) {
  set(text);
  const field = document.querySelector(`#${part} input[type=search]`);
  field.focus();
  field.setSelectionRange(text.length, text.length);
}

function browserState(pair = false) {
  return { run: "", step: "", outcome: "", problem: "", reward: "", error: "", text: "", page: 0, pair, left: 0, right: 1 };
}

function passes(row, filter) {
  const bands = { zero: row.reward === 0, part: row.reward > 0 && row.reward < 1, one: row.reward >= 1, less: row.reward < 0 };
  return (filter.pair || filter.run === "" || String(row.run) === filter.run) &&
    ["step", "outcome", "problem"].every((key) => filter[key] === "" || String(row[key]) === String(filter[key])) &&
    (filter.reward === "" || bands[filter.reward]) &&
    (filter.error === "" || (filter.error === "yes") === (row.code_error !== "")) &&
    (filter.text === "" || `${row.prompt}\n${textOf(row)}`.toLowerCase().includes(filter.text.toLowerCase()));
}

function textOf(row) {
  return row.tokens.length ? row.tokens.join("") : row.text;
}

// A few of what was found, as cards, and buttons to the others.
function paged(name, filter, found, again, what, draw) {
  const pages = Math.max(1, Math.ceil(found.length / CARDS));
  filter.page = Math.min(filter.page, pages - 1);
  const turn = (by) => el("button", { disabled: filter.page + by < 0 || filter.page + by >= pages, onclick: () => { filter.page += by; again(name); } },
    by < 0 ? "earlier" : "later");
  const start = filter.page * CARDS;
  return el("div", {}, el("div", { class: "controls" }, el("span", { class: "count" }, `${found.length.toLocaleString("en")} ${what}`),
    pages > 1 ? [turn(-1), el("span", {}, `page ${filter.page + 1} of ${pages}`), turn(1)] : []),
  el("div", { class: "cards" }, found.slice(start, start + CARDS).map(draw)));
}

// One prompt at one step, of two runs: what each made of it.
function sideBySide(data, state, found, again) {
  const filter = state.browser;
  const runs = data.runs.map((run, at) => [at, run.name]);
  const [left, right] = [Number(filter.left), Number(filter.right)];
  const key = (row) => `${row.step} ${row.problem}`;
  const of = (run) => new Set(found.filter((row) => row.run === run).map(key));
  const both = [...of(left)].filter((one) => of(right).has(one));
  const chooser = el("div", { class: "controls" }, choice("left", runs, left, (value) => { filter.left = value; again("rollouts"); }),
    choice("right", runs, right, (value) => { filter.right = value; again("rollouts"); }));
  if (!both.length) return el("div", {}, chooser, el("p", { class: "count" }, "0 prompts that both runs have at one step, with these filters."));
  filter.page = Math.min(filter.page, both.length - 1);
  const chosen = both[filter.page];
  const [step, ...problem] = chosen.split(" ");
  chooser.append(choice("prompt", both.map((one, at) => [at, `step ${one.split(" ")[0]}: ${one.split(" ").slice(1).join(" ")}`]), filter.page,
    (value) => { filter.page = Number(value); again("rollouts"); }), el("span", { class: "count" }, `${both.length} prompts`));
  const columns = [left, right].map((run) => {
    const rows = found.filter((row) => row.run === run && key(row) === chosen);
    const correct = rows.filter((row) => row.outcome === "correct").length;
    return [el("h3", { style: { color: runColour(run) } }, `${data.runs[run].name}: ${correct} of ${rows.length} correct`), rows.map((row) => card(data, row, true, filter.text))];
  });
  const prompt = found.find((row) => key(row) === chosen).prompt;
  return el("div", {}, chooser, el("p", {}, `Step ${step}, ${problem.join(" ")}: `, el("code", {}, prompt)), pairOf(columns));
}

// Columns of a heading and cards each.
function pairOf(columns) {
  return el("div", { class: "pair" }, columns.map(([heading, cards]) => el("div", {}, heading, el("div", { class: "cards" }, cards))));
}

function card(data, row, bare = false, sought = "") {
  const facts = [bare ? null : el("span", {}, data.runs[row.run].name), bare ? null : el("span", {}, `step ${row.step}`),
    bare ? null : el("span", {}, row.problem), el("span", { class: `outcome ${row.outcome}` }, row.outcome), el("span", {}, `reward ${number(row.reward)}`),
    el("span", {}, `${row.length} tokens`), row.turns.length ? el("span", {}, `${row.turns.length} turns`) : null, row.answer ? el("span", {}, `answer ${row.answer}`) : null,
    row.dropped ? el("span", {}, `group dropped: ${row.dropped}`) : null, row.code_error ? el("span", { class: "warning" }, `reports ${row.code_error}`) : null];
  const letters = row.tokens.length ? row.tokens : [...row.text];
  const drawn = (from, to, own) => letters.slice(from, to).map((token, at) => (own && row.tokens.length ? shaded(token, row.probabilities[from + at]) : token));
  const prompt = bare ? null : el("span", { class: "prompt" }, row.prompt);
  const said = row.turns.length ? [prompt ? el("pre", {}, prompt) : null, turnList(row.turns, drawn, (from, to) => letters.slice(from, to).join(""), sought)]
    : el("pre", {}, prompt, row.tokens.length ? drawn(0, letters.length, true) : row.text);
  return el("article", { class: "card", style: { "--colour": runColour(row.run) } }, el("header", {}, facts), said);
}

function shaded(token, chance) {
  return el("span", { class: "token", title: `${visible(token)}  ${chance}%`, style: { "--p": ((1 - chance / 100) * 0.9).toFixed(2) } }, token);
}
