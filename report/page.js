"use strict";
// The page of a run. The data in #data is what report/page.py wrote: for every problem its distinct answers, and for
// every step and method the numbers of those that are in the pool. Whatever is chosen stands in `state`; a change of it
// draws anew what depends on it.

const data = JSON.parse(document.getElementById("data").textContent);
const methods = data.methods;
const state = {
  step: data.steps.length - 1, // a place in data.steps
  problem: 0,
  weights: [], // as the bars stand; `weighting` makes them sum to 1
  k: 5,
  rollout: 0,
  stage: 0, // of section 4
  draws: 0, // of section 3: how many, their sums, and by method the last one
  sums: {},
  last: {},
  film: null, // timers, while they run
  drawing: null,
};

// ---- Small helpers ------------------------------------------------------------------------------------------------

const byId = (id) => document.getElementById(id);
const sum = (values) => values.reduce((a, b) => a + b, 0);
const mean = (values) => sum(values) / values.length;
const dot = (a, b) => sum(a.map((x, i) => x * b[i]));
const fixed = (x, digits = 3) => x.toFixed(digits).replace("-", "\u2212");
const SVG = new Set(["svg", "g", "rect", "text", "line", "path", "circle"]);

/** An element of HTML or SVG with attributes and children. */
function el(name, attributes = {}, ...children) {
  const space = SVG.has(name) ? byId("curve").namespaceURI : document.documentElement.namespaceURI;
  const node = document.createElementNS(space, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** Random numbers in [0, 1), the same ones every time the page is opened (mulberry32). */
function randomNumbers(seed) {
  return () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}
const random = randomNumbers(1);

// ---- What the data say --------------------------------------------------------------------------------------------

const problem = () => data.problems[state.problem];
const tests = () => problem().vectors[0].map((_, i) => `test ${i + 1}`);
const objectives = () => (data.objectives.length ? data.objectives : tests());
const pool = (method) => problem().pools[state.step][method.name].answers;
const vectors = (method) => pool(method).map((i) => problem().vectors[i]);
const scalars = (method) => pool(method).map((i) => problem().scalars[i]);

/** The weights of section 2, as shares. */
function weighting() {
  const total = sum(state.weights);
  return state.weights.map((w) => (total ? w / total : 1 / state.weights.length));
}

/** The place in a pool of the best candidate under weights w, the first of equals, and its worth. */
function bestUnder(method, w) {
  const worth = vectors(method).map((r) => dot(w, r));
  const place = worth.reduce((best, x, i) => (x > worth[best] + 1e-9 ? i : best), 0);
  return { place, worth: worth[place] };
}

/** best@k of all scores, exact: the i-th lowest of n is the best of C(i-1, k-1) of the C(n, k) draws. */
function bestAtK(scores, k) {
  const sorted = [...scores].sort((a, b) => b - a);
  let share = k / sorted.length; // of the draws, those in which the highest is the best
  return sum(sorted.map((score, rank) => {
    const part = score * share;
    share *= (sorted.length - rank - k) / (sorted.length - rank - 1 || 1);
    return part;
  }));
}

/** Mean L1 distance of two vectors of a pool. */
function diversity(rows) {
  let total = 0;
  for (const a of rows) for (const b of rows) total += sum(a.map((x, i) => Math.abs(x - b[i])));
  return total / Math.max(1, rows.length * (rows.length - 1));
}

// ---- Pictures of answers ------------------------------------------------------------------------------------------

const TILES = { "#": "#3b3b3b", L: "#f4b6a6", G: "#f7dc6f", D: "#aed9f7", S: "#e0e0e0", E: "#b8e0b0" };
const DASHES = ["none", "0.3 0.15", "0.1 0.12", "0.5 0.12 0.1 0.12", "0.6 0.3", "0.2 0.3", "0.1 0.3", "0.8 0.1"];

/** A path without the parts that lead back to where they began and pass no gold or diamond. */
function withoutLoops(grid, path) {
  const kept = [];
  for (const cell of path) {
    const back = kept.lastIndexOf(cell);
    if (back >= 0 && !kept.slice(back + 1).some((i) => "GD".includes(grid[i]))) kept.length = back;
    kept.push(cell);
  }
  return kept;
}

/** The maze with the routes of `places` in a pool that reach the exit; one may be chosen, a few are told apart. */
function maze(method, places, chosen = -1) {
  const rows = problem().grid, answers = pool(method);
  const [n, grid, jitter, few] = [rows.length, rows.join(""), randomNumbers(7), places.length < answers.length];
  const tile = (i) => ({ x: i % n, y: Math.floor(i / n) });
  const box = el("svg", { class: "maze", viewBox: `-0.03 -0.03 ${n + 0.06} ${n + 0.06}`, role: "img",
    "aria-label": `Routes of ${method.title}: ${problem().pools[state.step][method.name].summary}` });
  const look = { width: 1, height: 1, stroke: "#ddd", "stroke-width": 0.03 };
  [...grid].forEach((kind, i) => box.append(el("rect", { ...tile(i), ...look, fill: TILES[kind] || "white" })));
  const shifts = answers.map(() => [0.5 + 0.56 * (jitter() - 0.5), 0.5 + 0.56 * (jitter() - 0.5)]);
  const draw = (place, style) => {
    const cells = problem().answers[answers[place]];
    if (!cells || grid[cells.at(-1)] !== "E") return; // failed routes are counted, not drawn
    const [dx, dy] = place === chosen ? [0.5, 0.5] : shifts[place];
    const points = withoutLoops(grid, cells).map((i) => `${tile(i).x + dx},${tile(i).y + dy}`);
    box.append(el("path", { d: `M${points.join("L")}`, fill: "none", "stroke-linejoin": "round", ...style }));
  };
  const [width, opacity] = few ? [0.11, 0.9] : [0.055, chosen < 0 ? 0.4 : 0.22];
  places.forEach((place, i) => {
    const dashes = few ? { "stroke-dasharray": DASHES[i] } : {};
    if (place !== chosen) draw(place, { stroke: method.color, "stroke-width": width, opacity, ...dashes });
  });
  for (const [stroke, thick] of [["white", 0.34], ["#1c1c1c", 0.24], [method.color, 0.14]]) {
    if (chosen >= 0) draw(chosen, { stroke, "stroke-width": thick });
  }
  const letter = { dx: 0.5, dy: 0.63, "text-anchor": "middle", style: "font-size: 0.36px; font-weight: bold" };
  [...grid].forEach((kind, i) => {
    if ("SEGDL".includes(kind)) box.append(el("text", { ...tile(i), ...letter }, kind));
  });
  return box;
}

/** Numbers as a row of squares, each filled from below: empty at `low`, full at `high`. */
function squares(numbers, color, low = 0, high = 1) {
  const share = (x) => `${Math.round((100 * (x - low)) / (high - low))}%`;
  return el("span", { class: "cells", role: "img", "aria-label": numbers.map((x) => +x.toFixed(2)).join(", ") },
    ...numbers.map((x, i) => el("i", { title: `${objectives()[i]}: ${+x.toFixed(3)}`,
      style: `background: linear-gradient(to top, ${color} ${share(x)}, white 0)` })));
}

/** A row of a list: what stands before it, the answer's reward vector and text. */
function row(before, answer, color, chosen = false) {
  const text = problem().answers[answer], all = problem().vectors.flat();
  const words = text === null ? "(no answer)" : text.trim().split(/\s+/).join(" ") || "(empty)";
  return el("div", { class: chosen ? "answer best" : "answer" }, el("span", { class: "number" }, before),
    squares(problem().vectors[answer], color, Math.min(0, ...all), Math.max(1, ...all)),
    el("code", { title: text || words }, words.length > 120 ? `${words.slice(0, 119)}\u2026` : words));
}

/** The most frequent answers of a pool, the chosen one first; of a few all, in their order. */
function list(method, places, chosen = -1) {
  const answers = pool(method), counts = new Map();
  if (places.length < answers.length) {
    return el("div", {}, ...places.map((place, i) => row(`y${i + 1}`, answers[place], method.color)));
  }
  for (const answer of answers) counts.set(answer, (counts.get(answer) || 0) + 1);
  const first = ([answer]) => answer === answers[chosen];
  const shown = [...counts].sort((a, b) => first(b) - first(a) || b[1] - a[1]).slice(0, 8);
  const more = counts.size > 8 ? [el("small", {}, `and ${counts.size - 8} more that differ`)] : [];
  return el("div", {}, ...shown.map((each) => row(`${each[1]}\u00d7`, each[0], method.color, first(each))), ...more);
}

const picture = (...asked) => (problem().grid ? maze : list)(...asked);
const key = (method) => el("span", { class: "key", style: `background: ${method.color}` });

/** A method's panel: its name, a picture of its pool, and lines, below a maze and above a list, which grows. */
function panel(method, chosen, ...texts) {
  const lines = texts.map((text) => el("small", { style: "display: block" }, text));
  const shown = picture(method, [...pool(method).keys()], chosen), heading = el("h3", {}, key(method), method.title);
  return el("figure", {}, heading, ...(problem().grid ? [shown, ...lines] : [...lines, shown]));
}

/** A table with a row of headings. */
function table(head, rows) {
  const cells = head.map((cell) => el("th", { scope: "col" }, ...[cell].flat()));
  return el("table", {}, el("thead", {}, el("tr", {}, ...cells)), el("tbody", {}, ...rows));
}

// ---- Charts -------------------------------------------------------------------------------------------------------

/** A line chart in an <svg>; lines: {color, points, width, opacity}, dots: {color, x, y}. */
function chart(svg, { lines, dots = [], cursor, xLabel, fromZero = true }) {
  const [width, height, left, right, top, bottom] = [svg.clientWidth || 360, 250, 50, 14, 12, 48];
  const all = [...lines.flatMap((line) => line.points), ...dots.map(({ x, y }) => [x, y])];
  const xs = all.map((point) => point[0]), ys = all.map((point) => point[1]);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs, Math.min(...xs) + 1)];
  const [low, high] = [Math.min(fromZero ? 0 : Infinity, ...ys), Math.max(...ys)];
  const room = 0.06 * (high - low) || 0.1;
  const [y0, y1] = [fromZero && low === 0 ? 0 : low - room, high + room];
  const X = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
  const Y = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - top - bottom);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.style.height = `${height}px`;
  svg.replaceChildren();
  for (const y of ticks(y0, y1, 5)) {
    svg.append(el("line", { x1: left, x2: width - right, y1: Y(y), y2: Y(y), stroke: "#e3e3e3" }),
      el("text", { x: left - 8, y: Y(y) + 5, "text-anchor": "end" }, String(y)));
  }
  for (const x of ticks(x0, x1, width / 90)) {
    svg.append(el("text", { x: X(x), y: height - bottom + 20, "text-anchor": "middle" }, String(x)));
  }
  svg.append(el("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, xLabel));
  if (cursor !== undefined) {
    const ends = { x1: X(cursor), x2: X(cursor), y1: top, y2: height - bottom };
    svg.append(el("line", { class: "cursor", ...ends, stroke: "#1c1c1c", "stroke-width": 1.5 }));
  }
  for (const { color, points, width: thick = 3, opacity = 1 } of lines) {
    const d = points.map(([x, y]) => `${X(x).toFixed(1)},${Y(y).toFixed(1)}`).join("L");
    svg.append(el("path", { d: `M${d}`, fill: "none", stroke: color, "stroke-width": thick, opacity }));
  }
  for (const { color, x, y } of dots) {
    svg.append(el("circle", { cx: X(x), cy: Y(y), r: 7, fill: color, stroke: "white", "stroke-width": 2 }));
  }
}

/** Round numbers from a to b, about n of them. */
function ticks(a, b, n) {
  const raw = (b - a) / Math.max(1, n), power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(a / step - 1e-9); i * step <= b + 1e-9 * step; i++) found.push(+(i * step).toFixed(6));
  return found;
}

