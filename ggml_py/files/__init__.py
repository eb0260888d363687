"""Files: GGUF read by memory map, output files that are whole or not there, the demo model."""
