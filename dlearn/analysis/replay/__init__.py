"""A trace as a walk of steps, with what each rank holds after each step; nothing here draws."""
