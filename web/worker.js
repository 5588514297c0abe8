// The service worker: makes the page work offline, and lets it use several threads on any file server.

const SHELL = ["./", "page.js", "traffic_vlm.js", "style.css", "page.json"];

self.onactivate = (event) => event.waitUntil(self.clients.claim());
self.oninstall = (event) => event.waitUntil(fill().then(() => self.skipWaiting()));
self.onfetch = (event) => {
  const { method, url } = event.request;
  if (method === "GET" && url.startsWith(self.registration.scope)) event.respondWith(answer(event).then(isolate));
};

async function fill() {
  const cache = await caches.open("traffic-vlm");
  await cache.addAll(SHELL);
}

/** Files under pinned/ never change, so they come from the cache; others come from the server if there is one. */
async function answer(event) {
  const { url } = event.request;
  const cache = await caches.open("traffic-vlm");
  const isPinned = url.includes("/pinned/");
  const kept = isPinned && (await cache.match(url));
  if (kept) return kept;
  try {
    const response = await fetch(event.request);
    if (response.status === 200) event.waitUntil(cache.put(url, response.clone()).catch(() => {})); // or the disk is full
    return response;
  } catch (error) {
    const older = await cache.match(url);
    if (older) return older;
    throw error;
  }
}

/** The response with the headers that browsers ask for before they allow threads. */
function isolate(response) {
  const headers = new Headers(response.headers);
  headers.set("Cross-Origin-Opener-Policy", "same-origin");
  headers.set("Cross-Origin-Embedder-Policy", "require-corp");
  return new Response(response.body, { status: response.status, statusText: response.statusText, headers });
}
