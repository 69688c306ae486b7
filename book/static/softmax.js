// Online softmax over one row, a block a step: the recurrence of theory/02-online-softmax.md.
"use strict";

const labSoftmax = (() => {
  const START = { m: -Infinity, l: 0, o: 0 };

  // One step: the state after a block, and the factor for what was there before.
  function fold(state, scores, values) {
    const m = Math.max(state.m, ...scores);
    const factor = state.m === -Infinity ? 0 : Math.exp(state.m - m);
    const weights = scores.map((score) => Math.exp(score - m));
    const added = weights.reduce((sum, weight) => sum + weight, 0);
    const output = weights.reduce((sum, weight, j) => sum + weight * values[j], 0);
    return { m, factor, added, l: factor * state.l + added, o: factor * state.o + output };
  }

  function run(scores, values, block) {
    const steps = [];
    let state = START;
    for (let at = 0; at < scores.length; at += block) {
      state = fold(state, scores.slice(at, at + block), values.slice(at, at + block));
      steps.push(state);
    }
    return steps;
  }

  return { START, fold, run };
})();

(() => {
  const figure = document.getElementById("play-softmax");
  if (!figure) return;
  const VALUES = [1, 2, 3, 4, 5, 6, 7, 8];
  const ROWS = [
    ["the worked example: 2, 1, 4, 3, 1, 0, 5, 2", [2, 1, 4, 3, 1, 0, 5, 2]],
    ["rising: the maximum rises in every block", [0, 1, 2, 3, 4, 5, 6, 7]],
    ["falling: it never rises after the first", [7, 6, 5, 4, 3, 2, 1, 0]],
    ["large: e to 1,000 would overflow", [990, 1000, 995, 1001, 998, 1003, 1000, 999]],
  ];
  const form = figure.querySelector("form");
  const says = figure.querySelector(".says");
  const pictures = figure.querySelector(".pictures");
  const body = figure.querySelector("tbody");
  const next = form.elements.step;
  let done = 0;

  const show = (value, digits = 3) =>
    value === -Infinity ? "−∞" : Number.isInteger(value) ? String(value) : value.toFixed(digits);

  function row() {
    return ROWS[Number(form.elements.row.value)][1];
  }

  function picture(scores, block, steps) {
    const cells = scores
      .map((score, j) => {
        const number = Math.floor(j / block);
        const kind = number < done - 1 ? "seen" : number === done - 1 ? "now" : "ahead";
        const x = 8 + j * 60;
        return (
          `<rect class="${kind}" x="${x}" y="34" width="56" height="36"/>` +
          `<text class="cell" x="${x + 28}" y="57">${score}</text>`
        );
      })
      .join("");
    let frames = "";
    for (let at = 0; at < scores.length; at += block) {
      const width = Math.min(block, scores.length - at) * 60;
      frames += `<rect class="frame" x="${6 + at * 60}" y="30" width="${width}" height="44"/>`;
      const step = steps[at / block];
      if (at / block < done) {
        frames += `<text class="m" x="${8 + at * 60}" y="22">m = ${show(step.m)}</text>`;
        frames += `<text x="${8 + at * 60}" y="92">l = ${show(step.l)}</text>`;
      }
    }
    const seen = Math.min(done * block, scores.length);
    const title = `Scores ${scores.join(", ")} in blocks of ${block}; ${seen} of 8 are taken in.`;
    return (
      `<svg viewBox="0 0 492 100" role="img" aria-label="${title}" ` +
      `xmlns="http://www.w3.org/2000/svg">${cells}${frames}</svg>`
    );
  }

  function sentence(scores, block, steps) {
    if (done === 0) {
      return "Nothing has been seen: m is −∞, l and o are 0. “Next block” takes the first one in.";
    }
    const after = steps[done - 1];
    const before = done > 1 ? steps[done - 2] : labSoftmax.START;
    let words = `Block ${done}: `;
    if (done === 1) words += `m becomes ${show(after.m)}, and l is ${show(after.l)}.`;
    else if (after.m > before.m) {
      words +=
        `m rises from ${show(before.m)} to ${show(after.m)}, so l and o are multiplied by ` +
        `${show(after.factor)}: l = ${show(after.factor)} × ${show(before.l)} + ` +
        `${show(after.added)} = ${show(after.l)}.`;
    } else {
      words +=
        `m stays ${show(after.m)}, the factor is 1: l = ${show(before.l)} + ${show(after.added)} = ` +
        `${show(after.l)}.`;
    }
    if (done === steps.length) {
      const whole = labSoftmax.run(scores, VALUES, scores.length)[0];
      words +=
        ` That was the row: O = o / l = ${(after.o / after.l).toFixed(4)}, and in one go ` +
        `${(whole.o / whole.l).toFixed(4)}. L = m + ln l = ${(after.m + Math.log(after.l)).toFixed(4)}.`;
    }
    return words;
  }

  function draw() {
    const scores = row();
    const block = Number(form.elements.block.value);
    const steps = labSoftmax.run(scores, VALUES, block);
    form.elements.block.nextElementSibling.textContent = String(block);
    form.elements.block.setAttribute("aria-valuetext", `${block} keys`);
    pictures.innerHTML = `<div>${picture(scores, block, steps)}</div>`;
    says.textContent = sentence(scores, block, steps);
    body.replaceChildren(
      ...steps.slice(0, done).map((step, i) => {
        const line = document.createElement("tr");
        const before = i ? steps[i - 1].m : -Infinity;
        const its = scores.slice(i * block, (i + 1) * block).join(", ");
        const cells = [i + 1, its, show(before), show(step.m), show(step.factor), show(step.l), show(step.o)];
        cells.forEach((content, j) => {
          const cell = document.createElement(j ? "td" : "th");
          if (!j) cell.scope = "row";
          cell.textContent = content;
          line.append(cell);
        });
        return line;
      }),
    );
    figure.querySelector(".steps").hidden = done === 0;
    // aria-disabled, not disabled: the button keeps the focus, and a press says why nothing happens.
    next.setAttribute("aria-disabled", String(done === steps.length));
    return steps.length;
  }

  function begin() {
    done = 0;
    draw();
  }

  ROWS.forEach(([name], i) => form.elements.row.add(new Option(name, String(i))));
  form.addEventListener("input", begin);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.elements.again.addEventListener("click", begin);
  next.addEventListener("click", () => {
    const last = Math.ceil(row().length / Number(form.elements.block.value));
    done = Math.min(done + 1, last);
    draw();
  });
  form.hidden = false;
  pictures.hidden = false;
  begin();
})();
