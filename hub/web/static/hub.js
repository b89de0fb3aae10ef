// The page of a hub: draws the events of /events each second. Data from clients is inserted only as text, never as markup.
"use strict";

const RELOAD = 60; // events after which the history is fetched again, for its rows of minutes
const SILENCE = 15000; // ms without an event after which the connection counts as lost
const AGAIN = 1000; // ms until the next attempt
const SOON = 14 * DAY; // seconds before its end in which a certificate is shown as expiring

// State.

const view = {
  now: 0, // the hub's clock, ns
  kept: 0, // the clock of the last kept event
  news: null,
  history: null,
  recent: new Map(), // client: its records/s of the last minute
  events: 0,
  range: "seconds",
  filter: "",
  sort: { column: "client", down: false },
  rows: new Map(),
};

function remember(history, rates, skipped) {
  const rows = history.seconds;
  for (const name of ["records", "bytes", "connections"]) extend(rows[name], rates[name], skipped, RANGES.seconds.keep);
}

// Add a value, after nulls for skipped seconds, and keep the newest `most`.
function extend(values, value, skipped, most) {
  for (let missed = 0; missed < Math.min(skipped, most); missed++) values.push(null);
  values.push(value);
  if (values.length > most) values.splice(0, values.length - most);
}

// The facts.

const FACTS = ["Records in", "Data in", "Clients", "Behind", "Lost", "Disk", "Certificate", "Up"];
const facts = {};
for (const name of FACTS) {
  facts[name] = { value: make("dd"), more: make("dd", { class: "more" }) };
  by("facts").append(make("div", {}, make("dt", {}, name), facts[name].value, facts[name].more));
}
const disk = { used: make("rect", { class: "used", height: 10 }), mark: make("rect", { class: "mark", width: 1, height: 10 }) };
facts.Disk.value.after(make("dd", {}, make("svg", { class: "disk", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }, disk.used, disk.mark)));

function fact(name, value, more = "", mood = "") {
  say(facts[name].value, value);
  say(facts[name].more, more);
  set(facts[name].value, "class", mood);
}

function showFacts({ status, rates }) {
  const clients = status.clients;
  const connected = clients.filter((client) => client.connections).length;
  const late = clients.filter((client) => behind(client) >= 0);
  const gaps = sum(clients.map((client) => client.gaps));
  const cut = reasons(status.cut);
  fact("Records in", `${count(rates.records)}/s`, `${count(sum(clients.map((client) => client.records)))} since the start`);
  fact("Data in", perSecond(rates.bytes), `${size(sum(clients.map((client) => client.bytes)))} since the start`);
  fact("Clients", count(clients.length), `${count(connected)} connected, ${counted(status.connections, "connection")}${cut && `; cut: ${cut}`}`);
  const silent = late.filter(isEstimate).length;
  const known = estimated(count(sum(late.map(behind))), silent);
  const more = silent ? `; estimated for ${counted(silent, "silent client")}` : "";
  fact("Behind", late.length || !clients.length ? known : "unknown", `records that clients still have to send${more}`);
  const missing = sum(clients.map(lost));
  fact("Lost", count(missing), `records in gaps; new gaps since the start: ${count(gaps)}`, missing ? "warn" : "");
  showDisk(status);
  showCertificate(status);
  fact("Up", duration(seconds(status.now - status.started)), `since ${when(status.started)}`);
}

function showDisk({ free_bytes: free, disk_bytes: all, least_free: least }) {
  const share = all ? (100 * (all - free)) / all : 0;
  set(disk.used, "width", share.toFixed(1));
  set(disk.mark, "x", Math.max(0, all ? 100 - (100 * least) / all : 0).toFixed(1));
  fact("Disk", `${size(free)} free`, `of ${size(all)}; stops below ${size(least)}`, free < least ? "bad" : free < 2 * least ? "warn" : "");
}

function showCertificate({ certificate_expires: end, is_secure: isSecure, now }) {
  if (!end) return fact("Certificate", isSecure ? "unknown" : "no TLS", isSecure ? "" : "clients connect in plain text");
  const left = seconds(end - now);
  const mood = left <= 0 ? "bad" : left < SOON ? "warn" : "";
  fact("Certificate", left <= 0 ? "expired" : `${duration(left)} left`, `${left <= 0 ? "expired" : "expires"} ${when(end)}`, mood);
}

