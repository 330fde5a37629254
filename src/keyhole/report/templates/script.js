// Opens the finding that an address points to, copies its address, unfolds all for print.
// Without it the page loses nothing but the buttons, which are hidden until it runs.
(() => {
  const reveal = () => {
    let id = location.hash.slice(1);
    try { id = decodeURIComponent(id); } catch { /* somebody's own fragment: taken as it is */ }
    const target = id && document.getElementById(id);
    if (!target) return;
    for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  reveal();
  if (navigator.clipboard) for (const button of document.querySelectorAll("button[data-link]")) button.hidden = false;
  addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-link]");
    if (!button) return;
    const address = new URL("#" + encodeURIComponent(button.dataset.link), location.href);
    try { await navigator.clipboard.writeText(address.href); button.textContent = "Copied"; } catch { button.textContent = "Copy the link beside this"; }
  });
  let folded = [];
  addEventListener("beforeprint", () => { folded = [...document.querySelectorAll("details:not([open])")]; for (const one of folded) one.open = true; });
  addEventListener("afterprint", () => { for (const one of folded) one.open = false; });
})();
