// The newest records of a shard. Keys and values are inserted only as text.
"use strict";

let token = ""; // stays in the memory of this page

const RECORD = [
  ["Sequence", (record) => WHOLE.format(record.sequence)],
  ["Time", (record) => (record.timestamp ? when(record.timestamp) : "none")],
  ["Key", (record) => record.key ?? "none"],
  ["Type", (record) => String(record.type)],
  ["Codec", (record) => record.codec || "unknown"],
  ["Size", (record) => size(record.size)],
  ["Value", (record) => record.value + (record.is_cut ? "…" : "")],
];

class RecordList {
  constructor(client) {
    this.client = client;
    this.shard = 0;
    this.title = make("h3");
    this.note = make("p", { role: "status" });
    this.token = make("input", { type: "password", autocomplete: "off", spellcheck: "false", "aria-label": "Token" });
    const read = make("button", { type: "submit" }, "Read");
    this.login = make("form", { hidden: "" }, make("label", {}, "Token of a principal that may read this client ", this.token), " ", read);
    this.newest = make("button", { type: "button" }, "Newest");
    this.older = make("button", { type: "button" }, "Older");
    this.body = make("tbody");
    const head = make("tr", {}, ...RECORD.map(([title]) => make("th", { scope: "col" }, title)));
    this.table = make("table", { class: "stack records", hidden: "" }, make("thead", {}, head), this.body);
    this.section = make("div", { hidden: "" }, make("div", { class: "bar" }, this.title, this.newest, this.older), this.login, this.note, this.table);
    this.newest.addEventListener("click", () => this.load());
    this.older.addEventListener("click", () => this.load(this.lowest));
    this.login.addEventListener("submit", (event) => this.logIn(event));
  }

  open(shard) {
    this.shard = shard;
    this.section.hidden = false;
    say(this.title, `Records of shard ${shard}`);
    set(this.table, "aria-label", `Records of shard ${shard} of ${this.client}`);
    this.load();
  }

  logIn(event) {
    event.preventDefault(); // the token is sent as a header only
    token = this.token.value.trim();
    this.token.value = "";
    this.load();
  }

  async load(before = null) {
    const query = new URLSearchParams({ client: this.client, shard: this.shard, ...(before === null ? {} : { before }) });
    let answer;
    try {
      answer = await fetch(`api/records?${query}`, { headers: token ? { Authorization: `Bearer ${token}` } : {} });
      if (answer.ok) return this.show(await answer.json());
      this.refuse(answer.status, (await answer.text()).trim());
    } catch {
      this.refuse(0, "the hub can't be reached");
    }
  }

  refuse(status, words) {
    this.login.hidden = status !== 401 && status !== 403;
    this.table.hidden = true;
    this.older.hidden = true;
    say(this.note, status === 401 && !token ? "Records are shown to callers with the right to read them." : words);
    if (status === 401) token = "";
  }

  show({ first, next, records }) {
    this.login.hidden = true;
    this.lowest = records.length ? Math.min(...records.map((record) => record.sequence)) : first;
    this.older.hidden = this.lowest <= first;
    this.table.hidden = !records.length;
    const all = next > first ? `sequences ${WHOLE.format(first)} to ${WHOLE.format(next - 1)}` : "no records";
    say(this.note, `The shard has ${all}. Values are decoded, and cut after 1,000 characters.`);
    this.body.replaceChildren(...records.map((record) => this.row(record)));
  }

  row(record) {
    if (!record.lost) return make("tr", {}, ...RECORD.map(([title, text]) => make("td", { "data-label": title }, text(record))));
    const last = WHOLE.format(record.sequence + record.lost - 1);
    return make("tr", {}, make("td", { colspan: RECORD.length, class: "warn" }, `${WHOLE.format(record.sequence)} to ${last}: no records`));
  }
}
