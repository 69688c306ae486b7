// Helpers that every page uses: meanings of terms, figures to enlarge, code that breaks after
// punctuation, parts that a link unfolds, and boxes that scroll sideways.
"use strict";

// ---- A term shows its meaning while the pointer or the keyboard is on it; Escape hides it. -------
function showMeanings() {
  let shown = null;
  let waiting = 0;

  function hide() {
    clearTimeout(waiting);
    if (shown) shown.classList.remove("shown");
    shown = null;
  }
  function hideSoon() {
    clearTimeout(waiting);
    waiting = setTimeout(hide, 200); // time for the pointer to move onto the meaning
  }
  function show(term, meaning) {
    hide();
    const at = term.getClientRects()[0];
    const left = Math.min(at.left, document.documentElement.clientWidth - meaning.offsetWidth - 16);
    const below = at.bottom + 6;
    const fits = below + meaning.offsetHeight < window.innerHeight;
    meaning.style.left = `${Math.max(16, left)}px`;
    meaning.style.top = `${fits ? below : Math.max(8, at.top - meaning.offsetHeight - 6)}px`;
    meaning.classList.add("shown");
    shown = meaning;
  }

  for (const term of document.querySelectorAll("a.term")) {
    const meaning = document.getElementById(`meaning-${new URL(term.href).hash.slice(1)}`);
    if (!meaning) continue;
    term.setAttribute("aria-describedby", meaning.id);
    term.addEventListener("mouseenter", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => show(term, meaning), 150);
    });
    term.addEventListener("mouseleave", hideSoon);
    term.addEventListener("focus", () => show(term, meaning));
    term.addEventListener("blur", hide);
    meaning.addEventListener("mouseenter", () => clearTimeout(waiting));
    meaning.addEventListener("mouseleave", hideSoon);
  }
  // The focus may scroll the page to a term: its meaning goes along, any other is hidden.
  function follow() {
    const term = document.activeElement;
    if (shown && term.getAttribute("aria-describedby") === shown.id) show(term, shown);
    else hide();
  }
  document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  window.addEventListener("scroll", follow, { passive: true });
}

// ---- A figure opens enlarged; without this script its link would open the picture. ---------------
function enlargeFigures() {
  const dialog = document.createElement("dialog");
  const close = document.createElement("button");
  const large = document.createElement("img");
  dialog.className = "enlarged";
  close.textContent = "Close";
  dialog.append(close, large);
  dialog.addEventListener("click", () => dialog.close());
  document.body.append(dialog);
  for (const image of document.querySelectorAll("main img")) {
    if (image.closest("a")) continue;
    const link = document.createElement("a");
    link.className = "enlarge";
    link.href = image.src;
    image.replaceWith(link);
    link.append(image);
    link.addEventListener("click", (event) => {
      event.preventDefault();
      large.src = image.src;
      large.alt = image.alt;
      dialog.showModal();
    });
  }
}

// ---- Code in a sentence may break after punctuation within it. -----------------------------------
function breakCode() {
  const texts = [];
  for (const code of document.querySelectorAll("code")) {
    if (code.closest("pre")) continue;
    const walker = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) texts.push(walker.currentNode);
  }
  for (const text of texts) {
    const parts = text.data.split(/(?<=[a-z0-9]_|\w[^\w\s]+)(?=[a-z"'])|(?<=[,/])(?=\d)/i);
    text.replaceWith(
      ...parts.flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part])),
    );
  }
}

// ---- A link into a folded part unfolds it. -------------------------------------------------------
function unfold() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const folded = target && target.closest("details:not([open])");
  if (!folded) return;
  folded.open = true;
  target.scrollIntoView();
}

// ---- What scrolls sideways can be reached with the keyboard, and says what it is. ----------------
const BOXES = [
  ['mjx-container[display="true"], mjx-container.wide', "Formula, scrolls sideways"],
  [".pst-scrollable-table-container", "Table, scrolls sideways"],
  [".cell_output .output.text_html", "Table of results, scrolls sideways"],
  [".cell_output pre", "Output, scrolls sideways"],
  [".play .pictures > div, .play .steps", "Figure, scrolls sideways"],
  [".highlight pre", "Code, scrolls sideways"],
];

function wide(box) {
  return box.scrollWidth > box.clientWidth + 1;
}

function openBoxes() {
  for (const formula of document.querySelectorAll("mjx-container:not([display])")) {
    const line = formula.closest("p, li, td, th, dd");
    formula.classList.remove("wide");
    if (line && formula.offsetWidth > line.clientWidth) formula.classList.add("wide");
  }
  for (const [selector, label] of BOXES) {
    for (const box of document.querySelectorAll(selector)) {
      if (wide(box)) {
        box.tabIndex = 0;
        box.setAttribute("role", "group");
        box.setAttribute("aria-label", label);
      } else if (box.getAttribute("role") === "group") {
        box.removeAttribute("tabindex");
        box.removeAttribute("role");
        box.removeAttribute("aria-label");
      }
    }
  }
}

let asked = 0;
function openBoxesSoon() {
  clearTimeout(asked);
  asked = setTimeout(openBoxes, 400); // behind the theme's own look at the same boxes
}

document.addEventListener("DOMContentLoaded", () => {
  showMeanings();
  enlargeFigures();
  breakCode();
  unfold();
  openBoxesSoon();
});
window.addEventListener("hashchange", unfold);
document.addEventListener("lab:formulas-ready", openBoxesSoon);
window.addEventListener("resize", openBoxesSoon);
// What was folded away has no width until it is unfolded.
document.addEventListener("toggle", openBoxesSoon, true);
