"""The weights at O2 to O5: which are converted, the float32 masters behind them, and what an optimizer keeps of them.

Owns every conversion of a parameter, a buffer or an optimizer's state, and the way back. Must not know of the loss
scale, nor of whether a step is skipped. Begin with `conversion_plan` (which tensor gets which type), then
`conversion` and `master_weights`.
"""
