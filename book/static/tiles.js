// Which tiles fit into a fast memory, and what do they move? The formulas are those of
// labsupport/analysis/tiles.py and traffic/formulas.py; a test compares the two, number by number.
"use strict";

const labTiles = (() => {
  const BLOCKS = [16, 32, 64, 128, 256, 512, 1024];
  const ROW_VECTORS = 4;

  // ---- The numbers: elements of one dtype, one head, forward. --------------------------------------
  function visibleTiles({ seqlen, blockQ, blockK, causal }) {
    const rows = seqlen / blockQ;
    if (!causal) return rows * (seqlen / blockK);
    let count = 0;
    for (let r = 1; r <= rows; r++) count += Math.ceil((r * blockQ) / blockK);
    return count;
  }

  function parts(order, { headDim: d, blockQ, blockK }) {
    const twice = order === "standard" ? 1 : 2; // Q and O, K and V; the textbook's steps hold one each
    const vectors = { standard: ROW_VECTORS, version1: 6, version2: 5 }[order];
    return { q: twice * blockQ * d, k: twice * blockK * d, s: blockQ * blockK, rest: vectors * blockQ };
  }

  function needed(order, sizes) {
    const { q, k, s, rest } = parts(order, sizes);
    return q + k + s + rest;
  }

  function closedForm(order, sizes, capacity) {
    const { seqlen: n, headDim: d, blockQ, blockK, causal } = sizes;
    const nd = n * d;
    if (order === "version1") {
      const tiles = visibleTiles(sizes);
      return [
        2 * nd + tiles * (2 * blockQ * d + 2 * blockQ),
        nd + 2 * n + tiles * (blockQ * d + 2 * blockQ),
      ];
    }
    if (order === "version2") return [nd + visibleTiles(sizes) * 2 * blockK * d, nd + n];
    const square = n * n;
    const right = (n / blockQ) * nd;
    const passes = n + ROW_VECTORS <= capacity ? 1 : 2;
    const read = nd + right + passes * square + square + right;
    const written = 2 * square + nd;
    return causal ? [read + 2 * square, written + square] : [read, written];
  }

  function choices({ seqlen, headDim, fastBytes, itemsize, causal, order }) {
    const blocks = BLOCKS.filter((size) => seqlen % size === 0);
    const capacity = Math.floor(fastBytes / itemsize);
    const pairs = blocks.flatMap((blockQ) =>
      blocks.map((blockK) => ({ seqlen, headDim, blockQ, blockK, causal })),
    );
    const sum = ([read, written]) => read + written;
    const whole = { seqlen, headDim, blockQ: seqlen, blockK: seqlen, causal };
    const compulsory = sum(closedForm("version2", whole)) * itemsize;
    const textbooks = pairs
      .filter((sizes) => needed("standard", sizes) <= capacity)
      .map((sizes) => sum(closedForm("standard", sizes, capacity)) * itemsize);
    const textbook = textbooks.length ? Math.min(...textbooks) : NaN;
    const rows = pairs.map((sizes) => {
      const [read, written] = closedForm(order, sizes);
      const need = needed(order, sizes);
      return {
        blockQ: sizes.blockQ,
        blockK: sizes.blockK,
        fits: need <= capacity,
        needed: need * itemsize,
        read: read * itemsize,
        written: written * itemsize,
        traffic: (read + written) * itemsize,
      };
    });
    return { rows, compulsory, textbook, capacity };
  }

  function best({ rows }) {
    const fitting = rows.filter((row) => row.fits);
    fitting.sort((a, b) => a.traffic - b.traffic || a.needed - b.needed);
    return fitting[0];
  }

  // ---- The words. Ties are rounded to even, as Python does it. -------------------------------------
  function fixed(value, digits, grouped = true) {
    return new Intl.NumberFormat("en", {
      minimumFractionDigits: digits,
      maximumFractionDigits: digits,
      roundingMode: "halfEven",
      useGrouping: grouped,
    }).format(value);
  }

  function bytes(count) {
    const units = ["B", "KiB", "MiB", "GiB"];
    let unit = 0;
    let size = count;
    while (size >= 1024 && unit < 3) {
      size /= 1024;
      unit += 1;
    }
    return unit ? `${fixed(size, 1, false)} ${units[unit]}` : `${fixed(size, 0, false)} B`;
  }

  function times(ratio) {
    return `${fixed(ratio, ratio >= 9.95 ? 0 : 1, false)} times`;
  }

  function describe(table, fastBytes, blockQ, blockK) {
    const row = table.rows.find((one) => one.blockQ === blockQ && one.blockK === blockK);
    const pair = `Br = ${blockQ}, Bc = ${blockK}`;
    const size = `${fixed(row.needed / 1024, 0)} KiB`;
    const room = fixed(fastBytes / 1024, 0);
    if (!row.fits) {
      const least = best(table);
      const advice = least
        ? `Of those that fit, Br = ${least.blockQ}, Bc = ${least.blockK} moves least.`
        : "No pair fits, not even 16 x 16: use a smaller head dimension, a smaller dtype, or " +
          "more fast memory.";
      return `${pair} does not fit: it needs ${size}, but there are only ${room}. ${advice}`;
    }
    const ratio = row.traffic / table.textbook;
    let against = "the textbook's tiles do not fit";
    if (ratio <= 1) against = `${times(1 / ratio)} less than the textbook`;
    if (ratio > 1) against = `${times(ratio)} more than the textbook`;
    return (
      `${pair}: needs ${size} of ${room}, moves ${bytes(row.traffic)}, ` +
      `${times(row.traffic / table.compulsory)} the least, ${against}.`
    );
  }

  return { BLOCKS, choices, best, describe, parts, bytes, fixed };
})();

