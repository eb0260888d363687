"""New files of a model's weights: `mixes` says which tensor gets which type, `plan` for one file, `imatrix` how much each column
counts, `collect` where that comes from, `convert` writes the file."""
