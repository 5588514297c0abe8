// The page: what people click on and see. The model is in traffic_vlm.js.

import { TrafficVLM } from "./traffic_vlm.js";

const HEAT = [255, 120, 0]; // the color of where a word looks
const FULL_HEAT = 8; // times the mean attention, from which the color is full
const LARGEST = 1280; // pixels of the longer side of the picture that is shown

const $ = (id) => document.getElementById(id);
const make = (tag, properties) => Object.assign(document.createElement(tag), properties);
const painted = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));

let model; // a TrafficVLM
let picture; // {image: encoded, milliseconds, shown: bitmap}
let turn = 0; // number of pictures chosen so far: answers about earlier ones are dropped
let times = []; // of the answers about this picture, in milliseconds
let work = Promise.resolve(); // the model does one thing at a time
const next = (job) => (work = work.catch(() => {}).then(job)); // also after one that failed
let questions = [
  "Is there a car?",
  "Is there a pedestrian?",
  "What color is the traffic light?",
  "What is the speed limit?",
  "What time of day is it?",
];

async function start() {
  if (typeof WebAssembly !== "object") {
    throw new Error("this browser has no WebAssembly, which the model needs, or does not allow it.");
  }
  await installWorker();
  model = await TrafficVLM.load((done, total) => {
    if ($("progress").hidden) return; // it has failed
    Object.assign($("progress"), { value: done, max: total });
    const [loaded, all] = [done, total].map((bytes) => (bytes / 1e6).toFixed(0));
    $("status").textContent = done < total ? `Loading ${loaded} of ${all} MB …` : "Starting …";
  });
  $("progress").hidden = true;
  $("known").textContent = `${model.page.kinds.join(" ")} It knows these nouns: ${model.page.known_nouns.join(", ")}.`;
  for (const path of model.page.examples) {
    const button = make("button", { onclick: () => choose(() => fetch(path).then((file) => file.blob()), path) });
    button.append(make("img", { src: path, alt: `Example ${path.split(/[/.]/)[1]}` }));
    $("examples").append(button);
  }
  for (const id of ["file", "camera", "ask"]) $(id).disabled = false;
  $("status").textContent = "Open a picture.";
  $("examples").firstChild?.click();
  await forgetOldVersions();
}

/** Install the worker for offline use and threads, which browsers allow with https or on this computer. */
async function installWorker() {
  try {
    await navigator.serviceWorker.register("worker.js");
    await navigator.serviceWorker.ready;
    const isReady = self.crossOriginIsolated && navigator.serviceWorker.controller;
    if (isReady || sessionStorage.reloaded) return delete sessionStorage.reloaded;
    sessionStorage.reloaded = "once";
  } catch {
    return; // the page works without
  }
  location.reload(); // now the worker answers, with the headers that threads need
  await new Promise(() => {});
}

/** Delete cached folders that page.json does not name any more. */
async function forgetOldVersions() {
  const folders = Object.values(model.page.files).flatMap(Object.keys).map((path) => path.split("/")[0]);
  const cache = await self.caches?.open("traffic-vlm");
  for (const { url } of (await cache?.keys()) ?? []) {
    const [, folder] = url.match(/\/pinned\/([^/]+)/) ?? [];
    if (folder && !folders.includes(folder)) await cache.delete(url);
  }
}

/** Encode a picture, and answer all questions about it. `open` returns a file or a bitmap. */
function choose(open, name) {
  const current = ++turn;
  $("picture-problem").textContent = "";
  $("status").textContent = "Looking at the picture …";
  return next(async () => {
    await painted();
    try {
      const source = await open();
      stopCamera();
      const bitmap = source instanceof Blob ? await createImageBitmap(source).catch(() => null) : source;
      if (!bitmap) throw new Error("cannot be read as a picture by this browser.");
      const begin = performance.now();
      const image = await model.encode(bitmap);
      picture = { image, milliseconds: performance.now() - begin, shown: await scaled(bitmap) };
      times = [];
      show();
      $("answers").replaceChildren(...questions.map((question) => answerLater(question, current)));
      suggest();
    } catch (error) {
      $("picture-problem").textContent = `${name} ${error.message}`;
      for (const row of document.querySelectorAll("#answers li:not([data-item])")) {
        row.replaceWith(answerLater(row.querySelector(".question").textContent)); // the picture before stays
      }
      say();
    }
  });
}

function scaled(bitmap) {
  const scale = Math.min(1, LARGEST / Math.max(bitmap.width, bitmap.height));
  const [resizeWidth, resizeHeight] = [bitmap.width, bitmap.height].map((side) => Math.ceil(side * scale));
  return createImageBitmap(bitmap, { resizeWidth, resizeHeight, resizeQuality: "high" });
}

