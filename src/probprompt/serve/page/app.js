// The page: everything it knows it asks the service for, and everything it shows is text, never markup.
const TOKEN = "probprompt-token";
const BUSY = 700, IDLE = 5000; // milliseconds between questions about what is going on
const SHOWN_JOBS = 5;
const CHUNK = 8; // images of one request: the first answers come soon

const find = (id) => document.getElementById(id);
let model = null;
let jobs = [];
let drawn = null; // the version whose history and figures are shown

// Small helpers ------------------------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const percent = (share) => (share > 0 && share < 0.01 ? "< 1 %" : share >= 0.995 && share < 1 ? "> 99 %" : `${Math.round(100 * share)} %`);
const count = (number, thing) => `${number} ${thing}${number === 1 ? "" : thing.endsWith("s") ? "es" : "s"}`;
const listed = (names, most = 4) => (names.length <= most ? names.join(", ") : `${names.slice(0, most).join(", ")} and ${names.length - most} more`);
const when = (iso) => new Date(iso).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
const same = (name) => name.normalize("NFC").trim().toLowerCase();
const images = (files) => [...files].filter((file) => file.type.startsWith("image/") || !file.type);

function takeToken() {
  const match = location.hash.match(/^#token=(.+)$/);
  if (match) {
    sessionStorage.setItem(TOKEN, decodeURIComponent(match[1]));
    history.replaceState(null, "", location.pathname + location.search); // not left for shoulders and bookmarks
  }
}

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch {
    find("connection").textContent = "the service does not answer";
    throw new Refused(0, "the service does not answer: is it still running?");
  }
  find("connection").textContent = "";
  const content = await answer.json().catch(() => ({}));
  if (answer.ok) return content;
  if (answer.status === 401) showTokenForm();
  throw new Refused(answer.status, content.error || `the service answered ${answer.status}`);
}

// The model ----------------------------------------------------------------------------------------------------------

function showModel() {
  const known = model.classes.length;
  find("title").textContent = known ? `Knows ${count(known, "class")}` : "Knows nothing yet";
  const lessons = count(model.tasks, "lesson");
  find("summary").textContent = known
    ? `Version ${model.version}, learned in ${lessons} on the frozen backbone ${model.backbone}; no old image was kept.`
    : "Teach it two classes or more to begin.";
  document.title = `${known ? count(known, "class") : "probprompt"} – probprompt`;
  find("known").hidden = known === 0;
  find("known-count").textContent = `Which classes`;
  find("known-list").replaceChildren(...model.classes.map((name) => make("li", {}, name)));
  for (const lesson of document.querySelectorAll(".lesson")) showKnown(lesson);
}

async function refresh() {
  const before = JSON.stringify(model);
  model = await ask("api/model");
  jobs = (await ask("api/jobs")).jobs;
  if (JSON.stringify(model) !== before) showModel();
  showJobs();
  if (drawn !== model.version) {
    drawn = model.version;
    for (const show of [showHistory, showAccuracy, showPrompts]) show().catch(() => { drawn = null; }); // tried again later
  }
}

async function watch() {
  for (;;) {
    try {
      if (!document.hidden || model === null) await refresh();
    } catch (problem) {
      if (model === null) find("title").textContent = "Not there";
      if (model === null) find("summary").textContent = problem.message;
    }
    const busy = jobs.some((job) => job.state === "waiting" || job.state === "running");
    await new Promise((go) => { nudge = go; setTimeout(go, busy ? BUSY : IDLE); });
  }
}
let nudge = () => {};

// Classify -----------------------------------------------------------------------------------------------------------

async function classify(files) {
  const chosen = images(files);
  if (!chosen.length) {
    find("classify-status").textContent = "There is no image among these.";
    return;
  }
  const entries = chosen.map((file) => ({ file, item: resultOf(file) }));
  find("results").prepend(...entries.map((entry) => entry.item));
  find("results-clear").hidden = false;
  find("classify-status").textContent = `Looking at ${count(entries.length, "image")} …`;
  const words = [];
  for (let start = 0; start < entries.length; start += CHUNK) words.push(...(await classifySome(entries.slice(start, start + CHUNK))));
  find("classify-status").textContent = words.length <= 3 ? words.join("; ") : `${count(words.length, "image")} done.`;
}

