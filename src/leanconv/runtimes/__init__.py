"""Running a network on other machines and in other libraries: what can run it, timing it, exporting it."""
