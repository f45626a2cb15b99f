"use strict";
// Everything on the page can be read without this script. It sorts tables, and finds modules of the map in the list.
document.documentElement.classList.add("scripted");

for (const button of document.querySelectorAll("[data-open]")) {
  button.addEventListener("click", () => {
    for (const module of document.querySelectorAll("details.module")) module.open = Boolean(button.dataset.open);
  });
}

for (const cell of document.querySelectorAll("[data-module]")) {
  cell.addEventListener("click", () => {
    const module = document.getElementById("module-" + cell.dataset.module);
    for (let each = module; each; each = each.parentElement.closest("details")) if (each.tagName === "DETAILS") each.open = true;
    module.scrollIntoView({ block: "center" });
    module.classList.remove("found");
    requestAnimationFrame(() => module.classList.add("found"));
  });
}

function valueOf(row, index) {
  const cell = row.cells[index];
  const number = Number.parseFloat(cell.classList.contains("n") ? cell.title || cell.textContent : "");
  return Number.isNaN(number) ? cell.textContent.toLowerCase() : number;
}

function compare(a, b) {
  if (typeof a !== typeof b) return typeof a === "number" ? 1 : -1;
  return a < b ? -1 : a > b ? 1 : 0;
}

for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, index) => {
    if (!head.textContent.trim()) return;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const before = head.getAttribute("aria-sort");
      const descends = before ? before === "ascending" : head.classList.contains("n");
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", descends ? "descending" : "ascending");
      const bodies = [...table.tBodies];
      const first = bodies[0].rows.length;
      const rows = bodies.flatMap((body) => [...body.rows]);
      rows.sort((a, b) => (descends ? -1 : 1) * compare(valueOf(a, index), valueOf(b, index)));
      bodies[0].append(...rows.slice(0, first));
      if (bodies[1]) bodies[1].append(...rows.slice(first));
    });
  });
}