async function classifySome(entries) {
  const form = new FormData();
  for (const { file } of entries) form.append("images", file, file.name);
  try {
    const answer = await ask("api/predict?top_k=3", { method: "POST", body: form });
    return answer.predictions.map((prediction, index) => fill(entries[index].item, prediction));
  } catch (problem) {
    for (const { item } of entries) fill(item, { error: problem.message });
    return [problem.message];
  }
}

function resultOf(file) {
  const picture = make("img", { alt: "" });
  picture.src = URL.createObjectURL(file);
  picture.addEventListener("error", () => picture.classList.add("broken"));
  const name = file.name || "pasted image";
  return make("li", { class: "result" }, picture, make("div", {}, make("p", { class: "from", title: name }, name), make("h3", {}, "…")));
}

function fill(item, prediction) {
  const place = item.lastElementChild;
  const name = place.firstElementChild;
  if (prediction.error) {
    place.replaceChildren(name, make("h3", {}, "Not classified"), make("p", { class: "error" }, prediction.error));
    return `${name.textContent}: ${prediction.error}`;
  }
  const title = make("h3", {}, prediction.unknown ? make("span", { class: "badge" }, "none of these") : prediction.label);
  const bars = make("ul", { class: "bars" }, ...prediction.top.map((entry) => {
    const fillBar = make("i");
    fillBar.style.width = `${100 * entry.probability}%`;
    return make("li", {}, make("span", { class: "name", title: entry.label }, entry.label), make("span", {}, percent(entry.probability)), make("span", { class: "bar", "aria-hidden": "true" }, fillBar));
  }));
  const near = prediction.unknown ? make("p", { class: "hint" }, "Unlike everything learned; if it had to be one of them:") : null;
  const body = [name, title, near, bars].filter((part) => part !== null);
  item.classList.toggle("faded", prediction.unknown);
  place.replaceChildren(...body);
  return prediction.unknown ? `${name.textContent}: none of these` : `${name.textContent}: ${prediction.label}, ${percent(prediction.probability)}`;
}

function clearResults() {
  for (const picture of find("results").querySelectorAll("img")) URL.revokeObjectURL(picture.src);
  find("results").replaceChildren();
  find("results-clear").hidden = true;
  find("classify-status").textContent = "Cleared.";
  find("classify-choose").focus();
}

// Teach --------------------------------------------------------------------------------------------------------------

let lessonNumber = 0;
const chosenFiles = new WeakMap();

function addLesson() {
  const lesson = find("lesson-template").content.cloneNode(true).firstElementChild;
  const number = ++lessonNumber;
  const name = lesson.querySelector(".name"), files = lesson.querySelector(".file");
  name.id = `name-${number}`;
  lesson.querySelector(".field label").htmlFor = name.id;
  lesson.querySelector(".choose").addEventListener("click", () => files.click());
  chosenFiles.set(lesson, []);
  name.addEventListener("input", () => showKnown(lesson));
  files.addEventListener("change", () => { addImages(lesson, files.files); files.value = ""; });
  receiveDrops(lesson.querySelector(".drop"), (dropped) => addImages(lesson, dropped));
  lesson.querySelector(".remove").addEventListener("click", () => removeLesson(lesson));
  find("lessons").append(lesson);
  showRemovers();
  return lesson;
}

function removeLesson(lesson) {
  lesson.remove();
  showRemovers();
  find("lesson-add").focus();
}

function showRemovers() {
  const lessons = document.querySelectorAll(".lesson");
  for (const lesson of lessons) lesson.querySelector(".remove").parentElement.hidden = lessons.length === 1;
}

