// The way to the first page; `/` in the page for unknown addresses.
const base = document.querySelector('script[data-base]').dataset.base.replace(/\/$/, '')
const root = document.documentElement

// Colours: as the system, light or dark.
const themeButton = document.getElementById('theme')
const signs = { system: '◐', light: '☀', dark: '☾' }
function showColours() {
  themeButton.textContent = signs[root.dataset.colours ?? 'system']
}
themeButton.addEventListener('click', () => {
  const names = Object.keys(signs)
  const next = names[(names.indexOf(root.dataset.colours ?? 'system') + 1) % names.length]
  if (next === 'system') delete root.dataset.colours
  else root.dataset.colours = next
  try {
    if (next === 'system') localStorage.removeItem('colours')
    else localStorage.setItem('colours', next)
  } catch {}
  showColours()
})
showColours()

// Navigation on narrow screens.
const menu = document.getElementById('menu')
menu.addEventListener('click', () => {
  const open = root.classList.toggle('menu')
  menu.setAttribute('aria-expanded', String(open))
})
const current = document.querySelector('nav [aria-current]')
if (current) {
  const nav = document.getElementById('navigation')
  if (current.offsetTop > nav.clientHeight - 60) nav.scrollTop = current.offsetTop - nav.clientHeight / 2
}

// Section that is being read.
const marks = new Map([...document.querySelectorAll('aside a')].map((a) => [decodeURIComponent(a.hash.slice(1)), a]))
if (marks.size) {
  const headings = [...document.querySelectorAll('article h2')]
  const mark = () => {
    const above = headings.filter((heading) => heading.getBoundingClientRect().top < 120).at(-1) ?? headings[0]
    for (const [id, a] of marks) a.classList.toggle('here', id === above?.id)
  }
  addEventListener('scroll', mark, { passive: true })
  mark()
}

// Copying of commands and files.
for (const block of document.querySelectorAll('article pre')) {
  const button = document.createElement('button')
  button.className = 'copy'
  button.type = 'button'
  button.textContent = 'Copy'
  button.addEventListener('click', async () => {
    await navigator.clipboard.writeText(block.querySelector('code').textContent)
    button.textContent = 'Copied'
    setTimeout(() => (button.textContent = 'Copy'), 1500)
  })
  block.parentElement.classList.add('block')
  block.parentElement.append(button)
}

// Search.
const query = document.getElementById('query')
const results = document.getElementById('results')
let loading
function load() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement('script')
    script.src = `${base}/search_index.js`
    script.onload = () => resolve(globalThis.searchIndex.map(([location, title, text]) => ({ location, title, text, low: text.toLowerCase() })))
    script.onerror = reject
    document.head.append(script)
  })
  return loading
}
const titleOf = new Map()
function find(entries, words) {
  if (!titleOf.size) for (const entry of entries) if (!entry.location.includes('#')) titleOf.set(entry.location, entry.title)
  const found = []
  for (const entry of entries) {
    const title = entry.title.toLowerCase()
    let score = entry.location.includes('#') ? 0 : 3
    for (const word of words) {
      const at = title.indexOf(word)
      const inText = entry.low.indexOf(word)
      if (at < 0 && inText < 0) { score = -1; break }
      if (at >= 0) score += title === word ? 60 : at === 0 ? 30 : 20
      if (inText >= 0) score += Math.min(8, entry.low.split(word).length - 1)
    }
    // Most readers look for how something works, not for its history.
    if (/^(decisions|CHANGELOG|performance|reliability|security|ARCHITECTURE|CONTRIBUTING)/.test(entry.location)) score /= 3
    if (score > 0) found.push({ entry, score })
  }
  return found.sort((a, b) => b.score - a.score).slice(0, 12)
}
function excerpt(entry, words) {
  const at = Math.max(0, Math.min(...words.map((word) => entry.low.indexOf(word)).filter((at) => at >= 0), entry.text.length) - 50)
  const text = entry.text.slice(at, at + 160)
  const parts = document.createElement('span')
  const pattern = new RegExp(`(${words.map((word) => word.replace(/[^\w]/g, '\\$&')).join('|')})`, 'i')
  text.split(pattern).forEach((part, index) => {
    if (index % 2) {
      const strong = document.createElement('mark')
      strong.textContent = part
      parts.append(strong)
    } else parts.append(part)
  })
  return parts
}
async function search() {
  const words = query.value.toLowerCase().split(/\s+/).filter(Boolean)
  if (!words.length) { results.hidden = true; return }
  const entries = await load()
  const found = find(entries, words)
  results.replaceChildren(...found.map(({ entry }) => {
    const a = document.createElement('a')
    a.href = `${base}/${entry.location}`
    const title = document.createElement('strong')
    const of = titleOf.get(entry.location.split('#')[0])
    title.textContent = of && of !== entry.title ? `${of} › ${entry.title}` : entry.title
    a.append(title, excerpt(entry, words))
    return a
  }))
  if (!found.length) results.textContent = 'No page contains these words.'
  results.hidden = false
}
query.addEventListener('focus', load, { once: true })
query.addEventListener('input', search)
addEventListener('keydown', (event) => {
  if (event.key === '/' && !/^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName)) { event.preventDefault(); query.focus() }
  if (event.key === 'Escape') { results.hidden = true; query.blur() }
  const links = [...results.querySelectorAll('a')]
  if (results.hidden || !links.length || !['ArrowDown', 'ArrowUp', 'Enter'].includes(event.key)) return
  const at = links.indexOf(document.activeElement)
  if (event.key === 'Enter') { if (at < 0 && document.activeElement === query) links[0].click(); return }
  event.preventDefault()
  links[Math.max(0, Math.min(links.length - 1, at + (event.key === 'ArrowDown' ? 1 : -1)))].focus()
})
document.addEventListener('click', (event) => {
  if (!event.target.closest('.search')) results.hidden = true
})
