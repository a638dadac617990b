"""The planning wing: hardware, shapes, step cost, acceptance, frontier, schedule, controller. No torch."""