function addImages(lesson, files) {
  const own = chosenFiles.get(lesson);
  for (const file of images(files)) {
    own.push(file);
    const picture = make("img", { alt: file.name || "pasted image" });
    picture.src = URL.createObjectURL(file);
    lesson.querySelector(".thumbs").append(make("li", {}, picture));
  }
  lesson.querySelector(".count").textContent = own.length ? count(own.length, "image") : "There is no image among these.";
}

function showKnown(lesson) {
  const hint = lesson.querySelector(".known");
  const name = lesson.querySelector(".name").value;
  const known = model && model.classes.find((one) => same(one) === same(name));
  const shown = hint.querySelector("input") !== null && hint.dataset.name === known;
  hint.hidden = !known;
  lesson.querySelector("legend").textContent = known ? "Known class" : "New class";
  if (!known || shown) return;
  hint.dataset.name = known;
  const box = make("input", { type: "checkbox", class: "refine" });
  hint.replaceChildren(make("label", { class: "choice" }, box, `“${known}” is known already: add these images to it`));
}

function teachForm() {
  const lessons = [...document.querySelectorAll(".lesson")];
  const form = new FormData();
  let refine = false;
  lessons.forEach((lesson, index) => {
    const field = lesson.querySelector(".name"), name = field.value.trim(), own = chosenFiles.get(lesson);
    const fail = (element, words) => { element.focus(); throw new Refused(0, words); };
    if (!name) fail(field, "Give the class a name.");
    if (!own.length) fail(lesson.querySelector(".choose"), `Give images of “${name}”.`);
    const box = lesson.querySelector(".known:not([hidden]) .refine");
    if (box && !box.checked) fail(box, `“${name}” is known already: tick the box to add images to it, or choose another name.`);
    refine ||= Boolean(box);
    form.append("names", name);
    for (const file of own) {
      form.append("images", file, file.name);
      form.append("of", index);
    }
  });
  form.append("known", refine ? "refine" : "refuse");
  return form;
}

async function teach() {
  const button = find("teach-submit");
  find("teach-error").textContent = "";
  try {
    const form = teachForm();
    button.disabled = true;
    find("teach-status").textContent = `Sending ${count(form.getAll("images").length, "image")} …`;
    const job = await ask("api/teach", { method: "POST", body: form });
    find("lessons").replaceChildren();
    addLesson();
    announced.set(job.id, "");
    find("teach-status").textContent = `Accepted: ${listed(job.classes.map((taught) => taught.name))}.`;
  } catch (problem) {
    find("teach-status").textContent = "";
    find("teach-error").textContent = problem.message;
  } finally {
    button.disabled = false;
    nudge();
  }
}

function showTokenForm() {
  const wrong = sessionStorage.getItem(TOKEN) !== null;
  sessionStorage.removeItem(TOKEN);
  find("token-form").hidden = false;
  find("token-error").textContent = wrong ? "That token is not the right one." : "";
}

// Jobs ---------------------------------------------------------------------------------------------------------------

const announced = new Map(); // what was said of each job that this page started
const STATES = { waiting: "waits for its turn", running: "is being learned", done: "learned", failed: "failed", cancelled: "given up" };

function showJobs() {
  const shown = jobs.filter((job) => job.kind === "teach" || job.state !== "done").slice(0, SHOWN_JOBS);
  const list = find("jobs");
  const there = new Map([...list.children].map((item) => [item.dataset.id, item]));
  const items = shown.map((job) => {
    const key = JSON.stringify([{ ...job, progress: null }, job.version === model.version]);
    let item = there.get(String(job.id));
    if (!item || item.dataset.key !== key) {
      const replaced = make("li", { "data-id": job.id, "data-key": key }, ...describe(job));
      if (item && item.contains(document.activeElement)) queueMicrotask(() => find("teach-title").parentElement.parentElement.focus({ preventScroll: true }));
      item = replaced;
    }
    const bar = item.querySelector("progress");
    if (bar && job.progress) {
      bar.max = job.progress.total;
      bar.value = job.progress.done;
      item.querySelector(".stage").textContent = `${job.progress.stage}, ${Math.round((100 * job.progress.done) / job.progress.total)} %`;
    }
    announce(job);
    return item;
  });
  if (items.length !== list.children.length || items.some((item, index) => list.children[index] !== item)) list.replaceChildren(...items);
}

