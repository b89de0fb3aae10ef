// Formats of numbers and times, and elements, for the other scripts.
"use strict";

const DAY = 86400;
const SVG = "http://www.w3.org/2000/svg";

// Formats of numbers.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const SMALL = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });
const FOUR = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const COLLATOR = new Intl.Collator("en", { numeric: true });

function count(number) {
  if (number >= 1e9) return `${FOUR.format(number / 1e9)} bn`;
  if (number >= 1e6) return `${FOUR.format(number / 1e6)} M`;
  return number < 10 ? SMALL.format(number) : WHOLE.format(number);
}

const counted = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

function size(bytes) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (bytes < 1024) return unit === "B" ? `${WHOLE.format(bytes)} B` : `${bytes.toFixed(1)} ${unit}`;
    bytes /= 1024;
  }
  return `${bytes.toFixed(1)} TiB`;
}

const perSecond = (bytes) => `${size(bytes)}/s`;

function duration(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.floor(seconds))} s`;
  if (seconds < 5400) return `${Math.floor(seconds / 60)} min`;
  return seconds < 2 * DAY ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / DAY)} days`;
}

const seconds = (ns) => ns / 1e9;
const ago = (ns, now) => (!ns ? "never" : seconds(now - ns) < 2 ? "now" : `${duration(seconds(now - ns))} ago`);
const when = (ns) => new Date(ns / 1e6).toLocaleString([], { dateStyle: "medium", timeStyle: "medium" });
const clock = (ms) => new Date(ms).toLocaleTimeString([], { timeStyle: "medium" });
const minute = (ms) => new Date(ms).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const reasons = (counts) => Object.entries(counts).map(([reason, number]) => `${reason} ${count(number)}`).join(", ");
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

// Elements.

function make(tag, attributes = {}, ...children) {
  const element = tag === "svg" || tag === "path" || tag === "line" || tag === "rect" ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function set(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

function time(element, ns, now) {
  say(element, ago(ns, now));
  set(element, "title", ns ? when(ns) : "");
}

const by = (id) => document.getElementById(id);
