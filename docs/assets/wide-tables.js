// Names and other short code in the cells of tables stay whole. A table that is wider than the page
// gets the class "scrolls" (site.css).
addEventListener("load", () => {
  for (const code of document.querySelectorAll(".md-typeset td code"))
    if (code.textContent.length < 16 || !/\s/.test(code.textContent)) code.style.whiteSpace = "nowrap"
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries)
      target.classList.toggle("scrolls", target.scrollWidth > target.clientWidth)
  })
  for (const wrap of document.querySelectorAll(".md-typeset__scrollwrap")) observer.observe(wrap)
})
