"use strict";

const value = (row, column) => {
  const cell = row.cells[column];
  return "number" in cell.dataset ? Number(cell.dataset.number) : cell.textContent.trim();
};

// empty cells come last, numbers before texts
const order = (one, other) => {
  if (one === "" || other === "") return (one === "") - (other === "");
  if (typeof one !== typeof other) return typeof one === "number" ? -1 : 1;
  return typeof one === "number" ? one - other : one.localeCompare(other);
};

const sort = (table, column) => {
  const heads = [...table.tHead.rows[0].cells];
  const down = heads[column].getAttribute("aria-sort") === "ascending";
  heads.forEach((head) => head.removeAttribute("aria-sort"));
  heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
  const rows = [...table.tBodies[0].rows].sort((one, other) => {
    const [a, b] = [value(one, column), value(other, column)];
    return down && a !== "" && b !== "" ? order(b, a) : order(a, b);
  });
  table.tBodies[0].append(...rows);
};

document.querySelectorAll("table").forEach((table) => {
  table.querySelectorAll("thead button").forEach((button, column) => {
    button.addEventListener("click", () => sort(table, column));
  });
});

// name the columns that are hidden until the reader scrolls sideways
const nameHidden = (box) => {
  const heads = [...box.querySelectorAll("thead th")];
  const end = box.getBoundingClientRect().right + 1;
  const hidden = heads.filter((head) => head.getBoundingClientRect().right > end);
  box.previousElementSibling.textContent = hidden.length
    ? `Scroll right for ${hidden.map((head) => head.textContent).join(", ")} \u2192`
    : "";
};
document.querySelectorAll(".scroll").forEach((box) => {
  const update = () => nameHidden(box);
  box.addEventListener("scroll", update);
  window.addEventListener("resize", update);
  update();
});

const filter = document.getElementById("filter");
filter.addEventListener("input", () => {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  const rows = document.querySelectorAll("tbody tr");
  rows.forEach((row) => {
    const title = row.closest("section").querySelector("h2").textContent;
    const text = `${title} ${row.textContent}`.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
    shown += !row.hidden;
  });
  document.getElementById("filter-count").value = words.length ? `${shown} of ${rows.length} rows` : "";
});
filter.form.addEventListener("submit", (event) => event.preventDefault());
