"use strict";
// Whatever a run says, its model's text above all, gets into the page as textContent alone.
const $ = (id) => document.getElementById(id);
// Drawing again may cost a twentieth of the time at most, the server's as well.
const POLL_MS = 3000, DRAW_MS = 9000, DRAW_SHARE = 20;
const FIRST = ["step/reward_mean", "eval/accuracy", "step/loss", "step/response_length_mean",
  "step/grad_norm", "step/train_tokens_per_s"];
let state = null, drawn = -1, drawAfter = 0, charts = [], offset = 0, shown = null, titles = {}, reading = 0;

const plotly = new Promise((ready) => {
  if (window.Plotly) ready(window.Plotly);
  $("plotly").addEventListener("load", () => ready(window.Plotly));
});

function make(tag, text = "", name = "") {
  const found = document.createElement(tag);
  found.textContent = text;
  if (name) found.className = name;
  return found;
}

async function get(path, query = {}) {
  const response = await fetch(`/api/${path}?${new URLSearchParams(query)}`);
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

function number(value) {
  if (value === null || value === undefined) return "-";
  return Math.abs(value) >= 1e5 ? value.toExponential(3) : String(+value.toPrecision(4));
}

function duration(seconds) {
  const [h, m] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  return h ? `${h}h ${m}m` : m ? `${m}m ${Math.floor(seconds % 60)}s` : `${number(seconds)}s`;
}

// Charts ------------------------------------------------------------------------------------------

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colours = () => [0, 1, 2, 3, 4, 5, 6, 7, 8].map((n) => colour(`--c${n}`));

async function draw(place, traces, axes, says) {
  const { xaxis, yaxis, ...rest } = axes;
  const lines = { gridcolor: colour("--line"), zerolinecolor: colour("--line"), automargin: true };
  const named = traces.filter((trace) => trace.name), cycle = colours();
  traces.forEach((trace, n) => {
    const own = trace.line?.color || trace.marker?.color || cycle[n % cycle.length];
    trace.line = { ...trace.line, color: own };
    trace.marker = { ...trace.marker, color: own };
    if (trace.stackgroup) trace.fillcolor = own;
  });
  await (await plotly).react(place, traces, {
    margin: { l: 50, r: 10, t: 10, b: 40 }, paper_bgcolor: "transparent",
    plot_bgcolor: "transparent", font: { color: colour("--ink"), size: 12 }, showlegend: false,
    hovermode: "closest", xaxis: { ...lines, ...xaxis }, yaxis: { ...lines, ...yaxis }, ...rest,
  }, { responsive: true, displayModeBar: false });
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", says);
  const legend = make("ul", "", "legend");
  legend.append(...(named.length > 1 ? named : []).map((trace) => {
    const item = make("li", trace.name), mark = make("i");
    mark.style.background = trace.line.color;
    item.prepend(mark);
    return item;
  }));
  place.parentElement.querySelector("figcaption").replaceChildren(make("span", says), legend);
}

function timeAxis(curves) {
  const last = Math.max(1, ...curves.flatMap((curve) => curve.x.slice(-1)));
  const [unit, size] = [["hours", 3600], ["minutes", 60], ["seconds", 1]].find((u) => last >= 2 * u[1])
    || ["seconds", 1];
  return [`${unit} since the run began`, (x) => x.map((value) => value / size)];
}

const newest = () => (state.is_live ? "Now" : "Last");

async function drawChart(chart) {
  const by = $("by").value;
  const runs = [state.run, ...document.querySelectorAll("#others input:checked")]
    .map((one) => ["run", one.value || one]);
  const found = await get("curves", [["metric", chart.metric], ["by", by], ["since", $("since").value], ...runs]);
  const curves = Object.entries(found).flatMap(([run, lines]) => lines.map((line) => ({
    ...line, name: [runs.length > 1 && run, line.label].filter(Boolean).join(" ") })));
  const [label, scaled] = by === "time" ? timeAxis(curves) : ["training step", (x) => x];
  const says = curves.map((curve) => {
    const known = curve.y.filter((value) => value !== null);
    const [low, high] = known.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [1 / 0, -1 / 0]);
    return known.length
      ? `${curve.name ? curve.name + ":" : newest()} ${number(known.at(-1))}, from ${number(low)} to ${number(high)}`
      : `${curve.name}: not measured`;
  }).join("; ");
  await draw(chart.place, curves.map((curve) => ({
    x: scaled(curve.x), y: curve.y, name: curve.name, mode: curve.x.length < 60 ? "lines+markers" : "lines",
    line: { width: 1.5 } })), { xaxis: { title: { text: label } } }, says || "Not measured so far");
}

