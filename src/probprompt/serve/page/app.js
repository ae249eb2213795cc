// The page. It shows all content as text, never as markup.
const TOKEN = "probprompt-token";
const BUSY = 700, IDLE = 5000; // milliseconds between updates
const LISTED_JOBS = 5;
const CHUNK = 8; // images per request, so that the first results appear early

const find = (id) => document.getElementById(id);
let model = null;
let jobs = [];
let drawn = null; // the version whose history and figures are on the page

// Helpers ------------------------------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") element.addEventListener("click", value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const percent = (share) => (share > 0 && share < 0.01 ? "< 1%" : share >= 0.995 && share < 1 ? "> 99%" : `${Math.round(100 * share)}%`);
const count = (number, thing) => `${number} ${thing}${number === 1 ? "" : thing.endsWith("s") ? "es" : "s"}`;
const join = (names, most = 4) => (names.length <= most ? names.join(", ") : `${names.slice(0, most).join(", ")} and ${names.length - most} more`);
const when = (iso) => new Date(iso).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
const normalize = (name) => name.normalize("NFC").trim().toLowerCase();
const images = (files) => [...files].filter((file) => file.type.startsWith("image/") || !file.type);
const NO_IMAGE = "None of these files is an image.";

function followHash() {
  if (location.hash === "#diagnostics") find("details").open = true;
  const match = location.hash.match(/^#token=(.+)$/);
  if (!match) return;
  sessionStorage.setItem(TOKEN, decodeURIComponent(match[1]));
  history.replaceState(null, "", location.pathname + location.search); // keep the token out of the address bar
}

class RequestError extends Error {}

async function request(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    find("connection").textContent = "not connected";
    throw new RequestError("The service does not respond. Check that it is still running.");
  }
  find("connection").textContent = "";
  const content = await response.json().catch(() => ({}));
  if (response.ok) return content;
  if (response.status === 401) showTokenForm();
  throw new RequestError(content.error || `The service returned status ${response.status}.`);
}

// Model --------------------------------------------------------------------------------------------------------------

function showModel() {
  const classes = model.classes.length;
  const name = classes ? `Image classifier: ${join(model.classes, 6)}` : "Image classifier";
  find("title").textContent = name;
  document.title = `${name} – probprompt`;
  find("summary").textContent = classes
    ? "Drop a photo below to see which of these it shows, or teach the model a new class."
    : "No classes yet. Add two classes with at least 10 photos each to start.";
  const measured = model.accuracy !== null;
  find("score").hidden = classes < 2;
  find("accuracy-value").textContent = measured ? `${model.accuracy.toFixed(1)}%` : "—";
  find("accuracy-images").textContent = measured ? `of ${count(model.held_out_images, "image")}` : "not measured; see Diagnostics";
  find("guess-value").textContent = classes ? `${model.random_guess.toFixed(1)}%` : "";
  find("guess-classes").textContent = `1 of ${classes} classes`;
  find("version").textContent = classes
    ? `Version ${model.version}, trained in ${count(model.tasks, "lesson")} (backbone: ${model.backbone}). It stores features and statistics, not the training images.`
    : "";
  find("known").hidden = classes <= 6;
  find("known-count").textContent = `All ${classes} classes`;
  find("known-list").replaceChildren(...model.classes.map((each) => make("li", {}, each)));
  for (const lesson of document.querySelectorAll(".lesson")) showExisting(lesson);
}

async function refresh() {
  const before = JSON.stringify(model);
  model = await request("api/model");
  jobs = (await request("api/jobs")).jobs;
  if (JSON.stringify(model) !== before) showModel();
  showJobs();
  if (drawn !== model.version) {
    drawn = model.version;
    for (const show of [showHistory, showAccuracy, showPrompts]) show().catch(() => { drawn = null; }); // try again later
  }
}

async function watch() {
  for (;;) {
    try {
      if (!document.hidden || model === null) await refresh();
    } catch (problem) {
      if (model === null) {
        find("title").textContent = "Not connected";
        find("summary").textContent = problem.message;
      }
    }
    const busy = jobs.some((job) => job.state === "waiting" || job.state === "running");
    await new Promise((resolve) => { update = resolve; setTimeout(resolve, busy ? BUSY : IDLE); });
  }
}
let update = () => {};

// Classify -----------------------------------------------------------------------------------------------------------

