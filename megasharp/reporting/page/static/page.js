// The parts of the page in order, and what is chosen on it. A part is drawn anew as a whole when something in it changes.
"use strict";

const RUN_COLOURS = 8;

let data = JSON.parse(document.getElementById("data").textContent);

function runColour(run) {
  return `var(--run-${run % RUN_COLOURS})`;
}

// Of runs that nearly coincide, the one beneath is seen through the gaps of the other.
function runDash(run) {
  return ["solid", "dashed", "dotted"][run % 3];
}

// A base model is grey and dashed. All models of a run have its colour and its dash, the earlier ones paler.
function modelStyle(model) {
  const one = data.models[model];
  if (one.run < 0) return { label: one.label, colour: runColour(data.runs.length + model - data.models.findIndex((other) => other.run < 0)), dash: "dashed", opacity: 1 };
  if (one.shared || (one.step === 0 && data.runs.length === 1)) return { label: one.label, colour: "var(--base)", dash: "dashed", opacity: 1 };
  const steps = data.models.filter((other) => other.run === one.run).map((other) => other.step);
  const share = one.step / Math.max(1, ...steps);
  return { label: one.label, colour: runColour(one.run), dash: runDash(one.run), opacity: 0.4 + 0.6 * share };
}

// Until somebody chooses: the bases and each run's last, whichever that is by now.
function chosenModels() {
  const chosen = (model) => (state.models === null ? model.last || model.step === 0 : state.models.has(nameOf(model)));
  return data.models.flatMap((model, at) => (chosen(model) ? [at] : []));
}

function nameOf(model) {
  return `${model.run} ${model.step} ${model.label}`;
}

function modelChips(among) {
  const shown = new Set(chosenModels());
  return el("div", { class: "controls models" }, among.map((at) => {
    const style = modelStyle(at), name = nameOf(data.models[at]);
    return chip(style.label, style.colour, shown.has(at), () => {
      state.models = new Set(chosenModels().map((one) => nameOf(data.models[one])));
      if (!state.models.delete(name)) state.models.add(name);
      ["passk", "candidates", "success"].forEach(redraw);
    }, style.dash);
  }));
}

function runChips(parts) {
  return data.runs.map((run, at) => chip(run.name, runColour(at), !state.hidden.has(at), () => {
    if (!state.hidden.delete(at)) state.hidden.add(at);
    parts.forEach(redraw);
  }, runDash(at)));
}

function head() {
  const cards = data.runs.map((run, at) => folding({ class: "run", style: { "--colour": runColour(at) } }, `run: ${run.folder}`, el("strong", {}, run.name), isOpen(`run: ${run.folder}`), whatOf(run),
    el("ul", {}, run.facts.map((fact) => el("li", {}, fact)), run.marks.length ? el("li", {}, happened(run.marks)) : null,
      run.warnings.map((line) => el("li", { class: "warning" }, line)))));
  const words = data.words.length || !data.runs.length ? data.words : ["No evaluation has a successor yet: there is nothing to say about pass@k."];
  return [el("h1", {}, data.title), el("small", {}, `made ${data.made}${data.live ? ", refreshes while training goes on" : ""}`),
    el("ul", { class: "words", hidden: !(words.length || data.unread.length) }, data.unread.map((line) => el("li", { class: "warning" }, `Left out: ${line}`)), words.map((line) => el("li", {}, line))), el("div", { class: "runs" }, cards)];
}

// With several runs, it leads to all the settings in which they differ.
function whatOf(run) {
  return run.what && el("div", {}, data.differences.length ? el("a", { href: "#settings", onclick: () => unfold("settings") }, run.what) : run.what);
}

function happened(marks) {
  const count = (kind) => marks.filter((mark) => mark.kind === kind).length;
  return Object.keys(MARKS).filter(count).map((kind) => `${count(kind)} ${kind}${count(kind) > 1 ? "s" : ""}`).join(", ");
}

