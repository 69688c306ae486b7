// Sphinx ranks a page that has one of the words in a heading like one that is called by all of them.
// Here what is called by them comes first. (`var`: Sphinx declares the same name, with these points.)
var Scorer = {
  score(result) {
    const [, title, , , points] = result;
    const wanted = (new URLSearchParams(location.search).get("q") || "").toLowerCase().trim();
    return wanted && title.toLowerCase().includes(wanted) ? points + 20 : points;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
