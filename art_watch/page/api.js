// Requests to the server, with the API key if one was entered, and its stream of changes.

const KEY = "art-key";
const SILENCE_SECONDS = 25; // the server writes every ten
const LONGEST_WAIT_SECONDS = 15;

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

async function request(path, { type, ...options } = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...(key && { authorization: `Bearer ${key}` }), ...(type && { "content-type": type }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.");
  }
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new ApiError(response.status, body?.error?.message ?? body?.detail?.[0]?.msg ?? `The server answered ${response.status}.`);
  }
  return response;
}

// The JSON under a path whose parts and parameters are given as they are.
export async function get(parts, parameters = [], options = {}) {
  const query = new URLSearchParams(parameters).toString();
  const path = `api/${parts.map(encodeURIComponent).join("/")}${query ? `?${query}` : ""}`;
  return (await request(path, options)).json();
}

export const look = (parts, parameters) => get(["look", ...parts], parameters);
export const ofModel = (route, ...parts) => ["models", route.project, route.name, ...parts];
export const cancelJob = (id) => get(["jobs", id], [], { method: "DELETE" });

// Changes a model by one of its routes; `body` is sent as JSON.
export function change(route, method, part, body) {
  const content = body && { body: JSON.stringify(body), type: "application/json" };
  return get(ofModel(route, ...(part ? [part] : [])), [], { method, ...content });
}

// Calls `online` with each part of a streamed answer that ends with `end`.
async function readParts(response, end, onpart, onbytes = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    onbytes();
    const parts = (text + value).split(end);
    text = parts.pop();
    parts.forEach(onpart);
  }
}

// Follows the server's marks for ever: `onmarks(marks)` at each change, `onstate(error, seconds)` when the connection is
// lost (seconds until the next try) and when it is back (null). Rests while the page is hidden or a key is missing.
export class Changes {
  constructor(onmarks, onstate) {
    this.onmarks = onmarks;
    this.onstate = onstate;
    this.tries = 0;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
  }

  stop() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
  }

  async start() {
    this.stop();
    const abort = new AbortController();
    this.abort = abort;
    const watch = () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => abort.abort(), SILENCE_SECONDS * 1000);
    };
    try {
      watch();
      const response = await request("api/look/events", { signal: abort.signal });
      this.tries = 0;
      this.onstate(null);
      await readParts(response, "\n\n", (part) => {
        const data = part.split("\n").find((line) => line.startsWith("data: "));
        if (data) this.onmarks(JSON.parse(data.slice(6)));
      }, watch);
      throw new ApiError(0, "The server ended the connection.");
    } catch (error) {
      if (this.abort !== abort) return; // stopped, or started again
      if (error.status === 401 || error.status === 403) return this.onstate(error);
      const seconds = Math.min(LONGEST_WAIT_SECONDS, 2 ** this.tries++);
      this.onstate(new ApiError(0, "The server does not answer."), seconds);
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.start(), seconds * 1000);
    }
  }
}
