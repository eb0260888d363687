"""Files: GGUF read by memory map, output files that are whole or not there, models of a hub, the demo model."""