async function classify(files) {
  const chosen = images(files);
  if (!chosen.length) {
    find("classify-status").textContent = NO_IMAGE;
    return;
  }
  const entries = chosen.map((file) => ({ file, item: makeResult(file) }));
  find("results").prepend(...entries.map((entry) => entry.item));
  find("results-clear").hidden = false;
  find("classify-status").textContent = `Classifying ${count(entries.length, "image")} …`;
  const messages = [];
  for (let start = 0; start < entries.length; start += CHUNK) messages.push(...(await classifySome(entries.slice(start, start + CHUNK))));
  find("classify-status").textContent = messages.length <= 3 ? messages.join("; ") : `Classified ${count(messages.length, "image")}.`;
}

async function classifySome(entries) {
  const form = new FormData();
  for (const { file } of entries) form.append("images", file, file.name);
  try {
    const { predictions } = await request("api/predict?top_k=3", { method: "POST", body: form });
    return predictions.map((prediction, index) => fill(entries[index].item, prediction));
  } catch (problem) {
    for (const { item } of entries) fill(item, { error: problem.message });
    return [problem.message];
  }
}

function makeResult(file) {
  const image = make("img", { alt: "" });
  image.src = URL.createObjectURL(file);
  image.addEventListener("error", () => image.classList.add("broken"));
  const name = file.name || "pasted image";
  return make("li", { class: "result" }, image, make("div", {}, make("p", { class: "from", title: name }, name), make("h3", {}, "…")));
}

function fill(item, prediction) {
  const body = item.lastElementChild, name = body.firstElementChild;
  if (prediction.error) {
    body.replaceChildren(name, make("h3", {}, "Not classified"), make("p", { class: "error" }, prediction.error));
    return `${name.textContent}: ${prediction.error}`;
  }
  const bars = make("ul", { class: "bars" }, ...prediction.top.map((entry) => {
    const bar = make("i");
    bar.style.width = `${100 * entry.probability}%`;
    return make("li", {}, make("span", { class: "name", title: entry.label }, entry.label), make("span", {}, percent(entry.probability)), make("span", { class: "bar", "aria-hidden": "true" }, bar));
  }));
  item.classList.toggle("faded", prediction.unknown);
  const heading = prediction.unknown
    ? [make("h3", {}, make("span", { class: "badge" }, "Unknown")), make("p", { class: "hint" }, "Closest classes:")]
    : [make("h3", {}, prediction.label)];
  body.replaceChildren(name, ...heading, bars);
  return `${name.textContent}: ${prediction.unknown ? "unknown" : `${prediction.label}, ${percent(prediction.probability)}`}`;
}

function clearResults() {
  for (const image of find("results").querySelectorAll("img")) URL.revokeObjectURL(image.src);
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
  const name = lesson.querySelector(".name"), files = lesson.querySelector(".file");
  name.id = `name-${++lessonNumber}`;
  lesson.querySelector(".field label").htmlFor = name.id;
  lesson.querySelector(".choose").addEventListener("click", () => files.click());
  chosenFiles.set(lesson, []);
  name.addEventListener("input", () => showExisting(lesson));
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
  const chosen = chosenFiles.get(lesson);
  for (const file of images(files)) {
    chosen.push(file);
    const image = make("img", { alt: file.name || "pasted image" });
    image.src = URL.createObjectURL(file);
    lesson.querySelector(".thumbs").append(make("li", {}, image));
  }
  lesson.querySelector(".count").textContent = chosen.length ? count(chosen.length, "image") : NO_IMAGE;
}

function showExisting(lesson) {
  const hint = lesson.querySelector(".known");
  const name = lesson.querySelector(".name").value;
  const existing = model && model.classes.find((each) => normalize(each) === normalize(name));
  const unchanged = hint.querySelector("input") !== null && hint.dataset.name === existing;
  hint.hidden = !existing;
  lesson.querySelector("legend").textContent = existing ? "Existing class" : "New class";
  if (!existing || unchanged) return;
  hint.dataset.name = existing;
  const box = make("input", { type: "checkbox", class: "refine" });
  hint.replaceChildren(make("label", { class: "choice" }, box, `“${existing}” already exists. Add these images to it.`));
}

