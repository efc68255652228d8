// One slide at a time: arrow keys, page up and down, space, home and end, swipes, and the two buttons.
(() => {
  const slides = [...document.querySelectorAll(".slide")];
  const [nav, said] = [document.querySelector("nav"), document.querySelector(".said")];
  const [back, on] = nav.querySelectorAll("button");
  let now = 0;

  // A picture that is a little too high becomes smaller; of a very high one the text would be too small: it scrolls.
  const fit = () => {
    const picture = slides[now].querySelector(".picture");
    if (!picture) return;
    picture.style.maxWidth = "";
    const share = picture.offsetHeight / picture.closest(".scrolls").clientHeight;
    if (share > 1 && share < 1.4) picture.style.maxWidth = `${Math.floor(picture.offsetWidth / share)}px`;
  };

  const show = (number, focus = true) => {
    now = Math.min(Math.max(number, 0), slides.length - 1);
    slides.forEach((slide, i) => slide.classList.toggle("now", i === now));
    const place = `${now + 1} of ${slides.length}`;
    nav.querySelector(".number").textContent = place;
    nav.querySelector("progress").value = now + 1;
    back.disabled = now === 0;
    on.disabled = now === slides.length - 1;
    fit();
    history.replaceState(null, "", `#slide-${now + 1}`);
    if (focus) {
      slides[now].focus({ preventScroll: true });
      said.textContent = `Slide ${place}: ${slides[now].firstElementChild.textContent}`;
    }
  };

  const scrolls = (target) => {
    const box = target.closest && target.closest(".scrolls, details");
    return box && box.scrollHeight > box.clientHeight;
  };
  const steps = {
    ArrowRight: 1, PageDown: 1, ArrowDown: 1, " ": 1, ArrowLeft: -1, PageUp: -1, ArrowUp: -1,
    Home: -slides.length, End: slides.length,
  };
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || !(event.key in steps)) return;
    // A button or a summary takes the space bar itself; what can be scrolled takes the keys that scroll.
    if (event.key === " " && event.target.closest("button, summary")) return;
    if ((event.key === "ArrowDown" || event.key === "ArrowUp") && scrolls(event.target)) return;
    event.preventDefault();
    show(now + (event.key === " " && event.shiftKey ? -1 : steps[event.key]));
  });
  nav.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) show(now + Number(button.dataset.go));
  });
  // A click on nothing goes on, or back in the left third; text can still be marked.
  document.querySelector("main").addEventListener("click", (event) => {
    if (event.target.closest("summary, details, .scrolls") || String(getSelection())) return;
    show(now + (event.clientX < innerWidth / 3 ? -1 : 1));
  });
  let began = null;
  document.addEventListener("touchstart", (event) => { began = event.changedTouches[0]; }, { passive: true });
  document.addEventListener("touchend", (event) => {
    const ended = event.changedTouches[0];
    const [dx, dy] = began ? [ended.clientX - began.clientX, ended.clientY - began.clientY] : [0, 0];
    if (Math.abs(dx) > 60 && Math.abs(dx) > 2 * Math.abs(dy)) show(now + (dx < 0 ? 1 : -1));
  });

  addEventListener("resize", fit);
  document.body.classList.add("deck");
  nav.hidden = false;
  show(Number((location.hash.match(/^#slide-(\d+)$/) || [0, 1])[1]) - 1, false);
})();