/** A bar with a name on its left and a number on its right. */
function bar(name, share, color, text) {
  const width = Math.max(0, Math.min(100, 100 * share));
  const length = el("i", { style: `width: ${width}%; background: ${color}` });
  return el("div", { class: "bar" }, el("span", {}, ...name), length, el("span", { class: "number" }, text));
}

// ---- 1. The film --------------------------------------------------------------------------------------------------

function drawFilm() {
  byId("now").textContent = `${data.steps[state.step]} of ${data.steps.at(-1)}`;
  byId("step").value = state.step;
  byId("step").setAttribute("aria-valuetext", `step ${data.steps[state.step]}`);
  byId("film").replaceChildren(...methods.map((method) => {
    const kinds = new Set(vectors(method).map(String)).size;
    return panel(method, -1, problem().pools[state.step][method.name].summary,
      `${kinds} different reward vector${kinds === 1 ? "" : "s"}, diversity ${fixed(diversity(vectors(method)), 2)}`);
  }));
  ["diversity", "reward"].forEach((name, i) => chart(byId(name), {
    xLabel: "training step", cursor: data.steps[state.step],
    lines: methods.flatMap(({ curve, color }) => {
      const points = curve.map((row) => [row[0], row[i + 1]]);
      const span = (at) => points.slice(Math.max(0, at - 5), at + 5);
      const smooth = points.map((point, at) => [point[0], mean(span(at).map((near) => near[1]))]);
      return points.length ? [{ color, points, width: 1, opacity: 0.35 }, { color, points: smooth }] : [];
    }),
  }));
}

