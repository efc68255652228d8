// Joins a player or a paused job in Python with the pages of its name: Python's state goes to them, and the step of a
// player, or what is clicked, comes back. It shows nothing, so it needs no output cell: the notebook loads it as soon
// as the kernel opens it, and again with the state of then after the page was loaded again.
export default {
  initialize({ model }) {
    const name = model.get("name");
    const roots = () => [...(globalThis.dlearnPages?.get(name) ?? [])];
    const known = new WeakSet();

    function show(root) {
      known.add(root);
      const step = root.dlearnShow(model.get("state"));
      if (step !== undefined) tell(step); // Where it can go: with its control messages hidden it has fewer steps.
    }

    function tell(step) {
      if (step === model.get("state")) return;
      model.set("state", step);
      model.save_changes();
    }

    const showAll = () => roots().forEach(show);
    // A page may come before this or long after it, and more than once.
    const onChange = () => roots().forEach((root) => known.has(root) || show(root));
    const onStep = (event) => event.target.dataset.player === name && tell(event.detail.step);
    const onAct = (event) => event.target.dataset.paused === name && model.send(event.detail);
    const observer = new MutationObserver(onChange);

    model.on("change:state", showAll);
    document.addEventListener("dlearn-step", onStep);
    document.addEventListener("dlearn-paused", onAct);
    observer.observe(document.body, { childList: true, subtree: true });
    onChange();
    return () => {
      model.off("change:state", showAll);
      document.removeEventListener("dlearn-step", onStep);
      document.removeEventListener("dlearn-paused", onAct);
      observer.disconnect();
    };
  },
};