function addChart(metric) {
  if (!metric || charts.some((chart) => chart.metric === metric)) return null;
  const figure = make("figure"), place = make("div", "", "plot"), gone = make("button", "Remove");
  const title = make("h3", metric.replace("step/", ""));
  const chart = { metric, place };
  gone.type = "button";
  gone.setAttribute("aria-label", `Remove the chart of ${metric}`);
  gone.onclick = () => { charts = charts.filter((one) => one !== chart); figure.remove(); };
  figure.append(title, make("div", titles[metric] || "", "off"), place, make("figcaption"), gone);
  $("charts").append(figure);
  charts.push(chart);
  return chart;
}

function stack(area, scaled) {
  return area.layers.map((layer) => ({ x: scaled(layer.x), y: layer.y, name: layer.label, stackgroup: "one",
    line: { width: 0, color: layer.label === "being sampled" ? colour("--c12") : "" }, mode: "lines" }));
}

async function drawAreas() {
  const { depth, time, stages } = await get("areas", { since: $("since").value });
  $("stages").replaceChildren(...stages.map((one) => make("li",
    `${one.of}: ${one.name} ${number(100 * one.share)}%${one.waits_for && `, waiting for ${one.waits_for}`}`)));
  if (depth) {
    const [label, scaled] = timeAxis(depth.layers);
    const limit = { x: scaled(depth.layers[0].x), y: depth.limit, name: "limit", mode: "lines",
      line: { dash: "dash", width: 1.5, color: colour("--ink") } };
    const now = depth.layers.map((layer) => `${layer.label}: ${number(layer.y.at(-1))}`).join("; ");
    await draw($("depth"), [...stack(depth, scaled), limit], { xaxis: { title: { text: label } },
      yaxis: { title: { text: "groups" }, rangemode: "tozero" } }, `${newest()} ${now}; at most ${number(depth.limit.at(-1))}`);
  }
  if (time) {
    const sums = time.layers.map((layer) => layer.y.reduce((a, b) => a + b, 0));
    const all = sums.reduce((a, b) => a + b, 0) || 1;
    const says = time.layers.map((layer, n) => {
      layer.label = `${layer.label.replace(/\.$/, "")}: ${Math.round(100 * sums[n] / all)}%`;
      return layer.label;
    });
    await draw($("parts"), stack(time, (x) => x), { xaxis: { title: { text: "training step" } },
      yaxis: { title: { text: "seconds per step" } } },  "Seconds of a step, by what the trainer did");
  }
}

async function drawBars(place, bars, start, says, order = [], lanes = null) {
  const kinds = [...new Set([...order, ...bars.map((bar) => bar.what)])];
  const byName = new Intl.Collator("en", { numeric: true }).compare;
  const rows = (lanes || [...new Set(bars.map((bar) => bar.row))].sort(byName)).toReversed();
  place.style.height = `${Math.max(12, 6 + 1.6 * rows.length)}rem`;
  await draw(place, kinds.filter((kind) => bars.some((bar) => bar.what === kind)).map((kind) => {
    const own = bars.filter((bar) => bar.what === kind);
    const color = colour(`--c${kinds.indexOf(kind)}`);
    return { type: "bar", orientation: "h", name: kind, marker: { color }, y: own.map((bar) => bar.row),
      base: own.map((bar) => bar.start - start), x: own.map((bar) => bar.stop - bar.start) };
  }), { barmode: "overlay", xaxis: { title: { text: "seconds" } },
    yaxis: { categoryorder: "array", categoryarray: rows } }, says);
}

async function drawWeights() {
  const { version, lanes, kinds } = await get("timeline", { version: $("version").value });
  if (version) await drawBars($("way"), version.bars, version.start, version.title, [], version.rows);
  else $("way").parentElement.querySelector("figcaption").textContent = "There is no such version.";
  if (!lanes.length) return;
  const start = lanes[0].start;
  const waited = {};
  for (const bar of lanes.filter((one) => one.what.startsWith("waiting for")))
    (waited[bar.row] ??= {})[bar.what] = (waited[bar.row][bar.what] || 0) + bar.stop - bar.start;
  const says = Object.entries(waited).sort().map(([row, by]) => `${row}: ` +
    Object.entries(by).map(([what, seconds]) => `${what} ${number(seconds)} s`).join(", ")).join("; ");
  await drawBars($("lanes"), lanes, start, says || "Nobody waited", kinds);
}

// Groups ------------------------------------------------------------------------------------------