const lost = (client) => sum(client.shards.map((shard) => shard.lost));
const used = (client) => sum(client.shards.map((shard) => shard.used));
const stored = (client) => sum(client.shards.map((shard) => shard.records));
const refused = (client) => sum(Object.values(client.refused));

function behind(client) {
  const known = client.shards.map((shard) => shard.behind).filter((number) => number >= 0);
  return known.length ? sum(known) : -1;
}

const orUnknown = (number) => (number < 0 ? "?" : count(number));
const isEstimate = (client) => client.shards.some((shard) => shard.behind_is_estimate);
const estimated = (text, isOne) => (isOne ? `≈ ${text}` : text); // of a silent client: by its last report and rate

// The clients.

const NOTHING = { records: 0, bytes: 0, connections: 0 };
const COLUMNS = {
  client: { title: "Client", value: (client) => client.client },
  records: { title: "Records/s", value: (client, rates) => rates.records, show: count },
  bytes: { title: "Data/s", value: (client, rates) => rates.bytes, show: perSecond },
  stored: { title: "Stored", value: stored, show: count },
  used: { title: "On disk", value: used, show: size },
  behind: { title: "Behind", value: behind, show: (number, client) => estimated(orUnknown(number), isEstimate(client)) },
  lost: { title: "Lost", value: lost, show: count, mood: (number) => number && "warn" },
  refused: { title: "Refused", value: refused, show: count, mood: (number) => number && "warn" },
  seen: { title: "Last seen", value: (client) => client.last_seen },
};
const classes = (column) => (column.title === "Client" ? "" : "number");

class ClientRow {
  constructor(name) {
    const id = `details-${ClientRow.made++}`;
    this.name = name;
    this.button = make("button", { type: "button", "aria-expanded": "false", "aria-controls": id }, name);
    this.light = make("span", { class: "off" }, make("span", { class: "unseen" }));
    this.curve = make("path", { class: "curve" });
    this.cells = {};
    const row = make("tr", { class: "client" }, make("th", { scope: "row" }, make("span", { class: "name" }, this.light, this.button)));
    for (const [key, column] of Object.entries(COLUMNS)) {
      if (key === "client") continue;
      this.cells[key] = make(key === "seen" ? "time" : "span");
      row.append(make("td", { class: classes(column), "data-label": column.title }, this.cells[key]));
    }
    this.cells.records.before(make("svg", { class: "spark", viewBox: "0 0 100 20", preserveAspectRatio: "none", "aria-hidden": "true" }, this.curve));
    this.inside = make("td", { colspan: Object.keys(COLUMNS).length });
    this.below = make("tr", { class: "details", id, hidden: "" }, this.inside);
    this.body = make("tbody", {}, row, this.below);
    this.details = null;
    this.button.addEventListener("click", () => this.toggle());
  }

  show(client, rates, now) {
    Object.assign(this, { client, rates });
    for (const [key, cell] of Object.entries(this.cells)) {
      const column = COLUMNS[key];
      const value = column.value(client, rates);
      if (key === "seen") time(cell, value, now);
      else say(cell, column.show(value, client));
      if (column.mood) set(cell, "class", column.mood(value) || "");
    }
    set(this.light, "class", client.connections ? "on" : "off");
    say(this.light.firstChild, client.connections ? "connected" : "not connected");
    drawSpark(this.curve, view.recent.get(this.name) || []);
    if (this.details) this.details.show(client, rates, now);
  }

  toggle() {
    const isOpen = this.button.getAttribute("aria-expanded") === "true";
    set(this.button, "aria-expanded", String(!isOpen));
    this.below.hidden = isOpen;
    this.details = isOpen ? null : new Details(this.name);
    this.inside.replaceChildren(...(isOpen ? [] : this.details.elements));
    if (!isOpen) this.details.show(this.client, this.rates, view.now);
  }
}
ClientRow.made = 0;