function passk() {
  if (!data.pass_at_k.length) return part("passk", "pass@k versus k", el("p", { class: "note" }, "No evaluation was recorded (eval.suites)."));
  const among = [...new Set(data.pass_at_k.flatMap((suite) => suite.models.map((one) => one.model)))].sort((a, b) => a - b);
  const log = el("input", { type: "checkbox", checked: state.passLog, onchange: (event) => { state.passLog = event.target.checked; redraw("passk"); } });
  return part("passk", "pass@k versus k", modelChips(among), el("div", { class: "controls" }, el("label", {}, log, "logarithmic")), data.pass_at_k.map(passkOf));
}

function passkOf(suite) {
  const shown = new Set(chosenModels());
  const lines = (models) => models.filter((one) => shown.has(one.model)).map((one) => ({ ...modelStyle(one.model), ...curveFrom(one.points) }));
  const ends = { axis: "k", x: "k (tries a problem)", ends: true };
  const [name, change] = [`pass@k ${suite.suite}`, `change ${suite.suite}`];
  return [el("p", { class: "note" }, `${suite.suite}: ${suite.note}.`), el("div", { class: "pictures" },
    el("figure", { "data-figure": name }, el("figcaption", {}, suite.suite), chart(name, `pass@k of ${suite.suite}`, () => ({ ...ends, lines: lines(suite.models), log: state.passLog }))),
    suite.changes.length ? el("figure", { "data-figure": change },
      el("figcaption", {}, `gained and lost against ${modelStyle(suite.base).label} `, el("span", {}, "the same problems; each run against its own samples of it")),
      chart(change, `change of pass@k of ${suite.suite}`, () => ({ ...ends, lines: lines(suite.changes), zero: true }))) : null)];
}

function candidatesPart() {
  const heading = ["candidates", "Candidates"];
  if (!data.probes.length) {
    return part(...heading, el("p", { class: "note" }, "No probe was recorded: eval.probe makes one at every evaluation, and `megasharp probe RUN` of what checkpoints there are."));
  }
  const shown = new Set(chosenModels());
  return part(...heading, data.probes.map((probe, at) => probePart(probe, at, probe.models.filter((one) => shown.has(one.model)))));
}

function probePart(probe, at, models) {
  const chosen = (state.probes[at] = state.probes[at] || { text: 0, start: 0 });
  const again = () => redraw("candidates");
  const text = probe.texts[Math.min(chosen.text, probe.texts.length - 1)];
  const most = Math.max(0, text.tokens.length - SEGMENT);
  chosen.start = Math.min(chosen.start, most);
  const move = (by) => el("button", { disabled: by < 0 ? chosen.start === 0 : chosen.start >= most,
    onclick: () => { chosen.start = Math.max(0, Math.min(most, chosen.start + by)); again(); } }, by < 0 ? "earlier" : "later");
  const whose = data.probes.length > 1 ? `${probe.runs.map((run) => data.runs[run].name).join(", ")}: ` : "";
  const style = (one) => modelStyle(one.model);
  const bars = (of) => models.map((one) => ({ ...style(one), shares: of(one) }));
  return [el("p", {}, `${whose}${probe.note}. A column is a position: its likeliest tokens, the likeliest on top, until they hold 0.95 of the probability, at most 12; the stronger the colour, the likelier. Framed: the token of the response. Few candidates mean a distribution that has collapsed.`),
    modelChips(probe.models.map((one) => one.model)),
    el("div", { class: "controls" }, choice("response", probe.texts.map((one, place) => [place, `${one.problem}: ${one.prompt.slice(0, 60)}`]), chosen.text,
      (value) => { chosen.text = Number(value); chosen.start = 0; again(); }), most ? [move(-SEGMENT), move(SEGMENT)] : null,
      el("small", {}, `tokens ${chosen.start + 1} to ${Math.min(chosen.start + SEGMENT, text.tokens.length)} of ${text.whole}`)),
    el("div", { class: "wide matrices" }, models.map((one) => el("figure", { "data-figure": `candidates ${style(one).label}` },
      el("figcaption", { style: { color: style(one).colour } }, style(one).label, el("span", {}, ` mean entropy ${number(one.mean_entropy)} nats over ${one.tokens.toLocaleString("en")} tokens`)),
      el("div", { class: "scroll" }, matrix(one.cells[Math.min(chosen.text, one.cells.length - 1)] || [], text.tokens, probe.words, chosen.start))))),
    el("h3", {}, "All tokens of all responses"),
    el("div", { class: "grid" },
      el("figure", { "data-figure": "rank means" }, el("figcaption", {}, "mean probability by rank"),
        chart(`rank means ${at}`, "mean probability by rank", () => ({ axis: "rank", x: "rank of the candidate", log: true,
          lines: models.map((one) => ({ ...style(one), ...curveFrom(one.rank_means.map((mean, rank) => [rank + 1, mean])) })) }))),
      el("figure", { "data-figure": "entropy histogram" }, el("figcaption", {}, "token entropy ", el("span", {}, "share of tokens, log")),
        outlines({ bars: bars((one) => one.entropy), edges: probe.edges, log: true, x: "nats", name: "token entropy" })),
      [0, 1, 2].map((rank) => el("figure", { "data-figure": `rank ${rank + 1} bins` }, el("figcaption", {}, `probability of rank ${rank + 1} `, el("span", {}, "share of tokens, log")),
        outlines({ bars: bars((one) => one.rank_bins[rank]), edges: Array.from({ length: 21 }, (_, place) => place / 20), log: true, x: "probability", name: `probability of rank ${rank + 1}` }))))];
}

