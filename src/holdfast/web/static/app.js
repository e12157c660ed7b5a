// Live updates, relative times, keys. Pages work without this script, too: then they show the moment of loading.
"use strict";

const main = document.getElementById("main");
const live = document.getElementById("live");
let stream = null, isPaused = false, retryLater = 0, waiting = null;

// Relative times. The server sends exact ones.

function span(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return s + " s";
  if (s < 3600) return Math.floor(s / 60) + " min";
  if (s < 86400) return Math.floor(s / 3600) + " h " + Math.floor(s % 3600 / 60) + " min";
  return Math.floor(s / 86400) + " d " + Math.floor(s % 86400 / 3600) + " h";
}

function relative(mode, seconds) {
  if (mode === "for") return span(seconds);
  if (seconds < 0) return seconds > -1 ? "now" : "in " + span(-seconds);
  if (mode === "in") return span(seconds) + " overdue";
  return seconds < 1 ? "now" : span(seconds) + " ago";
}

function tick() {
  for (const time of main.querySelectorAll("time")) {
    const text = relative(time.dataset.mode, (Date.now() - Date.parse(time.dateTime)) / 1000);
    if (time.firstChild.data !== text) time.firstChild.data = text;
    if (!time.title) time.title = new Date(time.dateTime).toLocaleString() + "\n" + time.dateTime;
  }
}

function setTitle() {
  const heading = main.querySelector("h1");
  document.title = (heading ? heading.textContent.trim().replace(/\s+/g, " ") + " · " : "") + "Holdfast";
}

// Replace what differs. Elements that stay keep their focus, their selection and what is typed into them.

function keyOf(node) {
  return node.nodeType === 1 ? node.dataset.key || node.id : "";
}

function fits(old, fresh) {
  return old.nodeType === fresh.nodeType && old.nodeName === fresh.nodeName && keyOf(old) === keyOf(fresh);
}

function morph(old, fresh) {
  if (old.nodeType !== 1) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if (old.nodeName === "TIME") {
    if (old.dateTime === fresh.dateTime && old.dataset.mode === fresh.dataset.mode) return;
    old.title = "";
  }
  for (const {name} of [...old.attributes])
    if (!fresh.hasAttribute(name) && name !== "title") old.removeAttribute(name);
  for (const {name, value} of fresh.attributes)
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (old.nodeName === "INPUT" || old.nodeName === "SELECT") return;  // what is chosen is the user's
  morphChildren(old, fresh);
}

// Remove a node, or put one that may be needed to the end. Returns the next one.
function skip(node) {
  const next = node.nextSibling;
  if (keyOf(node)) node.parentNode.append(node); else node.remove();
  return next;
}

function morphChildren(old, fresh) {
  const keyed = new Map([...old.children].filter(keyOf).map((node) => [keyOf(node), node]));
  let at = old.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    while (at && at.nodeType === 3 && wanted.nodeType !== 3) at = skip(at);
    const known = keyOf(wanted) && keyed.get(keyOf(wanted));
    if (known && fits(known, wanted)) {
      keyed.delete(keyOf(wanted));
      if (known.contains(document.activeElement)) while (at && at !== known) at = skip(at);  // it would lose the focus
      if (known === at) at = at.nextSibling; else old.insertBefore(known, at);
      morph(known, wanted);
    } else if (at && fits(at, wanted) && !keyOf(wanted)) {
      morph(at, wanted);
      at = at.nextSibling;
    } else {
      if (wanted.nodeName === "TR") wanted.classList.add("new");
      old.insertBefore(wanted, at);
    }
  }
  while (at) { const next = at.nextSibling; at.remove(); at = next; }
}

function show(html, id) {
  const fresh = new DOMParser().parseFromString("<main>" + html + "</main>", "text/html").querySelector("main");
  morphChildren(main, fresh);
  main.dataset.id = id;
  setTitle();
  tick();
}

// The stream of this page. It is closed while the page is hidden: a browser opens only six connections to a server.

function setState(state) {
  live.dataset.state = state;
  live.lastElementChild.textContent = state;
  document.getElementById("lost").hidden = state !== "lost";
  document.body.classList.toggle("lost", state === "lost");
}

function connect() {
  clearTimeout(retryLater);
  if (stream) stream.close();
  stream = null;
  if (document.hidden || isPaused || !main.dataset.id) return;
  const url = new URL(location.href);
  url.hash = "";
  url.searchParams.set("_seen", main.dataset.id);
  stream = new EventSource(url);
  stream.onopen = () => setState("live");
  stream.addEventListener("page", (event) => show(event.data, event.lastEventId));
  stream.onerror = () => {
    setState("lost");
    if (stream.readyState === EventSource.CLOSED) retryLater = setTimeout(connect, 1500);
  };
}

function pause() {
  isPaused = !isPaused;
  connect();
  if (isPaused) setState("paused");
}

// A filter applies while it is typed.

async function apply(form) {
  const values = [...new FormData(form)].filter(([, value]) => value);
  const url = form.action + (values.length ? "?" + new URLSearchParams(values) : "");
  history.replaceState(null, "", url);
  try {
    const answer = await fetch(url);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
    if (fresh && url === location.href) { show(fresh.innerHTML, fresh.dataset.id); connect(); }
  } catch { setState("lost"); connect(); }
}

main.addEventListener("input", (event) => {
  const form = event.target.closest("form.filter");
  if (!form) return;
  clearTimeout(waiting);
  waiting = setTimeout(apply, event.target.nodeName === "SELECT" ? 0 : 250, form);
});

// Keys.

const PLACES = {o: "/", l: "/locks", q: "/queues", e: "/stores"};
let isGoing = 0;

function move(step) {
  const links = [...main.querySelectorAll(".rows tbody tr")].map((row) => row.querySelector("a")).filter(Boolean);
  const next = links[links.indexOf(document.activeElement) + step] || links[step > 0 ? 0 : links.length - 1];
  if (next) { next.focus(); next.scrollIntoView({block: "nearest"}); }
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (Date.now() - isGoing < 1500 && PLACES[event.key]) { location.href = PLACES[event.key]; return; }
  isGoing = event.key === "g" ? Date.now() : 0;
  const keys = {
    "/": () => { const field = main.querySelector(".filter input"); if (field) field.focus(); },
    "j": () => move(1), "k": () => move(-1), "p": pause, "?": () => document.getElementById("help").showModal(),
  };
  if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
});

live.addEventListener("click", pause);
document.addEventListener("visibilitychange", connect);
window.addEventListener("pagehide", () => stream && stream.close());
window.addEventListener("pageshow", (event) => event.persisted && connect());
setInterval(() => document.hidden || tick(), 1000);
tick();
setTitle();
connect();