function announce(job) {
  if (!announced.has(job.id) || announced.get(job.id) === job.state) return;
  announced.set(job.id, job.state);
  if (job.state === "done") find(job.kind === "teach" ? "teach-status" : "history-status").textContent =
    job.kind === "teach" ? `Learned ${titleOf(job)}. Version ${job.version} answers now.` : `Version ${job.version} answers now, as version ${job.to} did.`;
  if (job.state === "failed") find("teach-status").textContent = `${titleOf(job)}: ${job.error}`;
}

const titleOf = (job) => (job.kind === "teach" ? listed(job.classes.map((taught) => taught.name)) : `back to version ${job.to}`);

function describe(job) {
  const total = job.classes.reduce((sum, taught) => sum + taught.images, 0);
  const state = job.kind === "rollback" && job.state === "running" ? "under way" : job.refine && job.state === "done" ? "refined" : STATES[job.state];
  const parts = [make("h3", {}, `${titleOf(job)} `, make("span", { class: "muted" }, `– ${state}`))];
  if (job.kind === "teach") parts.push(make("p", { class: "muted" }, `${count(total, "image")}, ${when(job.created)}`));
  if (job.error) parts.push(make("p", { class: "error" }, job.error));
  for (const warning of job.warnings) parts.push(make("p", { class: "hint" }, warning));
  if (job.state === "running" && job.kind === "teach") {
    parts.push(make("progress", { "aria-label": `Learning ${titleOf(job)}` }), make("p", { class: "stage muted" }, "starting"));
  }
  if (job.state === "waiting" || (job.state === "running" && job.kind === "teach")) {
    parts.push(make("p", {}, make("button", { type: "button", class: "quiet", onclick: () => giveUp(job) }, "Give up this lesson")));
  }
  if (job.report) parts.push(...describeReport(job.report));
  if (job.kind === "teach" && job.state === "done" && job.version === model.version && job.before) {
    parts.push(make("p", {}, make("button", { type: "button", onclick: () => goBack(job.before), "aria-label": `Undo learning ${titleOf(job)}` }, "Undo")));
  }
  return parts;
}

function describeReport(report) {
  const took = `Took ${report.seconds < 10 ? report.seconds.toFixed(1) : Math.round(report.seconds)} s.`;
  const error = report.calibration_error === null ? "" : ` Probabilities are off by ${percent(report.calibration_error)} on average (on images held out).`;
  const parts = [make("p", { class: "muted" }, took + error)];
  if (!report.retention.length) {
    parts.push(make("p", {}, "What was known before is not at risk of being taken for what is new."));
    return parts;
  }
  parts.push(make("p", {}, "May now be mistaken, by what is kept of the old classes:"));
  parts.push(make("ul", { class: "risks" }, ...report.retention.slice(0, 6).map((risk) => make("li", {}, make("b", {}, risk.old), " taken for ", make("b", {}, risk.new), `: ${percent(risk.share)} of its images`))));
  return parts;
}

async function giveUp(job) {
  try {
    await ask(`api/jobs/${job.id}`, { method: "DELETE" });
  } catch (problem) {
    find("teach-error").textContent = problem.message;
  }
  nudge();
}

async function goBack(to) {
  find("history-status").textContent = `Going back to version ${to} …`;
  try {
    const job = await ask("api/rollback", { method: "POST", body: JSON.stringify({ to }), headers: { "Content-Type": "application/json" } });
    announced.set(job.id, "");
  } catch (problem) {
    find("history-status").textContent = problem.message;
    find("teach-error").textContent = problem.message;
  }
  nudge();
}

// History and figures ------------------------------------------------------------------------------------------------