function success() {
  const box = part("success", "How often each prompt is solved",
    el("p", {}, "Share of prompts by the share of their responses that is correct. Collapse moves prompts to both ends. Those at 0 have no correct response among these: more samples may still find one."));
  if (!data.success.length) return fill(box, {}, [el("p", { class: "note" }, "Neither evaluations nor responses were recorded.")]);
  const shown = new Set(chosenModels());
  box.append(modelChips([...new Set(data.success.flatMap((one) => one.bars.flatMap((bar) => (bar.model === null ? [] : [bar.model]))))]),
    el("div", { class: "wide" }, data.success.map((one) => {
      const bars = one.bars.filter((bar) => bar.model === null || shown.has(bar.model)).map((bar, at, all) => {
        if (bar.model !== null) return { ...modelStyle(bar.model), shares: bar.shares };
        const mine = all.filter((other) => other.run === bar.run);
        const place = mine.indexOf(bar);
        return { label: `${data.runs[bar.run].name}, ${bar.label}`, colour: runColour(bar.run), dash: runDash(bar.run),
          opacity: 0.4 + (0.6 * place) / Math.max(1, mine.length - 1), shares: bar.shares };
      });
      const training = one.bars.some((bar) => bar.model === null);
      return el("figure", { "data-figure": `success ${one.source}` }, el("figcaption", {}, one.source, " ",
        el("span", {}, training ? "pale: first third of the steps, full: last" : "share of samples that is correct")),
      outlines({ bars, labels: one.labels, x: "share correct", name: one.source }));
    })));
  return box;
}

// Most tasks have no code in their responses: the part is there where some response has an error of it.
function errors() {
  const series = data.code_errors.series;
  if (!series.some((one) => curveOf(one).y.some((share) => share > 0))) return el("section", { id: "errors" });
  const lines = () => series.map((one) => ({ label: data.runs[one.run].name, colour: runColour(one.run), dash: runDash(one.run), ...curveOf(one) }));
  return part("errors", "Correct responses with errors of code", el("p", { class: "note" }, `${data.code_errors.note}. 2510.04028, section 4.2: such steps are reinforced with the rest of a correct response.`),
    el("div", { class: "wide" }, el("figure", { "data-figure": "code errors" }, el("figcaption", {}, "share of correct responses"),
      chart("code errors", "share of correct responses with errors of code", () => ({ lines: lines(), axis: "step", x: "step", whole: [0, Math.max(1, data.last_step)] })))));
}