function play(on) {
  clearInterval(state.film);
  state.film = null;
  if (on) {
    if (state.step === data.steps.length - 1) setStep(0);
    state.film = setInterval(() => {
      if (state.step < data.steps.length - 1) setStep(state.step + 1);
      if (state.step === data.steps.length - 1) play(false);
    }, 450);
  }
  byId("play").textContent = on ? "\u275a\u275a Pause" : "\u25b6 Play";
}

// ---- 2. Whose best? -----------------------------------------------------------------------------------------------

/** One bar for each objective of the problem. */
function makeWeights() {
  state.weights = objectives().map(() => 50);
  byId("weights").replaceChildren(...objectives().map((name, i) => {
    const input = el("input", { type: "range", id: `w${i}`, min: 0, max: 100, value: 50 });
    input.addEventListener("input", () => {
      state.weights[i] = +input.value;
      drawTaste();
    });
    return el("div", {}, el("label", { for: `w${i}` }, el("span", {}, name), el("output", { for: `w${i}` })), input);
  }));
}

function setWeights(weights) {
  state.weights = weights;
  weights.forEach((w, i) => (byId(`w${i}`).value = w));
  drawTaste();
}

function drawTaste() {
  const w = weighting();
  document.querySelectorAll("#weights output").forEach((output, i) => (output.textContent = fixed(w[i], 2)));
  const best = methods.map((method) => bestUnder(method, w));
  const most = Math.max(1, ...best.map(({ worth }) => worth));
  byId("worth").replaceChildren(...methods.map((method, i) =>
    bar([key(method), method.title], best[i].worth / most, method.color, fixed(best[i].worth))));
  byId("taste").replaceChildren(...methods.map((method, i) => {
    const { place } = best[i];
    const values = vectors(method)[place].map((x, j) => `${objectives()[j]}\u00a0${+x.toFixed(2)}`).join(", ");
    const shown = panel(method, place, problem().grid ? values : "");
    shown.dataset.best = pool(method)[place];
    return shown;
  }));
}

