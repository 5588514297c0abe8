// Traffic VLM in the browser: encode a picture once, ask about it as often as you like.
//
//   const model = await TrafficVLM.load((done, total) => console.log(done / total));
//   const image = await model.encode(await createImageBitmap(file));
//   const item = await model.ask(image, "Is there a bus?");   // {answer: "yes", score: 0.97, p_yes: 0.97, ...}
//
// ONNX Runtime runs the graphs, Hugging Face's library the tokenizer. The Python modules of the pipeline decide what a
// question asks for, which words can follow in an answer, and when it is yes (traffic_vlm/export/asking.py).

const PINNED = new URL("pinned/", import.meta.url);
// Weights are stored in fewer bits. ONNX Runtime turns them into float32 once, on loading, not for each question.
const EXPANDED = { session: { disable_quant_qdq: "1" } };

export class TrafficVLM {
  /** Download and start everything. onProgress(done, total) gets numbers of bytes. */
  static async load(onProgress = () => {}) {
    const model = new TrafficVLM();
    model.page = await (await get(new URL("page.json", import.meta.url))).json();
    model.about = model.page.model;
    model.runtime = (await hasGPU()) ? "webgpu" : "wasm";
    const { files } = model.page;
    const wanted = { ...files.model, ...files.tokenizers, ...files.python, ...files[model.runtime] };
    const contents = await download(wanted, onProgress);
    const read = (ending) => contents[Object.keys(wanted).find((path) => path.endsWith(ending))];
    await Promise.all([model.#startGraphs(read), model.#startQuestions(read)]);
    return model;
  }

  async #startGraphs(read) {
    const [library] = Object.keys(this.page.files[this.runtime]);
    this.ort = await import(new URL(library, PINNED));
    const { wasm } = this.ort.env;
    wasm.wasmPaths = new URL(".", new URL(library, PINNED)).href;
    wasm.wasmBinary = read(this.runtime === "webgpu" ? "asyncify.wasm" : "threaded.wasm");
    this.threads = wasm.numThreads = self.crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency) : 1;
    const start = (name, provider = "wasm") =>
      this.ort.InferenceSession.create(new Uint8Array(read(`/${name}.onnx`)), {
        executionProviders: [provider],
        extra: EXPANDED,
      });
    this.pixels = await start("pixels");
    this.decoder = await start("decode"); // a few tokens: too little work for a GPU
    this.vision = await start("vision", this.runtime).catch(() => {
      this.runtime = "wasm"; // a GPU that lacks something
      return start("vision");
    });
  }

  async #startQuestions(read) {
    const [[tokenizers], [python]] = [this.page.files.tokenizers, this.page.files.python].map(Object.keys);
    const { Tokenizer } = await import(new URL(tokenizers, PINNED));
    const content = JSON.parse(new TextDecoder().decode(read("/tokenizer.json")));
    this.tokenizer = new Tokenizer(content, { clean_up_tokenization_spaces: false });
    const { loadPyodide } = await import(new URL(python, PINNED));
    const interpreter = await loadPyodide();
    interpreter.unpackArchive(read("/rules.zip"), "zip");
    const { Asking } = interpreter.pyimport("traffic_vlm.export.asking");
    const vocabulary = Object.fromEntries(this.tokenizer.get_vocab());
    this.asking = Asking(JSON.stringify(this.page), (text) => this.#tokenize(text), JSON.stringify(vocabulary));
  }

