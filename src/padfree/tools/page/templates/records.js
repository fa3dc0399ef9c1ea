"use strict";
(() => {
  const STEP = 25;  // rows that are shown at a time
  const element = (tag, text, kind) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  const shown = (value) => value === null ? "–"
    : typeof value === "number" ? (Number.isInteger(value) ? value.toLocaleString("en") : String(+value.toPrecision(4)))
    : value;
  const compare = (a, b) => {
    if (a === null || b === null) return a === b ? 0 : a === null ? 1 : -1;  // nothing stands last
    if (typeof a === "number" && typeof b === "number") return a - b;
    return String(a).localeCompare(String(b), undefined, { numeric: true });
  };
  for (const section of document.querySelectorAll(".records")) {
    const { columns, rows } = JSON.parse(section.querySelector("script").textContent);
    const [head, body] = [section.querySelector("thead"), section.querySelector("tbody")];
    const [search, choice] = [section.querySelector("input"), section.querySelector("select")];
    const [count, more] = [section.querySelector(".count"), section.querySelector(".more")];
    const texts = rows.map((row) => row.map(shown).join("\n").toLowerCase());
    let sorted = { column: -1, down: false }, limit = STEP, found = [];

    const row = (index) => {
      const line = element("tr");
      line.tabIndex = 0;
      rows[index].forEach((value, place) => {
        const cell = element("td", undefined, columns[place].kind);
        cell.append(element("div", shown(value)));
        line.append(cell);
      });
      return line;
    };
    const draw = () => {
      body.replaceChildren(...found.slice(0, limit).map(row));
      count.textContent = `${found.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")}`;
      more.hidden = found.length <= limit;
      more.textContent = `Show ${Math.min(STEP, found.length - limit)} more`;
    };
    const select = () => {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      found = rows.map((_, index) => index).filter((index) =>
        (choice.value === "" || shown(rows[index][0]) === choice.value) && words.every((word) => texts[index].includes(word)));
      if (sorted.column >= 0) {
        found.sort((a, b) => {
          const [x, y] = [rows[a][sorted.column], rows[b][sorted.column]];
          return (x === null || y === null ? compare(x, y) : (sorted.down ? -1 : 1) * compare(x, y)) || a - b;
        });
      }
      limit = STEP;
      draw();
    };
    const line = element("tr");
    columns.forEach(({ name, kind }, place) => {
      const cell = element("th", undefined, kind), button = element("button", name);
      button.type = "button";
      button.onclick = () => {
        sorted = { column: place, down: sorted.column === place ? !sorted.down : kind === "number" };
        for (const other of line.children) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
        select();
      };
      cell.append(button);
      line.append(cell);
    });
    head.append(line);
    for (const value of [...new Set(rows.map((one) => shown(one[0])))]) choice.append(new Option(`${columns[0].name} ${value}`, value));
    choice.options[0].textContent = `every ${columns[0].name}`;
    const open = (event) => event.target.closest("tr")?.classList.toggle("open");
    body.onclick = (event) => { if (getSelection().isCollapsed) open(event); };
    body.onkeydown = (event) => { if (event.key === "Enter") open(event); };
    search.oninput = choice.onchange = select;
    more.onclick = () => { limit += STEP; draw(); };
    section.querySelector(".tools").hidden = false;
    select();
  }
})();