/** Draw the picture, under the attention map of a word if one is given. */
function show(caption = "", map = null, strength = 1) {
  const { width, height } = picture.shown;
  const context = Object.assign($("canvas"), { width, height }).getContext("2d");
  context.fillStyle = "white"; // behind transparent pixels
  context.fillRect(0, 0, width, height);
  context.drawImage(picture.shown, 0, 0);
  $("caption").textContent = caption;
  if (!map) return;
  const [rows, columns] = model.page.grid;
  const heat = new ImageData(columns, rows);
  map.forEach((weight, i) => {
    const share = (weight * map.length - 1) / (FULL_HEAT - 1);
    heat.data.set([...HEAT, 190 * strength * Math.min(1, Math.max(0, share))], 4 * i);
  });
  const small = new OffscreenCanvas(columns, rows);
  small.getContext("2d").putImageData(heat, 0, 0);
  context.imageSmoothingQuality = "high";
  context.drawImage(small, 0, 0, width, height);
}

async function useCamera() {
  const video = $("video");
  if (!video.hidden) return choose(() => createImageBitmap(video), "The camera's picture");
  $("picture-problem").textContent = "";
  try {
    video.srcObject = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    await video.play();
    video.hidden = false;
    $("camera").textContent = "Take picture";
  } catch (error) {
    $("picture-problem").textContent = `The camera cannot be used: ${error.message}`;
  }
}

function stopCamera() {
  $("video").srcObject?.getTracks().forEach((track) => track.stop());
  $("video").hidden = true;
  $("camera").textContent = "Camera";
}

/** A row for a question, which is answered when its turn comes. */
function answerLater(question, current = turn) {
  const row = $("row").content.firstElementChild.cloneNode(true);
  row.querySelector(".question").textContent = question;
  row.querySelector(".remove").onclick = () => {
    questions = questions.filter((one) => one !== question);
    row.remove();
  };
  next(async () => {
    await painted();
    if (current !== turn || !row.isConnected) return;
    const begin = performance.now();
    const item = await model.ask(picture.image, question);
    times.push(performance.now() - begin);
    fill(row, item);
    if (row === $("answers").firstChild) row.querySelector("mark")?.click();
    say();
  });
  return row;
}

function ask(text) {
  $("question-problem").textContent = text ? "" : "Write a question first.";
  if (!text || !picture) return;
  const index = questions.indexOf(text);
  if (index >= 0) $("answers").children[index].remove();
  questions = [text, ...questions.filter((question) => question !== text)];
  $("answers").prepend(answerLater(text));
  $("question").value = "";
  suggest();
}

/** Offer the example of each kind of question that is not in the list. */
function suggest() {
  const others = model.page.kinds.filter((question) => !questions.includes(question));
  const chips = others.map((question) => make("button", { textContent: question, onclick: () => ask(question) }));
  $("suggested").replaceChildren(...chips);
}

/** Write into a row: the answer with its probability, notes, and the words of the question that have a map. */
function fill(row, item) {
  row.dataset.item = JSON.stringify({ ...item, words: undefined });
  const [text, meter, score] = row.querySelector(".answer").children;
  text.textContent = item.score === null ? item.text : item.text.replace(/, [\d.]+$/, "");
  if (item.score === null) text.className = "problem";
  else Object.assign(meter, { value: item.score, hidden: false });
  score.textContent = item.score?.toFixed(2) ?? "";
  row.append(...item.notes.map((note) => make("small", { textContent: note })));
  if (!item.words?.length) return;
  const marks = item.words.map(({ word, map }) => {
    const mark = make("mark", { textContent: word, tabIndex: 0, role: "button" });
    mark.onkeydown = ({ key }) => key === "Enter" && mark.click();
    mark.onclick = () => {
      const isOn = mark.classList.contains("on");
      document.querySelector("mark.on")?.classList.remove("on");
      if (isOn) return show();
      mark.classList.add("on");
      const faded = item.strength < 1 ? " Faded, as probably nothing is there." : "";
      show(`${item.question} ${item.text}. Orange: where “${word}” looks.${faded}`, map, item.strength);
    };
    return mark;
  });
  row.querySelector(".words").append("Where it looked:", ...marks);
}

/** Show how fast the model is, and on what it runs. */
function say() {
  const median = times.toSorted((a, b) => a - b)[times.length >> 1];
  const parts = picture ? [`Picture encoded in ${picture.milliseconds.toFixed(0)} ms`] : [];
  if (median) parts.push(`a question answered in ${median.toFixed(0)} ms`);
  parts.push(model.runtime === "webgpu" ? "on the GPU" : `on ${model.threads} thread${model.threads > 1 ? "s" : ""}`);
  $("status").textContent = parts.join(", ") + (navigator.serviceWorker?.controller ? ". Works offline." : ".");
}

function useFile(file) {
  if (file && model) choose(() => file, file.name);
}

$("file").onchange = ({ target }) => {
  useFile(target.files[0]);
  target.value = ""; // so that the same file can be chosen again
};
$("camera").onclick = useCamera;
document.querySelector("form").onsubmit = (event) => {
  event.preventDefault();
  ask($("question").value.trim());
};
document.ondragover = (event) => event.preventDefault();
document.ondrop = (event) => {
  event.preventDefault();
  useFile(event.dataTransfer.files[0]);
};
start().catch((error) => {
  $("progress").hidden = true;
  $("status").className = "problem";
  $("status").textContent = `The page cannot start: ${error.message}`;
});
