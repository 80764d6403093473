// Tags, notes and a price that people give a run, its name, and its deletion. A running server changes them.

import { change } from "./api.js";
import { button, el, hashOf } from "./dom.js";

// Tags and notes as text, with a button that opens the form. `changed` is called when the server has new ones.
export function aboutSection(route, about, canChange, isOpen, changed) {
  const tags = about.tags.map((tag) => el("span", { class: "badge" }, tag));
  return el("div", { class: "about" },
    tags.length > 0 && el("p", {}, tags),
    about.notes && el("p", { class: "text plain-text" }, about.notes),
    canChange && (isOpen() ? form(route, about, isOpen, changed) : button("Tags, notes, price, name", () => { isOpen(true); changed(); }, { id: "edit-about", class: "small" })));
}

function form(route, about, isOpen, changed) {
  const tags = el("input", { id: "tags", value: about.tags.join(", "), placeholder: "separated by commas" });
  const notes = el("textarea", { id: "notes", rows: 4 }, about.notes);
  const price = el("input", { id: "price", type: "number", min: 0, step: "any", value: about.price_per_hour ?? "" });
  const name = el("input", { id: "new-name", value: route.name, required: true });
  const said = el("p", { role: "status" });
  const attempt = async (act) => {
    try {
      await act();
    } catch (error) {
      said.textContent = error.message;
    }
  };
  const close = () => { isOpen(false); changed(); };
  const save = () => attempt(async () => {
    await change(route, "PUT", "about", { tags: tags.value.split(",").map((each) => each.trim()).filter(Boolean), notes: notes.value, price_per_hour: price.value === "" ? null : Number(price.value) });
    close();
  });
  const rename = () => attempt(async () => {
    await change(route, "POST", "rename", { name: name.value.trim() });
    location.hash = hashOf(["run", route.project, name.value.trim()]);
  });
  const remove = () => attempt(async () => {
    await change(route, "DELETE");
    location.hash = hashOf([]);
  });
  const sure = el("span", { class: "group", role: "group", "aria-label": "Delete this run?", hidden: true }, "Delete it with its steps, history and rollouts?",
    button("Yes, delete it", remove, { class: "danger" }), button("No", () => ask(false), { id: "keep-run" }));
  const first = button("Delete this run", () => ask(true), { class: "danger", id: "delete-run" });
  const ask = (isAsked) => {
    sure.hidden = !isAsked;
    first.hidden = isAsked;
    document.getElementById(isAsked ? "keep-run" : "delete-run").focus();
  };
  return el("form", { class: "edit", onsubmit: (event) => { event.preventDefault(); save(); } },
    el("label", { for: "tags" }, "Tags"), tags, el("label", { for: "notes" }, "Notes"), notes,
    el("label", { for: "price" }, "Price of an hour of the machines"), el("span", { class: "group" }, price),
    el("span", { class: "group" }, el("button", {}, "Save"), button("Close", close)),
    el("label", { for: "new-name" }, "Name"), el("span", { class: "group" }, name, button("Rename", rename)),
    el("p", { class: "note" }, "Programs that use the old name must be started with the new one. A run with jobs or requests cannot be renamed or deleted."),
    el("span", { class: "group" }, first, sure), said);
}
