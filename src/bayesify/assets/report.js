"use strict";
// Sorts a table by the column whose heading is pressed; again, the other way round. Cells without
// a value stay at the end.
for (const table of document.querySelectorAll("table.sortable")) {
  const buttons = table.querySelectorAll("thead button");
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const heading = button.closest("th");
      const column = Number(button.dataset.column);
      const ascending = heading.getAttribute("aria-sort") !== "ascending";
      for (const other of buttons) other.closest("th").removeAttribute("aria-sort");
      heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.value;
      const compare = (a, b) => {
        const [left, right] = [key(a), key(b)];
        if (left === "" || right === "") return (left === "") - (right === "");
        const order = heading.dataset.kind === "text"
          ? left.localeCompare(right, undefined, { numeric: true })
          : Number(left) - Number(right);
        return ascending ? order : -order;
      };
      const body = table.tBodies[0];
      body.append(...[...body.rows].sort(compare));
    });
  }
}