// ---- 3. With k candidates -----------------------------------------------------------------------------------------

function startOver() {
  state.draws = 0;
  state.sums = Object.fromEntries(methods.map((method) => [method.name, 0]));
  state.last = {};
}

/** k places of every pool, without replacement; the best of them joins the running mean. */
function drawOnce() {
  state.draws += 1;
  for (const method of methods) {
    const scores = scalars(method), places = [...scores.keys()];
    for (let i = 0; i < state.k; i++) {
      const j = i + Math.floor(random() * (places.length - i));
      [places[i], places[j]] = [places[j], places[i]];
    }
    const taken = places.slice(0, state.k);
    const best = taken.reduce((a, b) => (scores[b] > scores[a] ? b : a));
    state.sums[method.name] += scores[best];
    state.last[method.name] = { taken: new Set(taken), best };
  }
}

function keepDrawing(on) {
  clearInterval(state.drawing);
  state.drawing = on ? setInterval(() => {
    for (let i = 0; i < 4; i++) drawOnce();
    drawLuck();
  }, 60) : null;
  byId("many").textContent = on ? "\u275a\u275a Stop" : "\u25b6 Keep drawing";
}

/** The pool as bars, high for a high scalar: those drawn in colour, the best of them framed. */
function strip(method) {
  const scores = scalars(method), last = state.last[method.name], width = 300 / scores.length;
  const [low, high] = [Math.min(0, ...problem().scalars), Math.max(1e-9, ...problem().scalars)];
  const said = `${method.title}: ${last ? `best of this draw ${fixed(scores[last.best])}` : "nothing drawn yet"}`;
  const svg = el("svg", { class: "strip", viewBox: "0 0 300 34", role: "img", "aria-label": said });
  scores.forEach((score, i) => {
    const height = 2 + (30 * (score - low)) / (high - low);
    svg.append(el("rect", { x: (i + 0.1) * width, y: 33 - height, width: 0.8 * width, height, "stroke-width": 2,
      fill: last?.taken.has(i) ? method.color : "#dcdcdc", stroke: last?.best === i ? "#1c1c1c" : "none" }));
  });
  return svg;
}

