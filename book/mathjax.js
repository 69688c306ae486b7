// MathJax draws letters as outlines, and writes MathML beside them for screen readers. Its menu is
// off: it would make each of the thousand formulas a stop of the Tab key, and offers parts that
// would have to be fetched.
window.MathJax = {
  options: {
    enableMenu: false,
    ignoreHtmlClass: "tex2jax_ignore|mathjax_ignore|document",
    processHtmlClass: "tex2jax_process|mathjax_process|math|output_area",
  },
  tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]] },
  startup: {
    pageReady() {
      return MathJax.startup.defaultPageReady().then(() => {
        document.dispatchEvent(new Event("lab:formulas-ready"));
      });
    },
  },
};
