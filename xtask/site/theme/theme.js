// Before the first paint: the colours that the reader selected.
try {
  const colours = localStorage.getItem('colours')
  if (colours) document.documentElement.dataset.colours = colours
} catch {}
