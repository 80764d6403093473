// A client of the crowd in JavaScript: reads "PATH<tab>JSON" lines, posts each JSON to the server at $ART, and prints the replies.
import { createInterface } from "node:readline";

for await (const line of createInterface({ input: process.stdin })) {
  const [path, body] = line.split("\t");
  const headers = { "content-type": "application/json", authorization: `Bearer ${process.env.KEY}` };
  const reply = await fetch(process.env.ART + path, { method: "POST", headers, body });
  if (!reply.ok) throw new Error(await reply.text());
  console.log((await reply.text()).replaceAll("\n", " "));
}