function teachForm() {
  const form = new FormData();
  let refine = false;
  [...document.querySelectorAll(".lesson")].forEach((lesson, index) => {
    const field = lesson.querySelector(".name"), name = field.value.trim(), chosen = chosenFiles.get(lesson);
    const fail = (element, message) => { element.focus(); throw new RequestError(message); };
    if (!name) fail(field, "Enter a name for the class.");
    if (!chosen.length) fail(lesson.querySelector(".choose"), `Choose images of “${name}”.`);
    const box = lesson.querySelector(".known:not([hidden]) .refine");
    if (box && !box.checked) fail(box, `“${name}” already exists. Check the box to add images to it, or enter another name.`);
    refine ||= Boolean(box);
    form.append("names", name);
    for (const file of chosen) {
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
    const job = await request("api/teach", { method: "POST", body: form });
    find("lessons").replaceChildren();
    addLesson();
    announced.set(job.id, "");
    find("teach-status").textContent = `Accepted ${titleOf(job)}.`;
  } catch (problem) {
    find("teach-status").textContent = "";
    find("teach-error").textContent = problem.message;
  } finally {
    button.disabled = false;
    update();
  }
}

function showTokenForm() {
  const wrong = sessionStorage.getItem(TOKEN) !== null;
  sessionStorage.removeItem(TOKEN);
  find("token-form").hidden = false;
  find("token-error").textContent = wrong ? "Wrong token. Copy it from the terminal." : "";
}

// Jobs ---------------------------------------------------------------------------------------------------------------

const announced = new Map(); // the last announced state of each job that this page started
const STATES = { waiting: "queued", running: "training", done: "learned", failed: "failed", cancelled: "canceled" };

function showJobs() {
  const listed = jobs.filter((job) => job.kind === "teach" || job.state !== "done").slice(0, LISTED_JOBS);
  const list = find("jobs");
  const present = new Map([...list.children].map((item) => [item.dataset.id, item]));
  const items = listed.map((job) => {
    const key = JSON.stringify([{ ...job, progress: null }, job.version === model.version]);
    let item = present.get(String(job.id));
    if (!item || item.dataset.key !== key) {
      if (item && item.contains(document.activeElement)) queueMicrotask(() => find("teach").focus({ preventScroll: true }));
      item = make("li", { "data-id": job.id, "data-key": key }, ...describe(job));
    }
    const bar = item.querySelector("progress");
    if (bar && job.progress) {
      bar.max = job.progress.total;
      bar.value = job.progress.done;
      item.querySelector(".stage").textContent = `${job.progress.stage}, ${Math.round((100 * job.progress.done) / job.progress.total)}%`;
    }
    announce(job);
    return item;
  });
  if (items.length !== list.children.length || items.some((item, index) => list.children[index] !== item)) list.replaceChildren(...items);
}

function announce(job) {
  if (!announced.has(job.id) || announced.get(job.id) === job.state) return;
  announced.set(job.id, job.state);
  const taught = job.kind === "teach";
  if (job.state === "done") find(taught ? "teach-status" : "history-status").textContent =
    taught ? `Learned ${titleOf(job)}. Version ${job.version} is current.` : `Rolled back to version ${job.to}, now version ${job.version}.`;
  if (job.state === "failed") find("teach-status").textContent = `${titleOf(job)}: ${job.error}`;
}

const titleOf = (job) => (job.kind === "teach" ? join(job.classes.map((taught) => taught.name)) : `Rollback to version ${job.to}`);

function describe(job) {
  const total = job.classes.reduce((sum, taught) => sum + taught.images, 0);
  const state = job.kind === "rollback" && job.state === "running" ? "running" : job.refine && job.state === "done" ? "images added" : STATES[job.state];
  const parts = [make("h3", {}, `${titleOf(job)} `, make("span", { class: "muted" }, `– ${state}`))];
  if (job.kind === "teach") parts.push(make("p", { class: "muted" }, `${count(total, "image")}, ${when(job.created)}`));
  if (job.error) parts.push(make("p", { class: "error" }, job.error));
  for (const warning of job.warnings) parts.push(make("p", { class: "hint" }, warning));
  const training = job.state === "running" && job.kind === "teach";
  if (training) parts.push(make("progress", { "aria-label": `Training ${titleOf(job)}` }), make("p", { class: "stage muted" }, "starting"));
  if (job.state === "waiting" || training) parts.push(make("p", {}, make("button", { type: "button", class: "quiet", onclick: () => cancel(job) }, "Cancel")));
  if (job.report) parts.push(...describeReport(job));
  if (job.kind === "teach" && job.state === "done" && job.version === model.version && job.before) {
    parts.push(make("p", {}, make("button", { type: "button", onclick: () => rollBack(job.before), "aria-label": `Undo learning ${titleOf(job)}` }, "Undo")));
  }
  return parts;
}

function describeReport({ report, refine }) {
  const seconds = `Trained in ${report.seconds < 10 ? report.seconds.toFixed(1) : Math.round(report.seconds)} s.`;
  const error = report.calibration_error === null ? "" : ` Calibration error: ${percent(report.calibration_error)} on held-out images.`;
  const parts = [make("p", { class: "muted" }, seconds + error)];
  if (report.retention.length) {
    parts.push(make("p", {}, "Possible confusions, estimated from stored features of held-out images:"));
    parts.push(make("ul", { class: "risks" }, ...report.retention.slice(0, 6).map((risk) => make("li", {}, `About ${percent(risk.share)} of `, make("b", {}, risk.old), " images may be classified as ", make("b", {}, risk.new), "."))));
  } else if (!refine) parts.push(make("p", {}, "No likely confusions with earlier classes."));
  return parts;
}

async function cancel(job) {
  try {
    await request(`api/jobs/${job.id}`, { method: "DELETE" });
  } catch (problem) {
    find("teach-error").textContent = problem.message;
  }
  update();
}

async function rollBack(to) {
  find("history-status").textContent = `Rolling back to version ${to} …`;
  try {
    const job = await request("api/rollback", { method: "POST", body: JSON.stringify({ to }), headers: { "Content-Type": "application/json" } });
    announced.set(job.id, "");
  } catch (problem) {
    for (const id of ["history-status", "teach-error"]) find(id).textContent = problem.message;
  }
  update();
}

// History and diagnostics --------------------------------------------------------------------------------------------

async function showHistory() {
  const { versions } = await request("api/history");
  find("versions").replaceChildren(...versions.map((version) => {
    const rollback = version.what === "rolled back"; // the note says to which version
    const title = [version.what, rollback ? version.note : join(version.classes, 6)].filter(Boolean).join(" ");
    const about = [version.images ? count(version.images, "image") : null, `${count(version.known, "class")} in total`, when(version.when), rollback ? null : version.note || null].filter(Boolean).join(" · ");
    const text = make("div", {}, make("h3", {}, `${version.number}. ${title} `, version.current ? make("span", { class: "current" }, "current") : null), make("p", { class: "muted" }, about));
    const back = version.current ? null : make("button", { type: "button", onclick: () => rollBack(version.number) }, `Roll back to version ${version.number}`);
    return make("li", {}, text, back);
  }));
}

async function showAccuracy() {
  const { note, steps, rows, averages } = await request("api/accuracy");
  find("accuracy-note").textContent = note;
  if (!rows.length) {
    find("accuracy").replaceChildren();
    return;
  }
  const head = make("thead", {}, make("tr", {}, make("td"), ...steps.map((step) => make("th", { scope: "col" }, `version ${step}`))));
  const cell = (value) => {
    if (value === null) return make("td", { class: "none" });
    const element = make("td", {}, value.text);
    element.style.background = value.background;
    element.style.color = value.ink;
    return element;
  };
  const body = make("tbody", {}, ...rows.map((row) => make("tr", {}, make("th", { scope: "row", title: row.name }, row.name), ...row.cells.map(cell))));
  const foot = make("tfoot", {}, make("tr", {}, make("th", { scope: "row" }, "Average"), ...averages.map((value) => make("td", {}, value))));
  const table = make("table", { class: "matrix" }, head, body, foot);
  find("accuracy").replaceChildren(make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Accuracy matrix" }, table));
}

async function showPrompts() {
  const { note, figures } = await request("api/prompts");
  find("prompts-note").textContent = note;
  find("prompts").replaceChildren(...figures.map((figure) => make("figure", {}, draw(figure.svg), make("figcaption", {}, figure.caption))));
}

// Styles are set one by one, because the content security policy rejects style attributes.
function draw(text) {
  const svg = document.adoptNode(new DOMParser().parseFromString(text, "text/html").querySelector("svg"));
  for (const element of svg.querySelectorAll("[data-style]")) element.style.cssText = element.dataset.style;
  return svg;
}

// Events -------------------------------------------------------------------------------------------------------------

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

function paste(event) {
  const files = images(event.clipboardData?.files || []);
  if (!files.length) return; // pasted text goes into the field
  event.preventDefault();
  const lesson = document.activeElement?.closest?.(".lesson");
  if (lesson) addImages(lesson, files);
  else classify(files);
}

function start() {
  followHash();
  addLesson();
  receiveDrops(find("classify-drop"), classify);
  for (const name of ["dragover", "drop"]) window.addEventListener(name, (event) => event.preventDefault()); // a missed drop must not leave the page
  document.addEventListener("paste", paste);
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
    update();
  });
  window.addEventListener("hashchange", followHash);
  document.addEventListener("visibilitychange", () => update());
  if (!sessionStorage.getItem(TOKEN)) find("token-form").hidden = false;
  watch();
}

start();