function drawLuck() {
  byId("k").value = state.k;
  byId("k-now").textContent = state.k;
  const running = (method) => state.sums[method.name] / state.draws;
  const curve = (method) => scalars(method).map((_, i) => [i + 1, bestAtK(scalars(method), i + 1)]);
  chart(byId("curve"), {
    xLabel: "candidates k", cursor: state.k, fromZero: false,
    lines: methods.map((method) => ({ color: method.color, points: curve(method) })),
    dots: state.draws ? methods.map((method) => ({ color: method.color, x: state.k, y: running(method) })) : [],
  });
  byId("draws").replaceChildren(...methods.flatMap((method) => [el("small", {}, method.title), strip(method)]));
  const rows = methods.map((method) => {
    const last = state.last[method.name];
    const numbers = [last && scalars(method)[last.best], last && running(method), bestAtK(scalars(method), state.k)];
    return el("tr", {}, el("th", { scope: "row" }, key(method), method.title),
      ...numbers.map((x) => el("td", {}, x === undefined ? "\u2013" : fixed(x))));
  });
  byId("means").replaceChildren(table(["", "this draw", `mean of ${state.draws}`, `best@${state.k}`], rows));
}

// ---- 4. What a set is paid ----------------------------------------------------------------------------------------

const STAGES = [
  "The vectors. One rollout holds a set S of answers y, and each is judged on every objective: r(y).",
  "The weightings. Nobody knows what a user will care for, so weightings w are drawn at random; five are shown. " +
    "Under each every answer is worth w \u00b7 r(y).",
  "The max. Under a weighting only the best answer of the set counts. A second one pays where it beats the first.",
  "The mean. The set is worth the mean of these maxima over all weightings drawn: R(S).",
  "The advantages. A rollout is reinforced if its set is worth more than those of its group: " +
    "A = (R \u2212 mean of R) / deviation of R.",
];

/** The method that writes sets: VPO, else the first that does; undefined if none does. */
function ofSets() {
  const able = methods.filter((method) => problem().pools[state.step][method.name].R);
  return able.find((method) => method.name === "vpo") || able[0];
}

function drawSet() {
  const method = ofSets(), last = STAGES.length - 1;
  byId("back").disabled = !method || state.stage === 0;
  byId("next").disabled = !method || state.stage === last;
  byId("rollout").disabled = !method;
  byId("stage-text").textContent = method ? `${state.stage + 1}/${last + 1} ${STAGES[state.stage]}` :
    "No policy of this run writes several answers in a rollout; train.py --method vpo adds one.";
  if (!method) return;

  const { R, A, best } = problem().pools[state.step][method.name];
  const g = (state.rollout = Math.min(state.rollout, R.length - 1));
  const places = Array.from({ length: method.m }, (_, i) => g * method.m + i);
  const set = places.map((place) => vectors(method)[place]);
  byId("rollout").max = R.length - 1;
  byId("rollout").value = g;
  byId("rollout-now").textContent = `${g + 1} of ${R.length}, by ${method.title}, after step ${data.steps[state.step]}`;

  const names = set.map((_, i) => [`r(y${i + 1})`, ...(problem().grid ? [dash(method, i)] : [])]);
  byId("vectors").replaceChildren(picture(method, places), table(["", ...names], objectives().map((name, j) =>
    el("tr", {}, el("th", { scope: "row" }, name), ...set.map((r) => el("td", {}, fixed(r[j], 2)))))));

  const max = state.stage >= 2, heads = set.map((_, i) => `w \u00b7 r(y${i + 1})`);
  const scores = problem().weights.map((w, j) => {
    const worth = set.map((r) => dot(w, r)), top = Math.max(...worth);
    const shown = w.length < 5 ? w.map((x) => fixed(x, 2)).join(" ") : squares(w, "#444", 0, Math.max(...w));
    return el("tr", {}, el("th", { scope: "row" }, shown),
      ...worth.map((x) => el("td", max && x === top ? { class: "won" } : {}, fixed(x))),
      ...(max ? [el("td", {}, fixed(best[g][j]))] : []));
  });
  const weighed = table(["weighting w", ...heads, ...(max ? ["max"] : [])], scores);
  byId("scores").replaceChildren(...(state.stage >= 1 ? [weighed] : []));
  if (state.stage >= 3) {
    const count = `R(S) = the mean over all ${data.draws} weightings = `;
    byId("scores").append(el("p", {}, count, el("strong", { id: "R" }, fixed(R[g]))));
  }
  const length = (x) => `width: ${(100 * Math.max(0, x)) / Math.max(1e-9, ...R)}%; background: ${method.color}`;
  const group = R.map((x, i) => el("tr", i === g ? { class: "chosen" } : {},
    ...[String(i + 1), fixed(x), fixed(A[i], 2)].map((text) => el("td", {}, text)),
    el("td", {}, el("i", { class: "length", style: length(x) }))));
  byId("group").replaceChildren(...(state.stage === last ? [table(["rollout", "R(S)", "A", ""], group)] : []));
}

