/** Makes a box reachable by keyboard while it scrolls sideways. */
export function scrollable(node: HTMLElement): { destroy: () => void } {
  const look = () => {
    if (node.scrollWidth > node.clientWidth + 1) node.tabIndex = 0;
    else node.removeAttribute('tabindex');
  };
  const observer = new ResizeObserver(look);
  observer.observe(node);
  if (node.firstElementChild) observer.observe(node.firstElementChild);
  look();
  return { destroy: () => observer.disconnect() };
}
