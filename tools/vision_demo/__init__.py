"""`make demo-vision` and its model, which reads numbers and colours from pictures. It is not part of the wheel: the
demo runs from a checkout, where `tools.train_vision_demo` trains the model.
"""
