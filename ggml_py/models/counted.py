"""What files do not say and llama.cpp decides by counting: it is decided the same way here, by these numbers alone."""
COMMAND_R_NORMS = 64    # layers, or more, of `command-r` that norms the heads of Q and K (Command R+)
EXAONE4_WINDOWS = 64    # layers of `exaone4` that has windows, and no rotation in the others (32B)
LLAMA4_NO_NORMS = 128   # experts of `llama4` that does not norm the heads of Q and K (Maverick)
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # of models whose scores are scaled as if heads shared the channels of the embedding
