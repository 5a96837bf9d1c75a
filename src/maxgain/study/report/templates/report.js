"use strict";

// Tables that sort by the column whose heading is pressed; pressed again, the other way round.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const numeric = heading.classList.contains("number");
      // Numbers begin with the largest, words with A.
      const down = numeric ? heading.ariaSort !== "descending" : heading.ariaSort === "ascending";
      const body = table.tBodies[0];
      const value = (row) => {
        const cell = row.cells[column];
        if (!numeric) return cell.textContent.trim();
        return cell.dataset.value === undefined ? null : Number(cell.dataset.value.replace("inf", "Infinity"));
      };
      const rows = [...body.rows].sort((one, other) => {
        const [a, b] = [value(one), value(other)];
        if (a === null || b === null) return (a === null) - (b === null); // what has no number is last, always
        const order = numeric ? a - b : a.localeCompare(b);
        return down ? -order : order;
      });
      body.append(...rows);
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    });
  });
}

// Box plots of two runs, the training set above the test set.
const source = document.getElementById("gain-data");
if (source) {
  const runs = JSON.parse(source.textContent).runs;
  const selects = [0, 1].map((side) => document.getElementById(`run${side}`));
  const sameScale = document.getElementById("same-scale");
  const titles = { train: "training set", test: "test set" };
  const parts = (run) => Object.keys(titles).filter((part) => run.gains[part].length);

  const element = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const short = (value) => String(Number(value.toPrecision(4)));

  const largest = (run) => {
    const gains = Object.values(run.gains).flat().map((row) => row.at(-1));
    return Math.max(run.bound ?? 0, ...gains) || 1;
  };

  // Steps of 1, 2 or 5 times a power of ten, about five to the top.
  const step = (top) => {
    const power = 10 ** Math.floor(Math.log10(top / 5));
    return power * [1, 2, 5, 10].find((factor) => factor * power >= top / 5);
  };

  const draw = (run, top) => {
    const layers = run.gains.train.map((row) => row[0]);
    const [left, right, panel, gap] = [40, 6, 150, 28];
    const names = 14 + 5.2 * Math.max(...layers.map((name) => Math.min(name.length, 24)));
    const each = Math.max(20, (400 - left - right) / layers.length);
    const width = left + right + each * layers.length;
    const height = parts(run).length * (panel + gap) + names;
    const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": describe(run) });
    svg.style.minWidth = `${16 * layers.length + left}px`;
    svg.style.maxWidth = `${1.2 * width}px`;
    parts(run).forEach((part, index) => {
      const floor = gap + panel + index * (panel + gap);
      const y = (gain) => floor - (panel * gain) / top;
      svg.append(element("text", { x: left, y: floor - panel - 10 }, titles[part]));
      const interval = step(top);
      for (let tick = 0; tick <= top * 1.0001; tick += interval) {
        svg.append(element("path", { class: "line", d: `M${left} ${y(tick)}H${width - right}` }));
        svg.append(element("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, short(tick)));
      }
      if (run.bound) svg.append(element("path", { class: "bound", d: `M${left} ${y(run.bound)}H${width - right}` }));
      run.gains[part].forEach(([layer, low, lower, median, upper, high], place) => {
        const x = left + (place + 0.5) * each;
        const half = Math.min(0.32 * each, 20);
        const group = element("g", {});
        group.append(
          element("title", {}, `${layer}: ${[low, lower, median, upper, high].map(short).join(", ")}`),
          element("path", {
            class: "whisker",
            d: `M${x} ${y(low)}V${y(lower)}M${x} ${y(upper)}V${y(high)}` +
              `M${x - half / 2} ${y(low)}h${half}M${x - half / 2} ${y(high)}h${half}`,
          }),
          element("rect", { class: "box", x: x - half, y: y(upper), width: 2 * half, height: y(lower) - y(upper) }),
          element("path", { class: "median", d: `M${x - half} ${y(median)}h${2 * half}` }),
        );
        svg.append(group);
      });
    });
    layers.forEach((name, place) => {
      const [x, y] = [left + (place + 0.5) * each + 4, height - names + 14];
      const text = name.length > 24 ? `…${name.slice(-23)}` : name;
      svg.append(element("text", { x, y, "text-anchor": "end", transform: `rotate(-60 ${x} ${y})` }, text));
    });
    return svg;
  };

  const describe = (run) => {
    const maxima = parts(run).map((part) => {
      const row = run.gains[part].reduce((a, b) => (b.at(-1) > a.at(-1) ? b : a));
      return `${short(row.at(-1))} on the ${titles[part]} (${row[0]})`;
    });
    const bound = run.bound ? `bound ${short(run.bound)}` : "no bound on gains";
    return `${run.name}: largest gain ${maxima.join(" and ")}; ${bound}.`;
  };

  const show = () => {
    const chosen = selects.map((select) => runs[select.value]);
    const tops = chosen.map((run) => 1.05 * largest(run));
    chosen.forEach((run, side) => {
      const figure = document.querySelector(`figure.boxes[data-side="${side}"]`);
      figure.querySelector("figcaption").textContent = describe(run);
      figure.querySelector(".scroll").replaceChildren(draw(run, sameScale.checked ? Math.max(...tops) : tops[side]));
    });
  };
  [...selects, sameScale].forEach((control) => control.addEventListener("change", show));
  document.querySelector(".choices").hidden = false;
  show();
}

// Paper cannot be clicked on: it shows everything.
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  opened.forEach((details) => { details.open = true; });
});
addEventListener("afterprint", () => opened.forEach((details) => { details.open = false; }));
