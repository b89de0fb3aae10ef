// The charts of rates; `view` of hub.js has the time.
"use strict";

const RANGES = {
  seconds: { rows: 600, name: "10 min", keep: 600, tick: 120 },
  minutes: { rows: 1440, name: "24 h", keep: 1440, tick: 4 * 3600 },
}; // tick: seconds between two times of the axis
const LABEL = 40; // pixels of a time on the axis
const NARROW = 220; // pixels of an axis that isn't shown yet
const RECENT = 60; // seconds of a client's small curve

class Chart {
  constructor(title, show) {
    this.title = title;
    this.show = show;
    this.value = make("output");
    this.scale = [100, 50, 0].map((percent) => placed(make("span"), "top", 100 - percent));
    this.area = make("path", { class: "area" });
    this.bridges = make("path", { class: "bridge" });
    this.curve = make("path", { class: "curve" });
    this.times = make("path", { class: "grid" });
    this.cross = make("line", { class: "cross", y1: 0, y2: 100, visibility: "hidden" });
    const lines = [0, 50, 100].map((y) => make("line", { class: "grid", x1: 0, x2: 1000, y1: y, y2: y }));
    this.svg = make("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img" });
    this.svg.append(...lines, this.times, this.area, this.bridges, this.curve, this.cross);
    this.axis = make("div", { class: "times", "aria-hidden": "true" });
    this.missed = make("p", { class: "missed", hidden: "" });
    const caption = make("figcaption", {}, make("span", {}, title), this.value);
    const plot = make("div", { class: "plot" }, make("div", { class: "scale", "aria-hidden": "true" }, ...this.scale), this.svg);
    this.figure = make("figure", { class: "chart" }, caption, plot, this.axis, this.missed);
    this.pointed = null;
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.point(null));
  }

  draw(values, range, step) {
    const { rows: most, name, tick } = RANGES[range];
    Object.assign(this, { values, step, most });
    const highest = Math.max(0, ...values.filter((value) => value !== null));
    const top = this.show === perSecond ? round(highest, 1024) : round(highest, 1000);
    const x = (index) => 1000 - ((values.length - 1 - index) * 1000) / (most - 1);
    const point = (index) => `${x(index).toFixed(1)},${(100 - (100 * values[index]) / top).toFixed(2)}`;
    const runs = unbroken(values);
    const known = runs.flat();
    set(this.curve, "d", runs.map((run) => `M${run.map(point).join("L")}${run.length === 1 ? "h1" : ""}`).join(""));
    set(this.bridges, "d", runs.slice(1).map((run, index) => `M${point(runs[index].at(-1))}L${point(run[0])}`).join(""));
    set(this.area, "d", known.length ? `M${x(known[0]).toFixed(1)},100L${known.map(point).join("L")}V100Z` : "");
    const [highestText, middleText, lowestText] = [top, top / 2, 0].map(this.show);
    [highestText, middleText === highestText ? "" : middleText, lowestText].forEach((text, index) => say(this.scale[index], text));
    this.drawTimes(most * step, tick);
    this.drawMissed(known.length ? known.at(-1) - known[0] + 1 - known.length : 0, range);
    this.tell();
    set(this.svg, "aria-label", `${this.title}, last ${name}: now ${this.show(values.at(-1) ?? 0)}, highest ${this.show(highest)}`);
  }

  // Draw the times of the axis, at whole multiples of `tick` seconds by the clock of this browser.
  drawTimes(span, tick) {
    const now = seconds(view.now);
    const offset = new Date(now * 1000).getTimezoneOffset() * 60;
    const found = [];
    for (let at = Math.floor((now - offset) / tick) * tick + offset; at > now - span; at -= tick) found.push(at);
    const places = found.map((at) => [1 - (now - at) / span, at]);
    set(this.times, "d", places.map(([place]) => `M${(1000 * place).toFixed(1)},0V100`).join(""));
    const label = LABEL / (this.svg.clientWidth || NARROW); // as a part of the axis; a time must not leave it, or reach the word "now"
    const shown = places.filter(([place]) => place > label / 2 && place < 1 - 1.3 * label);
    const labels = [...shown.map(([place, at]) => [place, minute(at * 1000), ""]).reverse(), [1, "now", "last"]];
    while (this.axis.children.length > labels.length) this.axis.lastChild.remove();
    labels.forEach(([place, text, name], index) => {
      const label = this.axis.children[index] || this.axis.appendChild(make("span"));
      say(label, text);
      set(label, "class", name);
      placed(label, "left", 100 * place);
    });
  }

  drawMissed(missed, range) {
    this.missed.hidden = !missed;
    const step = range === "seconds" ? "second" : "minute";
    say(this.missed, `${counted(missed, step)} without a sample, bridged by dashes`);
  }

  point(event) {
    this.pointed = event && event.offsetX / this.svg.clientWidth;
    this.tell();
  }

  tell() {
    if (!this.values) return;
    const back = this.pointed === null ? 0 : Math.round((1 - this.pointed) * (this.most - 1));
    const value = this.values.at(-1 - back) ?? null;
    const text = value === null ? (this.values.length > back ? "no sample" : "–") : this.show(value);
    set(this.cross, "visibility", this.pointed === null ? "hidden" : "visible");
    if (this.pointed !== null) ["x1", "x2"].forEach((name) => set(this.cross, name, (1000 * this.pointed).toFixed(1)));
    say(this.value, this.pointed === null ? text : `${clock(seconds(view.now) * 1000 - back * this.step * 1000)}: ${text}`);
  }
}

// Put an element at a place in percent of its parent; the policy of the page allows no attribute for that.
function placed(element, side, percent) {
  const value = `${percent.toFixed(2)}%`;
  if (element.style[side] !== value) element.style[side] = value;
  return element;
}

// The least of 1, 2, 5, 10, 20, ... times a power of the base that is at least a number.
function round(number, base) {
  const unit = base ** Math.max(0, Math.floor(Math.log(Math.max(1, number)) / Math.log(base)));
  for (const digit of [1, 2, 5, 10, 20, 50, 100, 200, 500]) if (number <= digit * unit) return digit * unit;
  return base * unit;
}

// The runs of indices with known values.
function unbroken(values) {
  const runs = [];
  values.forEach((value, index) => {
    if (value === null) return;
    if (index === 0 || values[index - 1] === null) runs.push([]);
    runs.at(-1).push(index);
  });
  return runs;
}

function drawSpark(path, values) {
  const top = Math.max(1, ...values);
  const x = (index) => (100 - ((values.length - 1 - index) * 100) / (RECENT - 1)).toFixed(1);
  const y = (index) => (19 - (18 * values[index]) / top).toFixed(1);
  const known = unbroken(values).flat();
  set(path, "d", known.length ? `M${known.map((index) => `${x(index)},${y(index)}`).join("L")}` : "");
}
