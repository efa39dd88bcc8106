
"use strict";
const filter = document.getElementById("filter");
const unfold = document.getElementById("unfold");
const folded = [...document.querySelectorAll("details")];
const wanted = [...document.querySelectorAll("tbody tr, .finding, .names li")];
function apply() {
  const word = filter.value.trim().toLowerCase();
  for (const one of wanted) one.hidden = word !== "" && !one.textContent.toLowerCase().includes(word);
  if (word !== "") for (const one of folded) one.open = true;
}
filter.addEventListener("input", apply);
filter.form.addEventListener("submit", (event) => event.preventDefault());
unfold.addEventListener("click", () => {
  const open = folded.some((one) => !one.open);
  for (const one of folded) one.open = open;
  unfold.textContent = open ? "Fold all" : "Unfold all";
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && document.activeElement !== filter) { event.preventDefault(); filter.focus(); }
  if (event.key === "Escape" && document.activeElement === filter) { filter.value = ""; apply(); }
});
