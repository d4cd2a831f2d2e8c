"""Programs on the public API for other fields than language: each solves a small task in minutes on a CPU."""
