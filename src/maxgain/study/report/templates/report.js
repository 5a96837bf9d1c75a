"use strict";

const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];

// Tables that sort by the column whose heading is pressed; pressed again, the other way round.
for (const table of all("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.querySelector("button")?.addEventListener("click", () => {
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

// A name in a legend that is pointed at, or reached by the keyboard, brings out its lines and dots.
for (const item of all(".legend [data-series]")) {
  const section = item.closest("section");
  const bring = (out) => () => {
    section.classList.toggle("picked", out);
    all(`svg [data-series="${item.dataset.series}"]`, section).forEach((mark) => mark.classList.toggle("lit", out));
  };
  for (const event of ["pointerenter", "focus"]) item.addEventListener(event, bring(true));
  for (const event of ["pointerleave", "blur"]) item.addEventListener(event, bring(false));
}

// Box plots of two runs, the training set above the test set.
const source = document.getElementById("gain-data");
if (source) {
  const { words, networks, runs } = JSON.parse(source.textContent);
  const sides = [0, 1].map((side) => document.querySelector(`figure.boxes[data-side="${side}"]`));
  const selects = [0, 1].map((side) => document.getElementById(`run${side}`));
  const sameScale = document.getElementById("same-scale");
  const titles = ["training set", "test set"];

  // A gain is written as the logarithm to base 2 in steps of 1/2048, in two bytes; zero as zero.
  const unpack = (text) => {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const whole = new DataView(bytes.buffer);
    return Array.from({ length: bytes.length / 2 }, (_, place) => {
      const step = whole.getUint16(2 * place, true);
      return step === 0 ? 0 : 2 ** ((step - 32768) / 2048);
    });
  };
  const named = ([, regulariser, fold, seed]) =>
    `${words[regulariser]}, ${fold === null ? "" : `fold ${fold}, `}seed ${seed}`;
  const unpacked = (number) => {
    const [, , , , bound, network, ...packed] = runs[number];
    const parts = packed.map((text, index) => {
      const gains = unpack(text);
      const rows = networks[network].map((layer, place) => [layer, ...gains.slice(5 * place, 5 * place + 5)]);
      return { title: titles[index], rows: gains.length ? rows : [] };
    });
    return { name: named(runs[number]), bound, parts: parts.filter((part) => part.rows.length) };
  };

  const element = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const short = (value) => String(Number(value.toPrecision(3)));

  const range = (run) => {
    const gains = run.parts.flatMap((part) => part.rows.flatMap((row) => row.slice(1)));
    const known = [...gains, run.bound ?? 0].filter((gain) => gain > 0);
    const top = known.length ? Math.max(...known) : 1;
    return [Math.max(Math.min(...known, top / 1.5), top / 500), top];
  };

  const ticks = (low, high) => {
    const span = Math.log2(high / low);
    const factors = span > 9 ? [1] : span > 5 ? [1, 3] : [1, 2, 5];
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
      for (const factor of factors) found.push(Number((factor * 10 ** power).toPrecision(1)));
    }
    return found.filter((tick) => tick >= low && tick <= high);
  };

  const draw = (run, [low, high]) => {
    const layers = run.parts[0].rows.map((row) => row[0]);
    const [left, right, panel, gap] = [46, 46, 210, 40];
    const names = 14 + 5.4 * Math.max(...layers.map((name) => Math.min(name.length, 28)));
    const each = Math.max(22, (430 - left - right) / layers.length);
    const width = left + right + each * layers.length;
    const height = run.parts.length * (panel + gap) + names;
    const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "img", "aria-label": describe(run) });
    svg.style.minWidth = `${18 * layers.length + left}px`;
    const [bottom, top] = [low / 1.08, high * 1.08];
    run.parts.forEach((part, index) => {
      const floor = gap + panel + index * (panel + gap);
      const y = (gain) => floor - (panel * Math.log(Math.max(gain, bottom) / bottom)) / Math.log(top / bottom);
      svg.append(element("text", { x: left, y: floor - panel - 12 }, `Gain ‖Wx‖ / ‖x‖, ${part.title}`));
      for (const tick of ticks(bottom, top)) {
        svg.append(element("path", { class: "grid", d: `M${left} ${y(tick)}H${width - right}` }));
        svg.append(element("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end", class: "tick" }, short(tick)));
      }
      svg.append(element("path", { class: "axis", d: `M${left} ${floor}H${width - right}` }));
      if (run.bound) {
        svg.append(element("path", { class: "bound", d: `M${left} ${y(run.bound)}H${width - right}` }));
        svg.append(element("text", { x: width - right + 4, y: y(run.bound) + 4 }, `γ = ${short(run.bound)}`));
      }
      part.rows.forEach(([layer, ...gains], place) => {
        const [least, lower, median, upper, most] = gains;
        const x = left + (place + 0.5) * each;
        const half = Math.min(0.34 * each, 20);
        const group = element("g", { class: "layer" });
        group.append(
          element("title", {}, `${layer}: ${gains.map(short).join(", ")}`),
          element("path", {
            class: "whisker",
            d: `M${x} ${y(least)}V${y(lower)}M${x} ${y(upper)}V${y(most)}` +
              `M${x - half / 2} ${y(least)}h${half}M${x - half / 2} ${y(most)}h${half}`,
          }),
          element("rect", {
            class: "box", x: x - half, y: y(upper), width: 2 * half, height: Math.max(1, y(lower) - y(upper)),
          }),
          element("path", { class: "median", d: `M${x - half} ${y(median)}h${2 * half}` }),
        );
        svg.append(group);
      });
    });
    layers.forEach((name, place) => {
      const [x, y] = [left + (place + 0.5) * each + 4, height - names + 12];
      const text = name.length > 28 ? `…${name.slice(-27)}` : name;
      const label = element("text", { x, y, "text-anchor": "end", transform: `rotate(-60 ${x} ${y})` }, text);
      label.append(element("title", {}, name));
      svg.append(label);
    });
    return svg;
  };

  const describe = (run) => {
    const maxima = run.parts.map((part) => {
      const row = part.rows.reduce((a, b) => (b.at(-1) > a.at(-1) ? b : a));
      return `${short(row.at(-1))} on the ${part.title} (${row[0]})`;
    });
    const bound = run.bound ? `bound ${short(run.bound)}` : "no bound on gains";
    return `${run.name}: largest gain ${maxima.join(" and ")}; ${bound}.`;
  };

  const show = () => {
    const chosen = selects.map((select) => unpacked(select.value));
    const ranges = chosen.map(range);
    const common = [Math.min(...ranges.map((ends) => ends[0])), Math.max(...ranges.map((ends) => ends[1]))];
    chosen.forEach((run, side) => {
      sides[side].querySelector("figcaption").textContent = describe(run);
      sides[side].querySelector(".scroll").replaceChildren(draw(run, sameScale.checked ? common : ranges[side]));
    });
  };

  // The choices are made here too: of thousands of runs they would be most of the page.
  const groups = new Map();
  runs.forEach((run, number) => {
    if (!groups.has(run[0])) groups.set(run[0], []);
    groups.get(run[0]).push(number);
  });
  selects.forEach((select) => {
    for (const [row, members] of groups) {
      const group = document.createElement("optgroup");
      group.label = words[row];
      group.append(...members.map((number) => new Option(named(runs[number]), number)));
      select.append(group);
    }
    select.value = select.dataset.chosen;
  });
  [...selects, sameScale].forEach((control) => control.addEventListener("change", show));
  document.querySelector(".choices").hidden = runs.length < 2;
  sides[1].hidden = runs.length < 2;
  show();
}

// A link to something that is folded away unfolds it.
const unfold = () => {
  let found = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!found) return;
  for (let part = found; part; part = part.parentElement) if (part.tagName === "DETAILS") part.open = true;
  found.scrollIntoView();
};
addEventListener("hashchange", unfold);
unfold();

// Paper cannot be clicked on: it shows everything, except long lists of runs.
let opened = [];
addEventListener("beforeprint", () => {
  opened = all("details:not([open])").filter((details) => !details.classList.contains("long"));
  opened.forEach((details) => { details.open = true; });
});
addEventListener("afterprint", () => opened.forEach((details) => { details.open = false; }));
