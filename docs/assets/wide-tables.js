// Give the class "scrolls" to each table that is wider than the page, for site.css.
addEventListener("load", () => {
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries)
      target.classList.toggle("scrolls", target.scrollWidth > target.clientWidth)
  })
  for (const wrap of document.querySelectorAll(".md-typeset__scrollwrap")) observer.observe(wrap)
})