async function listGroups() {
  const query = new FormData($("filter"));
  query.set("start", offset);
  const found = await get("groups", query);
  const task = $("filter").elements.task;
  const known = [...task.options].map((option) => option.value);
  for (const name of found.tasks.filter((name) => !known.includes(name))) task.add(new Option(name, name));
  const last = Math.min(offset + found.rows.length, found.total);
  $("count").textContent = found.every || found.left
    ? `${last ? offset + 1 : 0} to ${last} of ${found.total} groups` +
      (found.left ? `; ${number(found.left / 2 ** 20)} MiB are still to be read` : "")
    : "No group is recorded (rollout.log_rate)";
  $("newer").disabled = offset === 0;
  $("older").disabled = last >= found.total;
  $("groups").replaceChildren(...found.rows.map((row) => {
    const line = make("tr"), cell = make("td"), button = make("button", row.group_id);
    button.type = "button";
    button.onclick = () => showGroup(row.group_id, 0);
    cell.append(button);
    line.append(cell, make("td", number(row.reward), "n"), make("td", number(row.length), "n"),
      make("td", row.task), make("td", new Date(row.at * 1000).toLocaleString()));
    return line;
  }));
  clearTimeout(reading);
  if (found.left) reading = setTimeout(() => listGroups().catch(say), 100);
}

async function showGroup(id, trajectory, start = 0) {
  const found = await get("group", { id, trajectory, start });
  const one = found.trajectories[trajectory];
  $("group").hidden = false;
  $("group-title").textContent = `Group ${id}`;
  $("group-facts").textContent = `Prompt ${found.prompt_index} of ${found.task}, temperature ` +
    `${number(found.temperature)}, sampled by ${found.worker}` +
    (found.trained_step === null ? "" : `, trained in step ${found.trained_step}`);
  $("trajectory").replaceChildren(...found.trajectories.map((other, n) =>
    new Option(`${n}: reward ${number(other.reward)}` + (other.advantage === null ? "" :
      `, advantage ${number(other.advantage)}`) + `, ${other.num_trained} tokens`, n, false, n === trajectory)));
  const parts = Object.entries(one.parts).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  $("facts").textContent = `Episode ${one.episode}${one.role && ", " + one.role}: reward ${number(one.reward)}` + (parts ? ` (${parts})` : "") +
    `, ${one.finish_reason}, ${one.num_tokens} tokens of which ${one.num_trained} are trained`;
  $("messages").replaceChildren(...found.messages.flatMap((message) => {
    const said = make("pre", typeof message.content === "string" ? message.content : JSON.stringify(message, null, 1));
    said.tabIndex = 0; // else no key scrolls it
    said.setAttribute("role", "group");
    said.setAttribute("aria-label", `Message of ${message.role}`);
    return [make("h4", message.role), said];
  }));
  const versions = Object.keys(one.versions);
  $("legend").replaceChildren(...versions.slice(0, 12).map((v, n) => make("span", `version ${v}`, `v${n % 6}`)),
    make("span", "not trained", "off"), make("span", "below 10%", "low"), make("span", "below 1%", "rare"));
  const spans = found.texts.map((text, n) => {
    const [p, trained] = [Math.exp(found.logprobs[n]), found.mask[n]];
    const name = trained ? `v${versions.indexOf(String(found.versions[n])) % 6}` : "off";
    return make("span", text, name + (trained && p < 0.01 ? " rare" : trained && p < 0.1 ? " low" : ""));
  });
  if (!start) $("tokens").replaceChildren();
  $("tokens").append(...spans);
  $("more").hidden = start + found.texts.length >= one.num_tokens;
  const before = start ? shown : { data: [], at: -1 };
  const data = found.texts.map((_, n) => [found.versions[n], found.logprobs[n], found.mask[n],
    found.trainer_logprobs?.[n] ?? null, found.advantages ? found.advantages[n] : one.advantage]);
  shown = { id, trajectory, data: [...before.data, ...data], at: before.at };
  if (!start) $("group").focus();
}

function pointAt(n) {
  const spans = $("tokens").children;
  if (!shown || n < 0 || n >= spans.length) return;
  if (spans[shown.at]) spans[shown.at].classList.remove("here");
  spans[n].classList.add("here");
  const [version, logprob, trained, own, advantage] = shown.data[n];
  shown.at = n;
  $("token").textContent = `Token ${n}: ` + (version < 0 ? "of no version" : `version ${version}`) +
    `, log-probability ${number(logprob)}, ${trained ? "trained" : "not trained"}` + (own === null ? "" :
    `; the trainer's ${number(own)}, ${number(Math.abs(own - logprob))} apart, advantage ${number(advantage)}`);
}