// ---- The controls and the pictures. ----------------------------------------------------------------
(() => {
  const figure = document.getElementById("play-tiles");
  if (!figure) return;
  const form = figure.querySelector("form");
  const pictures = figure.querySelector(".pictures");
  const says = figure.querySelector(".says");
  const OPTIONS = {
    seqlen: [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536],
    head_dim: [32, 64, 128, 256],
    block_q: labTiles.BLOCKS,
    block_k: labTiles.BLOCKS,
  };
  const START = { seqlen: 4096, head_dim: 64, block_q: 128, block_k: 64 };
  const WORDS = { seqlen: "tokens", head_dim: "numbers", block_q: "queries", block_k: "keys" };

  function chosen(name) {
    return OPTIONS[name][Number(form.elements[name].value)];
  }

  function set(name, value) {
    const slider = form.elements[name];
    slider.value = String(OPTIONS[name].indexOf(value));
    slider.setAttribute("aria-valuetext", `${value} ${WORDS[name]}`);
    slider.nextElementSibling.textContent = value.toLocaleString("en");
  }

  function svg(width, height, title, content) {
    return (
      `<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="${title}" ` +
      `xmlns="http://www.w3.org/2000/svg">${content}</svg>`
    );
  }

  function matrix(state) {
    const side = 200;
    const x0 = 44;
    const y0 = 44;
    const width = Math.max(2, (state.blockK / state.seqlen) * side);
    const height = Math.max(2, (state.blockQ / state.seqlen) * side);
    const column = Math.floor((0.3 * state.seqlen) / state.blockK) * (state.blockK / state.seqlen) * side;
    const row = Math.floor((0.6 * state.seqlen) / state.blockQ) * (state.blockQ / state.seqlen) * side;
    let lines = "";
    for (let at = 0; at <= side + 0.01 && width >= 3; at += width) {
      lines += `M${x0 + at} ${y0}v${side}`;
    }
    for (let at = 0; at <= side + 0.01 && height >= 3; at += height) {
      lines += `M${x0} ${y0 + at}h${side}`;
    }
    const mask = state.causal
      ? `<path class="masked" d="M${x0} ${y0}h${side}v${side}z"/><text x="${x0 + side - 62}" y="${y0 + 30}">hidden</text>`
      : "";
    const title =
      `The score matrix of ${state.seqlen} queries and keys in tiles of ${state.blockQ} by ` +
      `${state.blockK}; one tile, its queries and its keys are marked.`;
    return svg(
      260, 268, title,
      `<rect class="paper" x="${x0}" y="${y0}" width="${side}" height="${side}"/>${mask}` +
        `<path class="grid" d="${lines}"/>` +
        `<rect class="q" x="20" y="${y0 + row}" width="16" height="${height}"/>` +
        `<rect class="k" x="${x0 + column}" y="20" width="${width}" height="16"/>` +
        `<rect class="s" x="${x0 + column}" y="${y0 + row}" width="${width}" height="${height}"/>` +
        `<text x="${x0}" y="12">keys: K, V</text>` +
        `<text transform="translate(12 ${y0 + 86}) rotate(-90)">queries: Q, O</text>` +
        `<text x="${x0}" y="${y0 + side + 16}">S, in tiles</text>`,
    );
  }

  function memory(state, row) {
    const parts = labTiles.parts(state.order, state);
    const full = 300;
    const scale = full / Math.max(row.needed, state.fastBytes);
    const names = { q: "Q, O", k: "K, V", s: "S", rest: "m, l, …" };
    let at = 0;
    let bars = "";
    for (const [name, elements] of Object.entries(parts)) {
      const width = elements * state.itemsize * scale;
      bars += `<rect class="${name}" x="${10 + at}" y="24" width="${width}" height="26"/>`;
      if (width > 34) bars += `<text class="in" x="${10 + at + width / 2}" y="41">${names[name]}</text>`;
      at += width;
    }
    const limit = 10 + state.fastBytes * scale;
    const title = `Fast memory: ${labTiles.bytes(row.needed)} needed of ${labTiles.bytes(state.fastBytes)}.`;
    return svg(
      320, 74, title,
      `<text x="10" y="14">in fast memory: ${labTiles.bytes(row.needed)}</text>${bars}` +
        `<path class="${row.fits ? "limit" : "limit over"}" d="M${limit} 18v38"/>` +
        `<text x="${Math.min(limit, 310)}" y="70" text-anchor="${limit < 190 ? "start" : "end"}">M = ${labTiles.bytes(state.fastBytes)}` +
        `${row.fits ? "" : ": does not fit"}</text>`,
    );
  }

  function moved(table, row) {
    const bars = [
      ["each tensor once", table.compulsory, "rest"],
      ["these tiles", row.traffic, "s"],
      ["the textbook", table.textbook, "k"],
    ].filter(([, value]) => value === value);
    const values = bars.map(([, value]) => value);
    const low = Math.log(Math.min(...values) / 2);
    const high = Math.log(Math.max(...values));
    const content = bars
      .map(([name, value, kind], i) => {
        const width = (300 * (Math.log(value) - low)) / (high - low);
        const y = 20 + 44 * i;
        return (
          `<text x="10" y="${y}">${name}: ${labTiles.bytes(value)}</text>` +
          `<rect class="${kind}" x="10" y="${y + 5}" width="${width}" height="18"/>`
        );
      })
      .join("");
    const title = bars.map(([name, value]) => `${name} ${labTiles.bytes(value)}`).join(", ");
    return svg(
      320, 160, `Bytes moved, on a logarithmic scale: ${title}.`,
      `${content}<text x="10" y="152">bytes moved, logarithmic</text>`,
    );
  }

  let speaking = 0;
  function draw() {
    const state = {
      seqlen: chosen("seqlen"),
      headDim: chosen("head_dim"),
      blockQ: chosen("block_q"),
      blockK: chosen("block_k"),
      fastBytes: Number(form.elements.fast_bytes.value),
      itemsize: Number(form.elements.itemsize.value),
      causal: form.elements.causal.checked,
      order: form.elements.order.value,
    };
    // A block longer than the sequence would not divide it.
    for (const [name, key] of [["block_q", "blockQ"], ["block_k", "blockK"]]) {
      state[key] = Math.min(state[key], state.seqlen);
      set(name, state[key]);
    }
    set("seqlen", state.seqlen);
    set("head_dim", state.headDim);
    const table = labTiles.choices(state);
    const row = table.rows.find((one) => one.blockQ === state.blockQ && one.blockK === state.blockK);
    pictures.innerHTML =
      `<div>${matrix(state)}</div><div>${memory(state, row)}${moved(table, row)}</div>`;
    clearTimeout(speaking); // a screen reader need not hear each stop of a slider
    const words = labTiles.describe(table, state.fastBytes, state.blockQ, state.blockK);
    speaking = setTimeout(() => (says.textContent = words), 250);
    return { table, state };
  }

  for (const [name, options] of Object.entries(OPTIONS)) {
    form.elements[name].min = "0";
    form.elements[name].max = String(options.length - 1);
    set(name, START[name]);
  }
  form.addEventListener("input", draw);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.elements.best.addEventListener("click", () => {
    const least = labTiles.best(draw().table);
    if (!least) return;
    set("block_q", least.blockQ);
    set("block_k", least.blockK);
    draw();
  });
  form.hidden = false;
  pictures.hidden = false;
  figure.querySelector(".fallback").hidden = true;
  draw();
})();
