// Joins a player in Python with the ones of its name on the page: each side's step becomes the other's.
// It shows nothing, so it needs no output cell: the notebook loads it as soon as the kernel opens it.
export default {
  initialize({ model }) {
    const name = model.get("player");
    const roots = () => globalThis.dlearnPlayers?.get(name) ?? [];
    const known = new WeakSet();

    function moveTo(root) {
      const { dlearnPlayer: player } = root;
      if (player.step !== model.get("step")) player.go(model.get("step"));
      tell(player.step); // where it can go: with its control messages hidden it has fewer steps
    }

    function tell(step) {
      if (step === model.get("step")) return;
      model.set("step", step);
      model.save_changes();
    }

    const moveAll = () => [...roots()].forEach(moveTo);
    const onStep = (event) => event.target.dataset.player === name && tell(event.detail.step);
    // A player may come onto the page before this or long after it, and more than once.
    const onChange = () => {
      for (const root of roots()) {
        if (known.has(root)) continue;
        known.add(root);
        moveTo(root);
      }
    };
    const observer = new MutationObserver(onChange);

    model.on("change:step", moveAll);
    document.addEventListener("dlearn-step", onStep);
    observer.observe(document.body, { childList: true, subtree: true });
    onChange();
    return () => {
      model.off("change:step", moveAll);
      document.removeEventListener("dlearn-step", onStep);
      observer.disconnect();
    };
  },
};