function time() {
  const order = [...new Set(data.stages.flatMap((one) => one.names))];
  // A search finds these among the curves.
  const beside = state.query ? [] : unpinned().filter(besideTime);
  return part("time", "Time, throughput, GPUs",
    el("div", { class: "wide" }, data.stages.map((one) => el("figure", { "data-figure": `stages ${data.runs[one.run].name}` },
      el("figcaption", { style: { color: runColour(one.run) } }, data.runs[one.run].name, el("span", {}, " mean seconds of a step, and of the evaluation and save after it, by stage")), stacked({ ...one, order, name: `stages of ${data.runs[one.run].name}` }),
      el("p", { class: "note" }, one.names.map((name) => el("span", { class: "stage" }, el("span", { class: "swatch", style: { "--colour": stageColour(order.indexOf(name)) } }), name))),
      el("p", { class: "note" }, one.totals.map(([name, value]) => `${name} ${value}`).join(", "))))),
    grid(beside), data.telemetry ? el("p", { class: "note" }, data.telemetry) : null);
}

function settings() {
  const say = (text) => part("settings", "Settings that differ", el("p", { class: "note" }, text));
  if (data.runs.length < 2) return say("One run: there is nothing to differ from.");
  if (!data.differences.length) return say("The same configuration.");
  return part("settings", "Settings that differ", el("div", { class: "scroll" }, el("table", { class: "plain" }, el("tr", {}, el("th", {}, "key"), data.runs.map((run) => el("th", {}, run.name))),
    data.differences.map((one) => el("tr", {}, el("td", {}, el("code", {}, one.key)), one.values.map((value) => el("td", {}, value)))))));
}

// A page of evaluations alone has none of these.
const ofRuns = (name, make) => () => (data.runs.length ? make() : el("section", { id: name }));

const PARTS = {
  pinned: [pinned], curves: [ofRuns("curves", curves), "Curves"], passk: [passk, "pass@k"], candidates: [ofRuns("candidates", candidatesPart), "Candidates"], success: [success, "Prompts"],
  stored: [() => storedSection(data, state, redraw), "Samples"],
  rollouts: [ofRuns("rollouts", () => rolloutSection(data, state, redraw)), "Responses"], errors: [errors, "Code errors"], time: [ofRuns("time", time), "Time"], settings: [ofRuns("settings", settings), "Settings"],
};

function redraw(name) {
  tip.hide();
  document.getElementById(name).replaceWith(PARTS[name][0]());
  settle();
}

function draw() {
  const read = reading();
  tip.hide();
  document.title = data.title;
  document.getElementById("head").replaceChildren(...head());
  document.getElementById("main").replaceChildren(...Object.values(PARTS).map(([make]) => make()));
  document.getElementById("foot").replaceChildren(`${data.runs.map((run) => run.folder).join(", ") || data.title}. Curves hold at most 5,000 points each, longer ones as means; models are the first, the last and some between. Made by megasharp report; charts by uPlot.`);
  for (const link of document.querySelectorAll("#nav a")) link.hidden = !document.querySelector(link.hash).hasChildNodes();
  settle();
  readOn(read);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  repaint();
}

function search(text) {
  const began = state.query === "";
  state.query = text.trim();
  WITH_CURVES.forEach(redraw);
  if (began && state.query) document.getElementById("pinned").scrollIntoView();
}

function bar() {
  const links = Object.entries(PARTS).filter(([, [, label]]) => label).map(([name, [, label]]) => el("a", { href: `#${name}`, onclick: () => unfold(name) }, label));
  const field = el("input", { type: "search", id: "query", placeholder: "find a metric: words or key", "aria-label": "find a metric", hidden: !data.runs.length, oninput: (event) => search(event.target.value) });
  document.getElementById("nav").append(...links, field, el("span", { id: "live", class: "end note" }),
    el("button", { id: "theme", onclick: () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark") }, "dark / light"));
}

// On paper everything is unfolded, drawn and light.
function toPaper() {
  const before = { theme: document.documentElement.dataset.theme, closed: [...document.querySelectorAll(".part:not([open]), .run:not([open])")] };
  before.closed.forEach((box) => { box.open = true; });
  [...waiting.keys()].filter((host) => host.clientWidth).forEach(drawChart);
  setTheme("light");
  return before;
}

const dark = window.matchMedia("(prefers-color-scheme: dark)");
setTheme(dark.matches ? "dark" : "light");
dark.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
let onScreen = null;
window.addEventListener("beforeprint", () => { onScreen = toPaper(); });
window.addEventListener("afterprint", () => { onScreen.closed.forEach((box) => { box.open = false; }); setTheme(onScreen.theme); });
bar();
draw();
