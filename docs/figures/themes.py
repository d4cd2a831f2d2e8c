"""The colors of the pictures that have a light and a dark version, by name."""

THEMES = {
    "light": {
        "ink": "#1f2933",
        "faint": "#e4e7eb",
        "line": "#9aa5b1",
        "segment": "#3454d1",
        "memory": "#f0a202",
    },
    "dark": {
        "ink": "#e4e7eb",
        "faint": "#323f4b",
        "line": "#7b8794",
        "segment": "#7b93ff",
        "memory": "#f5b83d",
    },
}