// The details of a client: more statistics, its charts, its shards.
class Details {
  constructor(name) {
    this.name = name;
    this.history = null;
    this.list = make("dl");
    this.figures = {};
    this.charts = { records: new Chart("Records/s", count), bytes: new Chart("Data/s", perSecond) };
    this.shards = make("tbody");
    const head = make("tr", {}, ...[...SHARD, ["Content"]].map(([title]) => make("th", { scope: "col", class: "number" }, title)));
    const table = make("table", { class: "stack", "aria-label": `Shards of ${name}` }, make("thead", {}, head), this.shards);
    const charts = make("div", { class: "charts" }, ...Object.values(this.charts).map((chart) => chart.figure));
    const scroll = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Shards of ${name}` }, table);
    this.records = new RecordList(name);
    this.elements = [this.list, charts, make("h3", {}, "Shards"), scroll, this.records.section];
    this.load();
  }

  async load() {
    this.history = await fetchJson(`api/history?client=${encodeURIComponent(this.name)}`);
    this.draw();
  }

  show(client, rates, now) {
    const quota = client.quota_bytes ? ` of ${size(client.quota_bytes)}` : "";
    this.figure("Connections", count(client.connections));
    this.figure("Last seen", client.last_seen ? `${ago(client.last_seen, now)}, ${when(client.last_seen)}` : "not since the hub started");
    this.figure("Received since the start", `${counted(client.records, "record")}, ${size(client.bytes)}`);
    this.figure("Stored", `${counted(stored(client), "record")} in ${counted(client.shards.length, "shard")}`);
    this.figure("On disk", size(used(client)) + quota);
    this.figure("Sent again", counted(client.duplicates, "record"));
    this.figure("Gaps since the start", count(client.gaps));
    this.figure("Written by", client.is_mirrored ? "a mirror, which pulls this copy from another hub" : "its shippers");
    this.figure("Refused batches", reasons(client.refused) || "none");
    while (this.shards.rows.length > client.shards.length) this.shards.lastChild.remove();
    client.shards.forEach((shard, index) => this.showShard(index, shard, now));
    this.draw();
  }

  figure(name, value) {
    if (!this.figures[name]) {
      this.figures[name] = make("dd");
      this.list.append(make("div", {}, make("dt", {}, name), this.figures[name]));
    }
    say(this.figures[name], value);
  }

  showShard(index, shard, now) {
    const row = this.shards.rows[index] || this.shards.appendChild(this.makeShard());
    row.dataset.shard = shard.index;
    SHARD.forEach(([, text], column) => say(row.cells[column], text(shard, now)));
  }

  makeShard() {
    const button = make("button", { type: "button", class: "show" }, "Records");
    const row = make("tr", {}, ...SHARD.map(([title]) => make("td", { class: "number", "data-label": title })), make("td", { class: "number" }, button));
    button.addEventListener("click", () => this.records.open(Number(row.dataset.shard)));
    return row;
  }

  draw() {
    if (!this.history) return;
    const rows = this.history[view.range];
    for (const [name, chart] of Object.entries(this.charts)) chart.draw(rows[name], view.range, rows.step);
  }
}

const SHARD = [
  ["Shard", (shard) => String(shard.index)],
  ["Generation", (shard) => String(shard.generation)],
  ["First", (shard) => WHOLE.format(shard.first_sequence)],
  ["Next", (shard) => WHOLE.format(shard.next_sequence)],
  ["Records", (shard) => WHOLE.format(shard.records)],
  ["On disk", (shard) => size(shard.used)],
  ["Lost", (shard) => WHOLE.format(shard.lost)],
  ["Behind", (shard) => estimated(orUnknown(shard.behind), shard.behind_is_estimate)],
  ["Last record", (shard, now) => (shard.last_timestamp ? `${ago(shard.last_timestamp, now)}, ${when(shard.last_timestamp)}` : "none")],
];

const table = by("table");
for (const [key, column] of Object.entries(COLUMNS)) {
  const button = make("button", { type: "button" }, column.title);
  button.addEventListener("click", () => sortBy(key));
  table.tHead.rows[0].append(make("th", { scope: "col", class: classes(column), "data-column": key }, button));
}

function sortBy(key) {
  const startsDown = key !== "client";
  view.sort = { column: key, down: view.sort.column === key ? !view.sort.down : startsDown };
  order();
}

function showClients({ status, clients }) {
  const rates = new Map(Object.entries(clients));
  const gone = new Set(view.rows.keys());
  for (const client of status.clients) {
    gone.delete(client.client);
    if (!view.rows.has(client.client)) view.rows.set(client.client, new ClientRow(client.client));
    view.rows.get(client.client).show(client, rates.get(client.client) || NOTHING, status.now);
  }
  for (const name of gone) {
    view.rows.get(name).body.remove();
    view.rows.delete(name);
  }
  table.hidden = !status.clients.length;
  by("nobody").hidden = Boolean(status.clients.length);
  by("filter").hidden = by("rates").hidden = !status.clients.length;
  say(by("command"), `kvspool ship LOG ${status.is_secure ? "grpc+tls" : "grpc"}://${reachable(status.address)}`);
  order(true);
}

// The address for clients: a hub that listens on all interfaces gets the host name of this page.
function reachable(address) {
  return address.replace(/^(0\.0\.0\.0|\[::\]|)(?=:\d+$)/, location.hostname);
}

// Sort the rows. While the pointer or the focus is on one, the order is kept.
function order(isUpdate = false) {
  const { column, down } = view.sort;
  for (const th of table.tHead.rows[0].cells) {
    set(th, "aria-sort", th.dataset.column !== column ? "none" : down ? "descending" : "ascending");
  }
  const isHeld = isUpdate && table.querySelector("tbody:hover, tbody:focus-within");
  const rows = [...view.rows.values()];
  if (!isHeld) rows.sort((one, other) => compare(one, other, column) * (down ? -1 : 1) || COLLATOR.compare(one.name, other.name));
  let place = table.tHead;
  for (const row of rows) {
    if (isHeld ? !row.body.isConnected : place.nextElementSibling !== row.body) isHeld ? table.append(row.body) : place.after(row.body);
    place = row.body;
  }
  filter();
}

function compare(one, other, column) {
  const { value } = COLUMNS[column];
  const [a, b] = [one, other].map((row) => value(row.client, row.rates));
  return typeof a === "string" ? COLLATOR.compare(a, b) : a - b;
}

function filter() {
  let shown = 0;
  for (const row of view.rows.values()) {
    row.body.hidden = !row.name.toLowerCase().includes(view.filter);
    shown += !row.body.hidden;
  }
  const all = view.rows.size;
  say(by("shown"), !view.filter ? "" : shown ? `${shown} of ${all} shown` : `none of ${all} has “${view.filter}” in its name`);
}

// Other sections.

// Return an empty row for the table of a section, with the titles of the columns as labels, which a narrow window shows.
function makeRow(section, names) {
  const titles = [...section.querySelector("thead tr").cells].map((cell) => cell.textContent);
  return make("tr", {}, ...names.map((name, index) => make("td", { class: name, "data-label": titles[index] })));
}

function showReaders({ readers }) {
  by("readers").hidden = !readers.length;
  const body = by("readers").querySelector("tbody");
  while (body.rows.length > readers.length) body.lastChild.remove();
  readers.forEach((reader, index) => {
    const row = body.rows[index] || body.appendChild(makeRow(by("readers"), ["", "number", ""]));
    say(row.cells[0], reader.name);
    say(row.cells[1], count(reader.lag));
    say(row.cells[2], reader.tasks ? taskWords(reader.tasks) : reader.members.map((one) => `${one.process}: ${counted(one.shards, "shard")}`).join("; ") || "-");
  });
}

function taskWords(tasks) {
  const used = `${count(tasks.used)} of ${count(tasks.window)} of the window`;
  const counts = `${count(tasks.given)} given, ${count(tasks.waiting)} waiting, ${count(tasks.retried)} retried, ${count(tasks.dead)} dead, ${used}`;
  const workers = tasks.workers.map((one) => `${one.process}: ${counted(one.tasks, "task")}`);
  return [`${counted(tasks.workers.length, "worker")}, ${counts}`, ...tasks.waits_for, ...workers].join("; ");
}

const PIPELINE_CELLS = ["", "", "number", "number", "number", "number", "number", ""]; // classes

function showPipelines({ pipelines, now }) {
  by("pipelines").hidden = !pipelines.length;
  const body = by("pipelines").querySelector("tbody");
  while (body.rows.length > pipelines.length) body.lastChild.remove();
  pipelines.forEach((one, index) => {
    const row = body.rows[index] || body.appendChild(makeRow(by("pipelines"), PIPELINE_CELLS));
    const [name, state, rate, lag, records, bad, late, batch] = row.cells;
    const isLive = one.state === "running" || one.state === "starting";
    set(row, "data-state", isLive ? "live" : one.state);
    say(name, one.name);
    say(state, one.state === "silent" ? `no update since ${when(one.updated)}` : isLive ? one.state : `${one.state} ${ago(one.updated, now)}`);
    set(state, "title", one.error);
    say(rate, count(one.rate));
    say(lag, one.lag < 0 ? "–" : count(one.lag));
    say(records, count(one.records));
    say(bad, count(one.bad));
    say(late, count(one.late));
    say(batch, one.batch < 0 ? "none yet" : `${ago(one.batch_ended, now)}, ${one.batch_seconds.toFixed(1)} s`);
  });
}

function showTroubles(troubles) {
  const list = by("troubles");
  if (list.textContent === troubles.join("")) return;
  list.replaceChildren(...troubles.map((trouble) => make("li", {}, trouble)));
  list.hidden = !troubles.length;
}

const charts = { records: new Chart("Records/s", count), bytes: new Chart("Data/s", perSecond), connections: new Chart("Connections", count) };
by("charts").append(...Object.values(charts).map((chart) => chart.figure));

function showCharts() {
  if (!view.history) return;
  const rows = view.history[view.range];
  for (const [name, chart] of Object.entries(charts)) chart.draw(rows[name], view.range, rows.step);
}

function show() {
  const news = view.news;
  if (!news || document.hidden) return;
  showTroubles(news.failure ? [news.failure, ...news.troubles] : news.troubles);
  if (!news.status) return;
  const status = news.status;
  view.now = status.now;
  say(by("root"), status.root);
  const level = status.level === "disk" ? "on disk" : "stored";
  say(by("about"), `kvspool ${status.version} at ${status.address}; acknowledges records that are ${level}. As of ${when(status.now)}.`);
  showFacts(news);
  showCharts();
  showClients(news);
  showReaders(status);
  showPipelines(status);
}

// Events.

let source = null;
let heard = 0;

function state(name, text) {
  const element = by("state");
  set(element, "data-state", name);
  say(element, text);
}

function listen() {
  heard = Date.now();
  source = new EventSource("events");
  source.onopen = load;
  source.onmessage = (event) => hear(JSON.parse(event.data));
  source.onerror = lose;
}

function lose() {
  if (!source) return;
  source.close();
  source = null;
  state("lost", "lost, trying again");
  setTimeout(listen, AGAIN);
}

function hear(news) {
  heard = Date.now();
  view.news = news;
  if (!news.failure) keep(news);
  state("live", "live");
  if (++view.events % RELOAD === 0) load();
  show();
}

function keep({ status, rates, clients }) {
  const elapsed = view.kept ? Math.round(seconds(status.now - view.kept)) : 1;
  if (elapsed < 1) return; // the same sample again
  const skipped = elapsed - 1;
  view.kept = status.now;
  if (view.history) remember(view.history, rates, skipped);
  for (const [name, moment] of Object.entries(clients)) {
    if (!view.recent.has(name)) view.recent.set(name, []);
    extend(view.recent.get(name), moment.records, skipped, RECENT);
    const details = view.rows.get(name)?.details;
    if (details?.history) remember(details.history, moment, skipped);
  }
}

async function load() {
  const report = await fetchJson("api/status");
  if (!report) return;
  view.history = report.history;
  view.kept = report.status?.now ?? 0;
  view.recent = new Map(Object.entries(report.recent)); // not an object: a client may be named __proto__
  for (const row of view.rows.values()) if (row.details) row.details.load();
  show();
}

// Return the answer of an address; null if there is none, which the stream of events detects too.
async function fetchJson(address) {
  try {
    const answer = await fetch(address);
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}

by("filter").addEventListener("input", (event) => {
  view.filter = event.target.value.trim().toLowerCase();
  filter();
});
by("range").addEventListener("change", (event) => {
  view.range = event.target.value;
  show();
});
document.addEventListener("visibilitychange", show);
setInterval(() => source && Date.now() - heard > SILENCE && lose(), 1000);
listen();
