"""The weights at O2 to O5: which tensors are converted, their float32 masters, and the optimizer's state.

Owns every conversion of a parameter, of a buffer or of an optimizer's state, and its undo. Must not know the loss
scale, nor whether a step is skipped. Begin with `conversion_plan` (the type of each tensor), then `conversion` and
`master_weights`.
"""
