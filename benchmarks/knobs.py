"""How long a student waits after letting go of a slider: both jobs run again, are counted, and the picture is drawn."""

import os

from measuring import median_text

os.environ.setdefault("MPLBACKEND", "agg")

from dlearn.lessons.knobs import CHOICES, Knobs
from dlearn.lessons.split import Size

TURNS = 20


def main() -> None:
    knobs = Knobs(Size(B=8, C=8, H=16, W=16))
    seconds = []
    for turn in range(TURNS):
        name = list(CHOICES)[turn % len(CHOICES)]
        slider = knobs.sliders[name]
        others = [value for value in CHOICES[name] if value != slider.value]
        slider.value = others[turn % len(others)]
        seconds.append(knobs.seconds)
    knobs.close()
    print(f"from a slider's release to the new picture, {TURNS} turns: {median_text(seconds)} s")


if __name__ == "__main__":
    main()
