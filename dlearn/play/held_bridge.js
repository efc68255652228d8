// Joins a held run in Python with its stages on the page: the state goes there, what is clicked comes back. It shows
// nothing by itself; after the page was loaded again the kernel opens it again, with the state of now.
export default {
  initialize({ model }) {
    const roots = () => document.querySelectorAll(`[data-held="${model.get("run")}"]`);
    const known = new WeakSet();
    const show = (root) => {
      if (!root.dlearnHeld) return;
      known.add(root);
      root.dlearnHeld.show(model.get("state"), true);
    };
    const showAll = () => roots().forEach(show);
    const onChange = () => roots().forEach((root) => known.has(root) || show(root));
    const onAct = (event) => {
      if (event.target.dataset.held === model.get("run")) model.send(event.detail);
    };
    const observer = new MutationObserver(onChange);

    model.on("change:state", showAll);
    document.addEventListener("dlearn-held", onAct);
    observer.observe(document.body, { childList: true, subtree: true });
    showAll();
    return () => {
      model.off("change:state", showAll);
      document.removeEventListener("dlearn-held", onAct);
      observer.disconnect();
    };
  },
};