  /** JSON of [id, token, word] for each token. */
  #tokenize(text) {
    const { ids, tokens } = this.tokenizer.encode(text, { add_special_tokens: false });
    const words = this.tokenizer.pre_tokenizer(this.tokenizer.normalizer(text));
    return JSON.stringify(ids.map((id, i) => [id, tokens[i], words[i]]));
  }

  /** Encode a bitmap or canvas. Throws a RangeError if it has too many pixels. */
  async encode(picture) {
    const { width, height } = picture;
    if (width * height > this.page.max_pixels) {
      const [size, most] = [width * height, this.page.max_pixels].map((pixels) => (pixels / 1e6).toFixed(0));
      throw new RangeError(`has ${size} megapixels; at most ${most} are read.`);
    }
    const canvas = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
    canvas.fillStyle = "white"; // behind transparent pixels
    canvas.fillRect(0, 0, width, height);
    canvas.drawImage(picture, 0, 0);
    const { data } = canvas.getImageData(0, 0, width, height);
    const image = new this.ort.Tensor("uint8", new Uint8Array(data.buffer), [height, width, 4]);
    const { image_keys, image_values } = await this.vision.run(await this.pixels.run({ image }));
    return { image_keys, image_values };
  }

  /**
   * Answer a question about an encoded image: the item of the pipeline, with `text`, `notes` and `strength` to show,
   * and `words`, each with its attention map; the first is what the question asks about.
   */
  async ask(image, text) {
    let question = this.asking.read(text);
    try {
      if (question.problem) return JSON.parse(this.asking.in_words(question, "", 0));
      const ids = question.input_ids.toJs();
      const first = await this.#step(image, ids);
      const answers = [];
      for (const check of JSON.parse(this.asking.checks(question))) {
        answers.push((await this.#step(image, check)).p_yes.data[0] >= 0.5);
      }
      if (answers.length) {
        const agreeing = this.asking.agreeing(question, JSON.stringify(answers));
        question.destroy();
        question = agreeing;
      }
      const json = question.is_yes_no
        ? this.asking.yes_or_no(question, first.p_yes.data[0])
        : this.asking.in_words(question, ...(await this.#generate(image, question, ids.length, first)));
      return { ...JSON.parse(json), words: this.#words(question, first.maps) };
    } finally {
      question.destroy();
    }
  }

  #step(image, ids, past) {
    const [keys, values] = this.about.cache_shape.slice(1);
    const empty = (width) => {
      const shape = [this.about.layers, 1, this.about.cache_shape[0], 0, width];
      return new this.ort.Tensor("float32", new Float32Array(0), shape);
    };
    return this.decoder.run({
      ...image,
      input_ids: new this.ort.Tensor("int64", BigInt64Array.from(ids, BigInt), [1, ids.length]),
      past_keys: past?.keys ?? empty(keys),
      past_values: past?.values ?? empty(values),
    });
  }

  /** The likeliest answer in words, token by token, and the geometric mean of the probabilities of its tokens. */
  async #generate(image, question, length, step) {
    const { end, max_new_tokens, max_tokens } = this.about;
    const answer = [];
    let total = 0;
    while (answer.at(-1) !== end && answer.length < Math.min(max_new_tokens, max_tokens - length)) {
      if (answer.length) step = await this.#step(image, answer.slice(-1), step);
      const logProbs = step.log_probs.data;
      const allowed = JSON.parse(this.asking.next_ids(question, JSON.stringify(answer)));
      answer.push(allowed.reduce((best, id) => (logProbs[id] > logProbs[best] ? id : best)));
      total += logProbs[answer.at(-1)];
    }
    const words = answer.filter((id) => id !== end);
    return [words.length ? this.tokenizer.decode(words) : "", Math.exp(total / answer.length)];
  }

  /** Words of a question, each with its map, which sums to 1. */
  #words(question, maps) {
    const size = maps.dims[2];
    return JSON.parse(this.asking.words(question)).map(([column, word]) => ({
      word,
      map: maps.data.slice(column * size, (column + 1) * size),
    }));
  }
}

async function hasGPU() {
  const adapter = await navigator.gpu?.requestAdapter().catch(() => null);
  return Boolean(adapter) && !adapter.info?.isFallbackAdapter;
}

async function get(url) {
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${url.pathname} is missing on the server (${response.status}).`);
  return response;
}

/** The contents of files {path: bytes}, as {path: ArrayBuffer}. */
async function download(files, onProgress) {
  const total = Object.values(files).reduce((sum, size) => sum + size);
  let done = 0;
  const fetchOne = async (path) => {
    const response = await get(new URL(path, PINNED));
    const content = new Uint8Array(files[path]);
    let place = 0;
    for (const reader = response.body.getReader(); ; ) {
      const { value } = await reader.read();
      if (!value) break;
      if (place + value.length <= content.length) content.set(value, place);
      place += value.length;
      onProgress((done += value.length), total);
    }
    if (place !== content.length) {
      await (await self.caches?.open("traffic-vlm"))?.delete(response.url); // so that the next visit asks again
      throw new Error(`${path} has ${place} bytes instead of ${content.length}`);
    }
    return [path, content.buffer];
  };
  return Object.fromEntries(await Promise.all(Object.keys(files).map(fetchOne)));
}
