"""Graphs of nodes, and the passes that make a program of one, in their order.

graph     tensors and nodes of one step of a model
place     every node gets a device
fuse      runs of nodes become fused ops; fused ops without a kernel become their parts
elide     results are written straight to where they would be copied
split     runs of nodes of one device, with copies between them
plan      which tensors share memory
program   nodes bound to kernels, and how they run
"""