$("tokens").addEventListener("mouseover", (event) => {
  if (event.target.parentElement === $("tokens")) pointAt([...$("tokens").children].indexOf(event.target));
});
$("tokens").addEventListener("keydown", (event) => {
  const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (move && shown) { pointAt(shown.at + move); event.preventDefault(); }
});
$("trajectory").onchange = () => showGroup(shown.id, +$("trajectory").value).catch(say);
$("more").onclick = () => showGroup(shown.id, shown.trajectory, shown.data.length).catch(say);
$("newer").onclick = () => { offset = Math.max(0, offset - 50); listGroups().catch(say); };
$("older").onclick = () => { offset += 50; listGroups().catch(say); };
$("filter").onsubmit = (event) => { event.preventDefault(); offset = 0; listGroups().catch(say); };

// State -------------------------------------------------------------------------------------------

function say(error) {
  $("problem").hidden = false;
  $("problem").textContent = `The page cannot be brought up to date: ${error.message}`;
}

function showState() {
  document.title = `${state.run}: ${state.state}`;
  $("run").textContent = state.run;
  const steps = state.num_steps ? `step ${state.step} of ${state.num_steps}` : `${state.step} steps`;
  const left = state.eta_s ? `${duration(state.eta_s)} left` : "";
  $("progress").textContent = [state.state, state.is_live ? state.phase : "", steps, left].filter(Boolean).join(", ");
  if ($("line").textContent !== state.line) $("line").textContent = state.line;
  $("problem").hidden = !(state.problem || state.error);
  $("problem").textContent = state.problem || state.error || "";
  $("findings").replaceChildren(...state.findings.slice(1).map((one) => {
    const item = make("li");
    item.append(make("span", one.level, one.level), ` ${one.sentence} `);
    if (one.command) item.append(make("code", one.command));
    return item;
  }));
  $("line").className = state.findings[0]?.level === "alarm" ? "alarm" : "";
  $("tune").hidden = state.max_staleness === null;
  if (!$("wanted").value && state.max_staleness !== null) $("wanted").value = state.max_staleness;
  if (!state.is_live) $("tuned").textContent = "It can be changed while the run goes on.";
  $("changes").replaceChildren(...state.changes.toReversed().map((one) => make("li",
    `${new Date(one.t * 1000).toLocaleString()}: ${one.setting} ${one.before} to ${one.after}, by ${one.who}${one.why ? `: ${one.why}` : ""}`)));
}

function showChoices() {
  const chosen = $("metric").value;
  $("metric").replaceChildren(...state.metrics.map((name) => new Option(name, name, false, name === chosen)));
  const known = new Set([...document.querySelectorAll("#others input")].map((box) => box.value));
  for (const name of state.others.filter((name) => !known.has(name))) {
    const label = make("label"), box = make("input");
    Object.assign(box, { type: "checkbox", value: name, onchange: () => drawAll().catch(say) });
    label.append(box, name);
    $("others").append(label);
  }
  $("compare").hidden = !state.others.length;
}

async function drawAll() {
  const begun = Date.now();
  drawn = state.num_records;
  // The first screens first: the server has one core for all of them.
  await Promise.all([...charts.map(drawChart), offset || listGroups()]);
  await drawAreas();
  await drawWeights();
  drawAfter = Date.now() + Math.max(DRAW_MS, DRAW_SHARE * (Date.now() - begun));
}

async function look() {
  state = await get("state");
  titles = state.titles;
  showState();
  if (state.num_records !== drawn && Date.now() > drawAfter) {
    showChoices();
    if (!charts.length) FIRST.filter((name) => state.metrics.includes(name)).forEach(addChart);
    await drawAll();
  }
}

async function poll() {
  if (!document.hidden) await look().catch(say);
  setTimeout(poll, POLL_MS);
}

$("choice").onsubmit = (event) => { event.preventDefault(); const chart = addChart($("metric").value); if (chart) drawChart(chart).catch(say); };
$("by").onchange = $("since").onchange = () => drawAll().catch(say);
$("which").onsubmit = (event) => { event.preventDefault(); drawWeights().catch(say); };
matchMedia("(prefers-color-scheme: dark)").onchange = () => state && drawAll().catch(say);
$("tune").onsubmit = (event) => {
  event.preventDefault();
  $("sure-text").textContent = `Change buffer.max_staleness of ${state.run} from ${state.max_staleness} to ${$("wanted").value}?`;
  $("sure").returnValue = "";
  $("sure").showModal();
};
$("sure").onclose = async () => {
  if ($("sure").returnValue !== "yes") return;
  const response = await fetch("/api/tune", { method: "POST", headers: { "content-type": "application/json" },
    body: JSON.stringify({ max_staleness: +$("wanted").value }) });
  $("tuned").textContent = response.ok ? "Changed." : await response.text();
  look().catch(say);
};
poll();
