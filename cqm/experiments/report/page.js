// Headers sort their table: numbers by value, words by alphabet, empty cells last.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const header = button.parentElement;
    const table = header.closest("table");
    const column = header.cellIndex;
    const ascending = header.getAttribute("aria-sort") !== "ascending";
    for (const other of table.querySelectorAll("th[aria-sort]")) {
      other.setAttribute("aria-sort", "none");
    }
    header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    // Rows that belong together are one body; its first row decides.
    const key = (body) => {
      const cell = body.rows[0].cells[column];
      return "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent.trim();
    };
    const isEmpty = (value) => value === "" || value === "—" || value === "undefined";
    const bodies = [...table.tBodies].map((body) => ({ body, value: key(body) }));
    bodies.sort((a, b) => {
      if (isEmpty(a.value) || isEmpty(b.value)) return isEmpty(a.value) - isEmpty(b.value);
      const numbers = typeof a.value === "number" && typeof b.value === "number";
      const order = numbers ? a.value - b.value : String(a.value).localeCompare(String(b.value));
      return ascending ? order : -order;
    });
    table.append(...bodies.map(({ body }) => body));
  });
}