async function showHistory() {
  const versions = (await ask("api/history")).versions;
  find("versions").replaceChildren(...versions.map((version) => {
    const goneBack = version.what === "rolled back"; // the note says to which version
    const what = [version.what, goneBack ? version.note : listed(version.classes, 6)].filter(Boolean).join(" ");
    const about = [version.images ? count(version.images, "image") : null, `${count(version.known, "class")} known`, when(version.when), goneBack ? null : version.note || null].filter(Boolean).join(" · ");
    const text = make("div", {}, make("h3", {}, `${version.number}. ${what} `, version.current ? make("span", { class: "current" }, "answers now") : null), make("p", { class: "muted" }, about));
    const back = version.current ? null : make("button", { type: "button", onclick: () => goBack(version.number) }, `Go back to version ${version.number}`);
    return make("li", {}, text, back);
  }));
}

async function showAccuracy() {
  const place = find("accuracy");
  const found = await ask("api/accuracy");
  find("accuracy-note").textContent = found.note;
  if (!found.rows.length) {
    place.replaceChildren();
    return;
  }
  const head = make("thead", {}, make("tr", {}, make("td"), ...found.steps.map((step) => make("th", { scope: "col" }, `version ${step}`))));
  const cell = (value) => {
    if (value === null) return make("td", { class: "none" });
    const element = make("td", {}, value.text);
    element.style.background = value.background;
    element.style.color = value.ink;
    return element;
  };
  const body = make("tbody", {}, ...found.rows.map((row) => make("tr", {}, make("th", { scope: "row", title: row.name }, row.name), ...row.cells.map(cell))));
  const foot = make("tfoot", {}, make("tr", {}, make("th", { scope: "row" }, "Average"), ...found.averages.map((value) => make("td", {}, value))));
  const table = make("table", { class: "matrix" }, head, body, foot);
  place.replaceChildren(make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Accuracy matrix" }, table));
}

async function showPrompts() {
  const found = await ask("api/prompts");
  find("prompts-note").textContent = found.note;
  find("prompts").replaceChildren(...found.figures.map((figure) => make("figure", {}, drawing(figure.svg), make("figcaption", {}, figure.caption))));
}

// A figure's styles are set one by one: the page's policy refuses them as attributes.
function drawing(text) {
  const svg = document.adoptNode(new DOMParser().parseFromString(text, "text/html").querySelector("svg"));
  for (const element of svg.querySelectorAll("[data-style]")) element.style.cssText = element.dataset.style;
  return svg;
}

// What people do -----------------------------------------------------------------------------------------------------

function receiveDrops(zone, take) {
  zone.addEventListener("dragover", (event) => { event.preventDefault(); zone.classList.add("over"); });
  zone.addEventListener("dragleave", () => zone.classList.remove("over"));
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    event.stopPropagation();
    zone.classList.remove("over");
    take(event.dataTransfer.files);
  });
}

function pasted(event) {
  const files = images(event.clipboardData?.files || []);
  if (!files.length) return; // text goes where it was meant to
  event.preventDefault();
  const lesson = document.activeElement?.closest?.(".lesson");
  if (lesson) addImages(lesson, files);
  else classify(files);
}

function begin() {
  takeToken();
  addLesson();
  receiveDrops(find("classify-drop"), classify);
  for (const name of ["dragover", "drop"]) window.addEventListener(name, (event) => event.preventDefault()); // a miss must not leave the page
  document.addEventListener("paste", pasted);
  find("classify-choose").addEventListener("click", () => find("classify-files").click());
  find("classify-files").addEventListener("change", (event) => { classify(event.target.files); event.target.value = ""; });
  find("results-clear").addEventListener("click", clearResults);
  find("lesson-add").addEventListener("click", () => addLesson().querySelector(".name").focus());
  find("teach-form").addEventListener("submit", (event) => { event.preventDefault(); teach(); });
  find("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(TOKEN, find("token").value.trim());
    find("token").value = "";
    find("token-form").hidden = true;
    find("lessons").querySelector(".name")?.focus();
    nudge();
  });
  window.addEventListener("hashchange", takeToken);
  document.addEventListener("visibilitychange", () => nudge());
  if (!sessionStorage.getItem(TOKEN)) find("token-form").hidden = false;
  watch();
}

begin();