/** The line that the i-th route of a set is drawn with. */
function dash(method, i) {
  return el("svg", { class: "dash", viewBox: "0 0 2 0.2" }, el("path", { d: "M0,0.1L2,0.1", stroke: method.color,
    "stroke-width": 0.13, "stroke-dasharray": DASHES[i] }));
}

// ---- What is chosen -----------------------------------------------------------------------------------------------

function setStep(step) {
  state.step = step;
  startOver();
  [drawFilm, drawTaste, drawLuck, drawSet].forEach((draw) => draw());
}

function setProblem(index) {
  state.problem = index;
  byId("question").textContent = problem().text;
  const sizes = problem().pools.flatMap(Object.values).map(({ answers }) => answers.length);
  byId("k").max = Math.min(...sizes);
  state.k = Math.min(state.k, ...sizes);
  makeWeights();
  setStep(state.step);
}

function begin() {
  const listen = (id, event, act) => byId(id).addEventListener(event, act);
  const names = methods.map((method) => method.title), n = pool(methods[0]).length, count = data.problems.length;
  byId("about").textContent = `Task ${data.task}; ${names.join(", ")}, grown from the same start. ` +
    `${count} held-out problems, ${n} answers of each policy at every step shown, sampled at ` +
    `temperature ${data.temperature}.`;
  byId("marks").textContent = problem().grid ?
    "S start, E exit, G gold, D diamonds, L lava, dark: wall. A line is a route that reaches the exit; others are " +
    "counted, not drawn." :
    "A row is an answer: how often it is in the pool, a square for every objective, filled as far as it was earned, " +
    "and the text.";
  if (!problem().grid) document.documentElement.style.setProperty("--panel", "330px");
  byId("legend").append(...methods.map((method) => el("span", {}, key(method), method.title)));
  byId("problem").append(...data.problems.map((_, i) => el("option", { value: i }, `${i + 1} of ${count}`)));
  byId("step").max = data.steps.length - 1;
  listen("play", "click", () => play(state.film === null));
  listen("step", "input", () => { play(false); setStep(+byId("step").value); });
  listen("problem", "change", () => setProblem(+byId("problem").value));
  listen("equal", "click", () => setWeights(objectives().map(() => 50)));
  listen("any", "click", () => {
    const draws = objectives().map(() => -Math.log(1 - random())); // their shares are uniform on the simplex
    setWeights(draws.map((x) => Math.round((100 * x) / Math.max(...draws))));
  });
  listen("k", "input", () => { state.k = +byId("k").value; startOver(); drawLuck(); });
  listen("once", "click", () => { drawOnce(); drawLuck(); });
  listen("many", "click", () => keepDrawing(state.drawing === null));
  listen("over", "click", () => { startOver(); drawLuck(); });
  listen("back", "click", () => { state.stage -= 1; drawSet(); });
  listen("next", "click", () => { state.stage += 1; drawSet(); });
  listen("rollout", "input", () => { state.rollout = +byId("rollout").value; drawSet(); });
  window.addEventListener("resize", () => { drawFilm(); drawLuck(); });
  setProblem(0);
}

begin();
